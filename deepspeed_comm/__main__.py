"""The command `dscomm`, which is `python -m deepspeed_comm`, too: the programs of this package.

    dscomm info [--json]       versions, this host, and the ways between ranks here
    dscomm config [--json]     every setting: its value, its default, and where the value is from
    dscomm doctor ...          the faults of this host
    dscomm bench ...           times collectives of the ranks that torchrun starts
    dscomm plot LOG FIGURE     a figure of a log that save_log() wrote
    dscomm records FOLDER ...  flight records that ranks wrote, through torch's analyser

Each has --help. The exit status is the program's; 2 for a wrong word.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

PROGRAMS = {
    "info": "deepspeed_comm.doctor.info",
    "config": "deepspeed_comm.doctor.config",
    "doctor": "deepspeed_comm.doctor.__main__",
    "bench": "deepspeed_comm.bench.__main__",
    "plot": "deepspeed_comm.comms_log.plot",
    "records": "deepspeed_comm.flight_record",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program that the first word names, with the other words as its own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if given else 2
    word, *rest = given
    if word not in PROGRAMS:
        print(
            f"dscomm: expected one of {', '.join(PROGRAMS)}, got {word!r} (dscomm --help)",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"dscomm {word}", *rest]
    runpy.run_module(PROGRAMS[word], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
