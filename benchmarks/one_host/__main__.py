"""dscomm beside its peers on one host: builds them, runs all in turns, prints tables.

    python -m benchmarks.one_host [--full] [--peers dscomm vllm] [--rounds 4] [--out FOLDER]
    python -m benchmarks.one_host --messages
    python -m benchmarks.one_host --before ../old --peers dscomm pool torch

docs/benchmarks.md describes the measurements and the tables. The exit status is 1 if a result was
wrong or dscomm itself failed, else 0: an unavailable peer is only reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.one_host import plot, tables
from benchmarks.one_host.fetch import Unavailable
from benchmarks.one_host.peers import (
    BEFORE,
    OF_MESSAGES,
    OURS,
    PEERS,
    ROOT,
    Peer,
    in_checkout,
    kind_of,
    own_programs,
    title_of,
)
from benchmarks.one_host.rows import Row, pairs_of, rows_of
from benchmarks.one_host.runs import OPERATIONS, Plan, Run, run_once
from benchmarks.one_host.states import STATES, cpus_of_ranks
from deepspeed_comm._machine import describe_place, processor_name
from deepspeed_comm.bench.flags import byte_size
from deepspeed_comm.comms_log.files import replaced_when_complete

SIZES = tuple(8 << k for k in (0, 3, 6, 9, 12, 15, 17, 19, 21, 23))  # 8 bytes to 64 MB
MESSAGE_SIZES = (8, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
# Above this, Python needs longer to check a result than all other peers for their measurements.
FROM_PYTHON, MOST_FROM_PYTHON = ("torch", "gloo"), 16 << 20


def main() -> int:
    options = parsed()
    console = Console(width=None if sys.stdout.isatty() else 200)
    if cpus_of_ranks(os.sched_getaffinity(0), 2) is None:
        console.print("bench: two cores are needed, and this process may use fewer")
        return 1
    peers, missing = prepared(names_of(options), options.before, console)
    if "dscomm" in missing:
        return 1
    runs = measured(peers, options, console)
    rows = rows_of(runs)
    report(rows, runs, options, console)
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {name: peer.version for name, peer in peers.items()}
    # A run without all-reduces does not overwrite the results of all-reduces.
    name = "one_host.json" if "all_reduce" in options.operations else "one_host_ping_pong.json"
    write(options.out / name, rows, runs, versions, missing, options)
    about = f"{processor_name()}, {datetime.date.today()}"
    files = plot.draw(rows, options.out, about)
    for file in [options.out / name, *files]:
        console.print(f"written: {file}", soft_wrap=True)
    wrong = sum(row["wrong"] for run in runs for row in run.rows)
    failed = any(run.failure for run in runs if run.peer in OURS)
    console.print(f"wrong elements in {len(runs)} runs: {wrong} {'FAILED' if wrong else 'OK'}")
    return 1 if wrong or failed else 0


def has(op: str, peer: str) -> bool:
    """Whether the peer is measured in the operation."""
    return op == "all_reduce" or kind_of(peer) in OF_MESSAGES


def names_of(options: argparse.Namespace) -> list[str]:
    """The peers in the order of a round; one of --before follows that of this checkout."""
    names: list[str] = []
    for name in options.peers:
        if any(has(op, name) for op in options.operations):
            names += [name, BEFORE + name] if options.before and name in OURS else [name]
    return names


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.one_host", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--full", action="store_true", help="256 MB, four ranks, large sizes from Python; 9 rounds")
    add("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    add("--messages", action="store_const", dest="operations", const=["ping_pong"],
        help="as --operations ping_pong")  # fmt: skip
    add("--sizes", nargs="+", type=byte_size, help="in bytes; K and M are powers of 1024")
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add("--modes", nargs="+", choices=["tight", "touch"], default=["tight", "touch"])
    add("--ranks", nargs="+", type=int, choices=[2, 4, 8], help="2; with --full 2 4")
    add("--rounds", type=int, help="runs of each peer, dtype and number of ranks: 4; 9 with --full")
    add("--budget-ms", type=float, default=20.0, help="timed calls of one size, mode and run")
    add("--limit-s", type=float, default=240.0, help="after which a run is given up")
    add("--before", type=Path, metavar="FOLDER",
        help="another checkout, set up by `make setup`: measures its dscomm too")  # fmt: skip
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args()
    largest = [256 << 20] if options.full else []
    options.sizes = {
        "all_reduce": tuple(options.sizes or (*SIZES, *largest)),
        "ping_pong": tuple(options.sizes or MESSAGE_SIZES),
    }
    for op, unit in (("all_reduce", 4), ("ping_pong", 8)):
        if op in options.operations and any(size % unit for size in options.sizes[op]):
            parser.error(f"--sizes: those of {op} are multiples of {unit} bytes")
    options.ranks = options.ranks or ([2, 4] if options.full else [2])
    options.rounds = options.rounds or (9 if options.full else 4)
    options.out = options.out.absolute()
    options.before = options.before and options.before.resolve()
    return options


def prepared(
    names: list[str], before: Path | None, console: Console
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that are ready, and the reasons why the others are not."""
    ready: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            with console.status(f"preparing {title_of(name)}"):
                is_before = before is not None and name.startswith(BEFORE)
                ready[name] = in_checkout(before, kind_of(name)) if is_before else PEERS[name]()
        except Unavailable as error:
            missing[name] = str(error)
            line = f"{title_of(name)} is left out: {error}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return ready, missing


def kinds(options: argparse.Namespace) -> list[tuple[str, int, str]]:
    """(operation, ranks, dtype), in the order of the tables. Messages are of two ranks and of one
    dtype, because nothing is computed with their data."""
    found = [
        ("all_reduce", ranks, dtype)
        for ranks in options.ranks
        for dtype in options.dtypes
        if "all_reduce" in options.operations
    ]
    return found + [("ping_pong", 2, "float32")] * ("ping_pong" in options.operations)


def measured(peers: dict[str, Peer], options: argparse.Namespace, console: Console) -> list[Run]:
    """Measures all peers in every round, so that noise and moves of cores meet them equally."""

    def plan_of(name: str, op: str) -> Plan:
        sizes = options.sizes[op]
        if kind_of(name) in FROM_PYTHON and not options.full:
            sizes = tuple(size for size in sizes if size <= MOST_FROM_PYTHON) or sizes
        return Plan(op, sizes, tuple(options.modes), options.budget_ms, options.limit_s)

    prober = own_programs() / "one_host_probe"
    turns = [
        (name, op, ranks, dtype)
        for _ in range(options.rounds)
        for op, ranks, dtype in kinds(options)
        for name in peers
        if has(op, name)
    ]
    runs: list[Run] = []
    failures: Counter[tuple[str, str, int]] = Counter()
    told: set[str] = set()
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn())
    # Drawn only between runs, so that no thread wakes up during them.
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True,
                  auto_refresh=False, disable=not console.is_terminal) as bar:  # fmt: skip
        task = bar.add_task("", total=len(turns))
        for name, op, ranks, dtype in turns:
            bar.update(task, description=title_of(name), refresh=True)
            # A peer that failed twice would fail again, and may use up its time limit.
            if failures[name, op, ranks] < 2:
                plan = plan_of(name, op)
                runs.append(run_once(name, peers[name], ranks, dtype, plan, prober))
                for line in set(runs[-1].refused) - told:
                    told.add(line)
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
                if runs[-1].failure:
                    failures[name, op, ranks] += 1
                    what = f"{title_of(name)}, {tables.title(op, dtype, ranks)}"
                    line = f"{what}: a run failed: {runs[-1].failure}"
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
            bar.update(task, advance=1, refresh=True)
    return runs


def report(rows: list[Row], runs: list[Run], options: argparse.Namespace, console: Console) -> None:
    console.print(f"{processor_name()}, {describe_place()}", highlight=False, soft_wrap=True)
    seen = states_seen(runs)
    counts = ", ".join(f"{seen[state]} {state}" for state in STATES)
    mixed = f"{seen['mixed']} were mixed and are left out"
    console.print(f"{len(runs)} runs; of their rows {counts}; {mixed}")
    for op, ranks, dtype in kinds(options):
        for mode in options.modes:
            for state in STATES:
                heading = f"{tables.title(op, dtype, ranks)}, {mode}, {state}"
                lines = tables.lines_of(rows, op, dtype, mode, state, ranks)
                if lines:
                    tables.show(console, lines, heading)
                else:
                    console.print(f"{heading}: not seen")
    if pairs := pairs_of(rows):
        tables.show_pairs(console, pairs)


def states_seen(runs: list[Run]) -> Counter[str]:
    return Counter(row["state"] for run in runs if not run.failure for row in run.rows)


def write(
    path: Path,
    rows: list[Row],
    runs: list[Run],
    versions: dict[str, str],
    missing: dict[str, str],
    options: argparse.Namespace,
) -> None:
    content: dict[str, Any] = {
        "processor": processor_name(),
        "timestamp": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "rounds": options.rounds,
        "budget_ms": options.budget_ms,
        "versions": {title_of(name): version for name, version in versions.items()},
        "left_out": {title_of(name): reason for name, reason in missing.items()},
        "runs": len(runs),
        "rows_of_runs": dict(states_seen(runs)),
        "refused": sorted({line for run in runs for line in run.refused}),
        "failed_runs": [f"{run.peer}: {run.failure}" for run in runs if run.failure],
        "probes_ns": [row["after_ns"] for run in runs for row in run.rows],
    }
    with replaced_when_complete(path) as file:
        # One line for each row, so that two results can be compared by eye.
        head = json.dumps(content)
        lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
        file.write(f'{head[:-1]},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
