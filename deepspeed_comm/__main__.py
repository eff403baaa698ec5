"""The command `dscomm`, also `python -m deepspeed_comm`: the programs of this package.

    dscomm info [--json]       show versions, this host, and the transports available on it
    dscomm config [--json]     show every setting: its value, its default, and its source
    dscomm doctor ...          check this host for faults
    dscomm bench ...           time collectives on the ranks that torchrun starts
    dscomm plot LOG FIGURE     draw a figure of a log written by save_log()
    dscomm records FOLDER ...  analyse the flight records of a job with torch's analyser

Each has --help. The exit status is the program's, or 2 for an unknown program.
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
    """Runs the program named by the first argument with the other arguments."""
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
