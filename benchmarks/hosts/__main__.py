"""Collectives and messages between hosts: dscomm beside gloo and MPI's own; overlap; bring-up.

    python -m benchmarks.hosts [--layouts 2x2 4x2 4x1] [--wires 0 10000 1000 300]
        [--mpis debian openmpi5 mpich] [--ours debian] [--json FILE]

Hosts are network namespaces on this machine (see tests/cluster/hosts.py): it needs root, and all
ranks share its cores. A wire is held to a rate in Mbit/s, each way, by tc's token bucket; 0 leaves
it as it is.

dscomm and MPI alone are measured over three MPI libraries: Debian's Open MPI 4, PyPI's Open MPI 5
and PyPI's MPICH 5. A process can load only one, so each library has separate jobs, which take
turns in passes. In a job, dscomm, gloo and MPI run in the same processes and take turns, so they
meet the same noise. gloo is in every job, because its threads slow down the others. Ratios are to
dscomm over one of the libraries, --ours.

Ranks meet before each call, so that none runs ahead. For each call, the slowest rank counts. A time
is the median of the calls of a job, and then the median of the jobs. Calls of up to 128 KiB are
made five times as often as --rounds says; those from 4 MiB on over wires of up to 1,000 Mbit/s only
three times in all. Sizes are counted as deepspeed_comm.bench counts them.

The overlap of communication and compute (overlap.py) is measured on 2 hosts of 2 ranks, for dscomm
over --ours and for gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

from benchmarks.hosts.libraries import LIBRARIES, available
from benchmarks.hosts.runs import bring_ups, measure, overlaps
from benchmarks.hosts.tables import print_overlap, print_summaries, print_table
from tests.cluster.hosts import why_not

COLLECTIVES = (
    "all_reduce all_gather reduce_scatter broadcast reduce gather scatter all_to_all send_recv "
    "ping_pong barrier"
).split()
# Without 64 MiB, which would take hours over the slow wires.
SIZES = [8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20]


def main() -> None:
    options = parse()
    if why_not():
        sys.exit(f"bench-hosts: {why_not()}")
    libraries = available(options.mpis)
    if not libraries:
        sys.exit("bench-hosts: no MPI library is available")
    if options.ours not in libraries:
        options.ours = next(iter(libraries))
        print(f"dscomm is compared over {options.ours}", flush=True)
    tables = []
    for hosts, local in options.layouts:
        for wire in options.wires if options.collectives else []:
            tables.append(measure(hosts, local, wire, libraries, options))
            print_table(tables[-1], libraries, options.ours)
    if tables:
        print_summaries(tables, options.ours)
    beside_compute = []
    for wire in options.overlap_wires:
        medians = overlaps(wire, libraries[options.ours], options.overlap_rounds)
        beside_compute.append({"wire_mbit": wire, "medians_s": medians})
        print_overlap(wire, medians)
    starts = {}
    if options.bring_ups:
        hosts, local = options.layouts[-1]
        starts = bring_ups(hosts, local, libraries, options.bring_ups)
        print(f"\nbring-up of {hosts} hosts x {local}, median of {options.bring_ups}, s")
        for column, seconds in starts.items():
            print(f"{column:>16} {statistics.median(seconds):>6.3f}")
    if options.json:
        content = {
            "versions": {name: library.version for name, library in libraries.items()},
            "ours": options.ours,
            "times": [dataclasses.asdict(table) for table in tables],
            "overlap": beside_compute,
            "bring_up_s": starts,
        }
        options.json.write_text(json.dumps(content, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.hosts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layouts", nargs="+", type=layout, default=[(2, 2), (4, 2), (4, 1)])
    parser.add_argument("--wires", nargs="+", type=int, default=[0, 10_000, 1_000, 300])
    parser.add_argument("--collectives", nargs="*", default=COLLECTIVES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--mpis", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--ours", choices=LIBRARIES, default="debian", help="what dscomm is over")
    parser.add_argument(
        "--rounds", type=int, default=9, help="calls of each kind, in all passes; see above"
    )
    parser.add_argument("--passes", type=int, default=3, help="turns of each MPI library")
    parser.add_argument("--unchecked", action="store_true", help="verify no results: quicker")
    parser.add_argument("--overlap-wires", nargs="*", type=int, default=[0, 1_000])
    parser.add_argument("--overlap-rounds", type=int, default=15, help="calls of each kind")
    parser.add_argument("--bring-ups", type=int, default=5, help="of each backend; 0: none")
    parser.add_argument("--json", type=Path, help="also write the times there")
    return parser.parse_args()


def layout(text: str) -> tuple[int, int]:
    """2x4: two hosts with four ranks each."""
    hosts, local = text.split("x")
    return int(hosts), int(local)


if __name__ == "__main__":
    main()
