"""Analyses the flight records of a job with torch's analyser.

    dscomm records FOLDER [options of the analyser]

FOLDER has the files written with DSCOMM_FLIGHT_RECORD_DIR, one for each rank of all hosts. The
output is each rank's reason for writing, then the report of torch's analyser
(torch.distributed.flight_recorder, torch 2.13), which compares the ranks' collectives. `-j` prints
the calls side by side (needs the package tabulate). `--allow-incomplete-ranks` accepts missing
ranks. `-h` lists the other options.

The files are JSON, because loading a pickle can run code; the analyser gets pickles made from them.
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
    """Reads the records, by rank. Raises OSError, or ValueError for a file that is not a record."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        if match := _FILE.fullmatch(path.name):
            record = json.loads(path.read_text())
            if not {"version", "pg_config", "entries"} <= set(record):
                raise ValueError(f"{path} is not a flight record: move it out of the folder")
            found[int(match.group(1))] = record
    return found


def align(records: dict[int, dict[str, Any]]) -> None:
    """Keeps the calls of each group that all ranks still have: a rank keeps its latest calls only.

    Numbers the records anew: the analyser compares the numbers, which count all groups' calls.
    """
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
    """The reason of each rank for writing, in the order of time."""
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
        print("the analyser needs the package tabulate for -j: pip install tabulate")
        return 1
    align(records)
    with tempfile.TemporaryDirectory() as pickles:
        for rank, record in records.items():
            (Path(pickles) / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(record))
        try:
            fr_trace.main([pickles, "--prefix", _PREFIX, *options])
        except AssertionError as error:  # ranks are missing
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
