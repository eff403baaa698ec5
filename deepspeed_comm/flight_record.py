"""Shows what the flight records of a job say, by torch's own analyser.

    dscomm records FOLDER [options of the analyser]

FOLDER holds the files that ranks wrote with DSCOMM_FLIGHT_RECORD_DIR, one for each rank, those of
several hosts in one folder. It prints the reason that each rank gave, then what torch's analyser
(torch.distributed.flight_recorder, torch 2.13) finds when it compares their collectives. `-j`
prints the calls side by side (with the package tabulate); `--allow-incomplete-ranks` goes on where
ranks have written nothing; `-h` lists the rest.

The analyser reads pickles; the files are JSON, which runs no code when it is read.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILE = re.compile(r"flight_record_(\d+)\.json")
_PREFIX = "rank_"


def read_folder(folder: str | Path) -> dict[int, dict[str, Any]]:
    """The records by rank. Raises OSError, or ValueError for a file that is none."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        if match := _FILE.fullmatch(path.name):
            record = json.loads(path.read_text())
            if not {"version", "pg_config", "entries"} <= set(record):
                raise ValueError(f"{path} is no flight record")
            found[int(match.group(1))] = record
    return found


def align(records: dict[int, dict[str, Any]]) -> None:
    """Leaves out of each group what not all ranks still have: a rank keeps the last calls of each
    of its groups. The analyser does so by the number of the record, over all groups at once."""
    first: dict[str, int] = {}
    for record in records.values():
        own: dict[str, int] = {}
        for entry in record["entries"]:
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            own[group] = min(number, own.get(group, number))
        for group, number in own.items():
            first[group] = max(number, first.get(group, number))
    for record in records.values():
        record["entries"] = [
            entry
            for entry in record["entries"]
            if entry["collective_seq_id"] >= first[entry["process_group"][0]]
        ]
        for number, entry in enumerate(record["entries"]):
            entry["record_id"] = number


def reasons(records: dict[int, dict[str, Any]]) -> list[str]:
    """Why each rank wrote, in the order in which they did."""
    by_time = sorted(records.items(), key=lambda item: item[1]["dscomm"]["written_ns"])
    return [f"rank {rank}: {record['dscomm']['reason']}" for rank, record in by_time]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        if not given:
            return 2
    try:
        from torch.distributed.flight_recorder import fr_trace
    except ImportError:
        print("torch.distributed.flight_recorder is missing; torch 2.13 has it", file=sys.stderr)
        return 1
    if given[0] in ("-h", "--help"):
        fr_trace.main(["--help"])
    folder, options = given[0], given[1:]
    try:
        records = read_folder(folder)
    except (OSError, ValueError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    if not records:
        print(f"{folder} has no flight_record_RANK.json", file=sys.stderr)
        return 1
    for line in reasons(records):
        print(line, flush=True)
    if {"-j", "--just_print_entries"} & set(options) and find_spec("tabulate") is None:
        print("the analyser prints no table without the package tabulate: pip install tabulate")
        return 1
    align(records)
    with tempfile.TemporaryDirectory() as pickles:
        for rank, record in records.items():
            (Path(pickles) / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(record))
        try:
            fr_trace.main([pickles, "--prefix", _PREFIX, *options])
        except AssertionError as error:  # as it says that ranks are missing
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
