"""Whole programs with dscomm and gloo: decodes, training, checkpoints, object collectives.

    python benchmarks/end_to_end [--quick] [--workloads NAME ...] [--rounds 3] [--json FILE]

Two ranks, each with one core and one thread. The contenders of a workload take turns, each time in
new processes; a figure is the median of its rounds. All contenders must come to the same tokens,
losses and bits. docs/benchmarks.md describes each row. A whole run also draws the figure of the
README. Exit status 1: some run failed, or had other results.
"""

from __future__ import annotations

import os

# Before torch is imported: ranks are forked, and the parent's OpenMP pool does not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

import argparse
import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

if int(torch.__version__.split(".")[0]) < 2:
    sys.exit(f"end_to_end: torch {torch.__version__} has no DTensor and no FSDP2")

import bars
from ranks import ROOT
from report import machine, print_table
from rounds import Found, measure

RESULTS = ROOT / "benchmarks" / "results" / "end_to_end.json"
# AutoTP is last: this process imports DeepSpeed for it, which changes torch.
WORKLOADS = (
    "decode_dtensor",
    "decode_all_reduce",
    "train_ddp",
    "train_fsdp2",
    "checkpoints",
    "objects",
    "overlap",
    "decode_autotp",
)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    found = Found()
    for name in options.workloads:
        workload = importlib.import_module(name).WORKLOAD
        measure(name, workload, options.rounds, options.quick, found, not options.unpinned)
    contenders = list(dict.fromkeys(name for row in found.rows for name in row.rounds))
    print_table(found.rows, contenders, not options.unpinned)
    for line in found.notes + found.disturbed + found.failures:
        print(line)
    if options.json:
        content = as_json(options, found)
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        if options.json == RESULTS and not found.failures:
            draw(content)
    sys.exit(1 if found.failures else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/end_to_end", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one round: does it run?")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--unpinned", action="store_true", help="ranks go where the kernel likes")
    parser.add_argument("--json", type=Path, help=f"{RESULTS.relative_to(ROOT)} for a whole run")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
    if options.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    is_whole = options.workloads == list(WORKLOADS) and not options.quick and not options.unpinned
    if options.json is None and is_whole:
        options.json = RESULTS
    return options


def draw(content: dict[str, Any]) -> None:
    try:
        bars.draw(content, RESULTS.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no figure: {error}")


def as_json(options: argparse.Namespace, found: Found) -> dict[str, Any]:
    return {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "quick": options.quick,
        "pinned": not options.unpinned,
        "rounds": options.rounds,
        "rows": [each for row in found.rows for each in row.as_json()],
        "notes": found.notes,
        "disturbed": found.disturbed,
        "failures": found.failures,
    }


if __name__ == "__main__":
    main()
