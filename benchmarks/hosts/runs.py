"""Jobs on hosts, and their measurements."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.hosts.libraries import Library
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import Job, start_ranks

RANK = str(Path(__file__).with_name("rank.py"))
LIMIT_S = 3600.0  # of a job
# More short calls are made, because their times scatter most; few long ones over a slow wire.
SHORT_BYTES, SHORT_TIMES = 128 << 10, 5
LONG_BYTES, LONG_ROUNDS, SLOW_MBIT = 4 << 20, 3, 1_000

# By collective, bytes and column ("dscomm debian", "mpi mpich", "gloo"): the median time in us.
Times = dict[str, dict[str, dict[str, float]]]


@dataclasses.dataclass
class Table:
    hosts: int
    local: int
    wire_mbit: int
    medians_us: Times

    @property
    def title(self) -> str:
        return f"{self.hosts} hosts x {self.local}, wire {wire_text(self.wire_mbit)}"


def wire_text(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit else "as it is"


def measure(
    count: int, local: int, wire: int, libraries: dict[str, Library], options: argparse.Namespace
) -> Table:
    """In each pass the libraries take turns; a time is the median of the jobs' times."""
    is_slow = 0 < wire <= SLOW_MBIT
    groups: dict[int, list[int]] = defaultdict(list)  # sizes by number of calls
    for size in options.sizes:
        calls = options.rounds * SHORT_TIMES if size <= SHORT_BYTES else options.rounds
        groups[min(LONG_ROUNDS, calls) if is_slow and size >= LONG_BYTES else calls].append(size)
    of_jobs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        if wire:
            hosts.limit(wire)
        placement = [host for host in range(count) for _ in range(local)]
        for number in range(options.passes):
            for (calls, sizes), (name, library) in itertools.product(
                groups.items(), libraries.items()
            ):
                rows = Path(folder, f"rows-{name}-{calls}-{number}.csv")
                # A barrier has no size, and is measured with the first size.
                collectives = [
                    kind
                    for kind in options.collectives
                    if kind != "barrier" or options.sizes[0] in sizes
                ]
                if not collectives:
                    continue
                flags = [*collectives, "-n", str(-(-calls // options.passes))]
                flags += ["-w", "2" if calls > LONG_ROUNDS else "1", "--touch", "--csv", str(rows)]
                # One check for each library is enough.
                flags += ["-c", "0" if options.unchecked or number > 0 else "1"]
                flags += ["--backend", "dscomm", "gloo"]
                run(hosts, placement, library, "times", json.dumps(sizes), *flags)
                with rows.open() as file:
                    for row in csv.DictReader(file):
                        contender = row["backend"]
                        column = contender if contender == "gloo" else f"{contender} {name}"
                        cell = (row["collective"], row["size_bytes"], column)
                        of_jobs[cell].append(float(row["time_p50_us"]))
    times: Times = {name: {} for name in options.collectives}
    for (collective, size, column), found in of_jobs.items():
        times[collective].setdefault(size, {})[column] = statistics.median(found)
    return Table(count, local, wire, times)


def run(hosts: Hosts, placement: list[int], library: Library, *arguments: str) -> Job:
    """Runs a job. Ends the benchmark if a rank fails, or has loaded another library."""
    env = library.environment
    with start_ranks(hosts, placement, RANK, *arguments, env=env, limit_s=LIMIT_S) as job:
        job.finish(LIMIT_S)
        if any(job.exit_codes().values()):
            sys.exit(job.report())
        loaded = {event.facts["version"] for event in job.wait_for("mpi", limit_s=0.0)}
    if loaded != {library.version}:
        sys.exit(f"bench-hosts: the ranks loaded {loaded} instead of {library.version}")
    return job


def overlaps(wire: int, library: Library, rounds: int) -> dict[str, dict[str, float]]:
    """On 2 hosts of 2 ranks, by backend and call of overlap.py: the median seconds."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        if wire:
            hosts.limit(wire)
        job = run(hosts, [0, 0, 1, 1], library, "overlap", str(rounds))
        seconds = job.results()[0]["seconds"]
    return {
        backend: {call: statistics.median(found) for call, found in calls.items()}
        for backend, calls in seconds.items()
    }


def bring_ups(
    count: int, local: int, libraries: dict[str, Library], rounds: int
) -> dict[str, list[float]]:
    """Seconds from the first rank's init_process_group() to the last one's first all-reduce, by
    column."""
    contenders = {f"dscomm {name}": library.environment for name, library in libraries.items()}
    contenders["gloo"] = {}
    seconds: dict[str, list[float]] = {column: [] for column in contenders}
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        placement = [host for host in range(count) for _ in range(local)]
        for _ in range(rounds):
            for column, env in contenders.items():
                arguments = ("bring-up", column.split()[0])
                with start_ranks(
                    hosts, placement, RANK, *arguments, env=env, store_apart=True
                ) as job:
                    results = job.results()
                began = min(result["began"] for result in results)
                ended = max(result["began"] + result["seconds"] for result in results)
                seconds[column].append(ended - began)
    return seconds
