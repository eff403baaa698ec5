"""Collectives and messages between hosts: dscomm beside gloo and MPI's own, flat; and the bring-up.

    python benchmarks/hosts.py [--layouts 2x2 4x2 4x1] [--wires 0 10000 1000 300] [--json FILE]

Hosts are network namespaces on this machine (see tests/cluster/hosts.py): it needs root, and all
ranks share its cores. A wire is held to a rate in Mbit/s, each way, by tc's token bucket; 0 leaves
it as it is. All contenders of a table run in the same processes and take turns, so they meet the
same noise. Ranks meet before each call, so that none runs ahead; a time is the median of the calls,
of each of which the slowest rank counts. Sizes are counted as deepspeed_comm.bench counts them.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from hosts import Hosts, why_not  # noqa: E402
from jobs import start_ranks  # noqa: E402

RANK = str(ROOT / "benchmarks" / "hosts_rank.py")
COLLECTIVES = (
    "all_reduce all_gather reduce_scatter broadcast reduce gather scatter all_to_all send_recv "
    "ping_pong barrier"
).split()
# 64 MiB as well would take hours over the slow wires.
SIZES = [8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
LIMIT_S = 3600.0  # of one layout over one wire
# Hosts share the machine's cores, which MPI cannot know.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}

# By collective, bytes and contender: the median time in us.
Times = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", type=layout, default=[(2, 2), (4, 2), (4, 1)])
    parser.add_argument("--wires", nargs="+", type=int, default=[0, 10_000, 1_000, 300])
    parser.add_argument("--collectives", nargs="*", default=COLLECTIVES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each kind")
    parser.add_argument("--unchecked", action="store_true", help="verify no results: quicker")
    parser.add_argument("--bring-ups", type=int, default=5, help="of each backend; 0: none")
    parser.add_argument("--json", type=Path, help="also write the times there")
    options = parser.parse_args()
    if why_not():
        sys.exit(f"bench-hosts: {why_not()}")
    found = []
    for hosts, local in options.layouts:
        for wire in options.wires if options.collectives else []:
            times = measure(hosts, local, wire, options)
            found.append({"hosts": hosts, "local": local, "wire_mbit": wire, "medians_us": times})
            print_times(found[-1])
    if len(found) > 1:
        print_summary([each["medians_us"] for each in found])
    starts = bring_ups(*options.layouts[-1], options.bring_ups) if options.bring_ups else {}
    if options.json:
        options.json.write_text(json.dumps({"times": found, "bring_up_s": starts}, indent=1))


def layout(text: str) -> tuple[int, int]:
    """2x4: two hosts with four ranks each."""
    hosts, local = text.split("x")
    return int(hosts), int(local)


def measure(count: int, local: int, wire: int, options: argparse.Namespace) -> Times:
    times: Times = {name: {} for name in options.collectives}
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        if wire:
            hosts.limit(wire)
        placement = [host for host in range(count) for _ in range(local)]
        rows = Path(folder, "rows.csv")
        flags = [*options.collectives, "-n", str(options.rounds), "-w", "2", "--touch"]
        flags += ["-c", "0" if options.unchecked else "1"]
        flags += ["--backend", "dscomm", "gloo", "--csv", str(rows)]
        arguments = ("times", json.dumps(options.sizes), *flags)
        with start_ranks(hosts, placement, RANK, *arguments, env=YIELD, limit_s=LIMIT_S) as job:
            job.finish(LIMIT_S)
            if any(job.exit_codes().values()):
                sys.exit(job.report())
        with rows.open() as file:
            for row in csv.DictReader(file):
                of_size = times[row["collective"]].setdefault(row["size_bytes"], {})
                of_size[row["backend"]] = float(row["time_p50_us"])
    return times


def print_times(found: dict[str, Any]) -> None:
    wire = f"{found['wire_mbit']} Mbit/s" if found["wire_mbit"] else "as it is"
    print(f"\n{found['hosts']} hosts x {found['local']}, wire {wire}: float32, us")
    names = ("dscomm", "mpi", "gloo", "mpi/dscomm", "gloo/dscomm")
    print(f"{'':>16} {'bytes':>10} " + " ".join(f"{name:>11}" for name in names))
    for collective, sizes in found["medians_us"].items():
        for size, times in sizes.items():
            ours, mpi, gloo = times["dscomm"], times["mpi"], times["gloo"]
            cells = f"{ours:>11.1f} {mpi:>11.1f} {gloo:>11.1f} {mpi / ours:>11.2f}"
            print(f"{collective:>16} {size:>10} {cells} {gloo / ours:>11.2f}", flush=True)


def print_summary(tables: list[Times]) -> None:
    """Of each collective from 4 KiB on, over all layouts and wires: the better of the others."""
    print("\nfrom 4 KiB on, time of the faster of MPI and gloo divided by dscomm's")
    print(f"{'':>16} {'worst':>6} {'median':>6} {'best':>6}")
    for collective in tables[0]:
        ratios = [
            min(times["mpi"], times["gloo"]) / times["dscomm"]
            for table in tables
            for size, times in table[collective].items()
            if int(size) >= 4096
        ]
        if ratios:
            middle = statistics.median(ratios)
            print(f"{collective:>16} {min(ratios):>6.2f} {middle:>6.2f} {max(ratios):>6.2f}")


def bring_ups(count: int, local: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from the first rank's init_process_group() to the last one's first all-reduce."""
    seconds: dict[str, list[float]] = {"dscomm": [], "gloo": []}
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        placement = [host for host in range(count) for _ in range(local)]
        for _ in range(rounds):
            for backend, of_backend in seconds.items():
                with start_ranks(
                    hosts, placement, RANK, "bring-up", backend, store_apart=True
                ) as job:
                    results = job.results()
                began = min(result["began"] for result in results)
                ended = max(result["began"] + result["seconds"] for result in results)
                of_backend.append(ended - began)
    medians = {backend: statistics.median(times) for backend, times in seconds.items()}
    print(
        f"\nbring-up of {count} hosts x {local}, median of {rounds}: dscomm "
        f"{medians['dscomm']:.3f} s, gloo {medians['gloo']:.3f} s"
    )
    return seconds


if __name__ == "__main__":
    main()
