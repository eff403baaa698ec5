"""Collectives between hosts, dscomm beside gloo; all-reduce beside MPI's own, flat, too; and the
bring-up.

    python benchmarks/hosts.py [--layouts 2x1 2x2 4x2] [--wires 0 10000 1000] [--json FILE]

Hosts are network namespaces on this machine (see tests/cluster/hosts.py): it needs root, and all
ranks share its cores. A wire is held to a rate in Mbit/s, each way, by tc's token bucket; 0 leaves
it as it is. All contenders of a table run in the same processes and take turns, so they meet the
same noise; a time is the median of the samples, of each of which the slowest rank counts.
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
from jobs import mpirun, start_ranks  # noqa: E402

RANK = str(ROOT / "benchmarks" / "hosts_rank.py")
SIZES = [8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
OTHERS = "all_gather reduce_scatter broadcast reduce gather scatter all_to_all".split()
# What all ranks have together, as deepspeed_comm.bench counts; gloo takes a second for 64 MiB.
SIZES_OF_OTHERS = ["-b", "1K", "-e", "16M", "-f", "16"]
LIMIT_S = 900.0  # of one layout over one wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", type=layout, default=[(2, 1), (2, 2), (4, 2)])
    parser.add_argument("--wires", nargs="+", type=int, default=[0, 10_000, 1_000])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="of all_reduce, bytes")
    parser.add_argument("--collectives", nargs="*", default=OTHERS, help="besides all_reduce")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each time")
    parser.add_argument("--bring-ups", type=int, default=5, help="of each backend; 0: none")
    parser.add_argument("--json", type=Path, help="also write the times there")
    options = parser.parse_args()
    if why_not():
        sys.exit(f"bench-hosts: {why_not()}")
    found = []
    for hosts, local in options.layouts:
        for wire in options.wires:
            medians = measure(hosts, local, wire, options.sizes, options.rounds)
            found.append({"hosts": hosts, "local": local, "wire_mbit": wire, "medians_us": medians})
            if options.sizes:
                print_times(found[-1])
            if options.collectives:
                others = measure_others(hosts, local, wire, options.collectives, options.rounds)
                found[-1]["others_us"] = others
                print_others(others)
    starts = bring_ups(*options.layouts[-1], options.bring_ups) if options.bring_ups else {}
    if options.json:
        options.json.write_text(json.dumps({"times": found, "bring_up_s": starts}, indent=1))


def layout(text: str) -> tuple[int, int]:
    """2x4: two hosts with four ranks each."""
    hosts, local = text.split("x")
    return int(hosts), int(local)


def measure(
    count: int, local: int, wire: int, sizes: list[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Median times of all_reduce in us, by size and contender."""
    if not sizes:
        return {}
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        if wire:
            hosts.limit(wire)
        arguments = ["times", json.dumps(sizes), str(rounds)]
        with mpirun(hosts, local, RANK, *arguments, limit_s=LIMIT_S) as job:
            return job.results(LIMIT_S)[0]["medians"]


def measure_others(
    count: int, local: int, wire: int, collectives: list[str], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Median times in us, by collective, bytes and backend."""
    medians: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
        if wire:
            hosts.limit(wire)
        placement = [host for host in range(count) for _ in range(local)]
        rows = Path(folder, "rows.csv")
        flags = [*collectives, *SIZES_OF_OTHERS, "-n", str(rounds), "-w", "2"]
        flags += ["--backend", "dscomm", "gloo", "--csv", str(rows)]
        with start_ranks(hosts, placement, RANK, "bench", *flags, limit_s=LIMIT_S) as job:
            job.finish(LIMIT_S)
            if any(job.exit_codes().values()):
                sys.exit(job.report())
        with rows.open() as file:
            for row in csv.DictReader(file):
                of_size = medians.setdefault(row["collective"], {}).setdefault(
                    row["size_bytes"], {}
                )
                of_size[row["backend"]] = float(row["time_p50_us"])
    return medians


def print_others(medians: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'':>16} {'bytes':>10} {'dscomm':>10} {'gloo':>10} gloo/dscomm")
    for collective, sizes in medians.items():
        for size, times in sizes.items():
            print(
                f"{collective:>16} {size:>10} {times['dscomm']:>10.1f} {times['gloo']:>10.1f} "
                f"{times['gloo'] / times['dscomm']:>11.2f}",
                flush=True,
            )


def print_times(found: dict[str, Any]) -> None:
    wire = f"{found['wire_mbit']} Mbit/s" if found["wire_mbit"] else "as it is"
    print(f"\n{found['hosts']} hosts x {found['local']}, wire {wire}: all_reduce of float32, us")
    print(f"{'bytes':>10} {'dscomm':>10} {'mpi':>10} {'gloo':>10} {'mpi/dscomm':>11} gloo/dscomm")
    for size, times in found["medians_us"].items():
        ours = times["dscomm"]
        print(
            f"{size:>10} {ours:>10.1f} {times['mpi']:>10.1f} {times['gloo']:>10.1f} "
            f"{times['mpi'] / ours:>11.2f} {times['gloo'] / ours:>11.2f}",
            flush=True,
        )


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
