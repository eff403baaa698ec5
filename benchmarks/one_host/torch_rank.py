"""One rank of dscomm or gloo as torch.distributed calls it, with the flags of options.h.

The measurement is that of deepspeed_comm.bench: the slowest rank counts, and results are checked.
Ranks meet by the barrier of the timed backend, because each backend is fastest alone.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_comm import comm
from deepspeed_comm.bench import flags
from deepspeed_comm.bench.ledger import Ledger
from deepspeed_comm.bench.measurement import Measurement, Refusal, Row, groups_of
from deepspeed_comm.bench.plan import settings

NAMES = {"dscomm": "dscomm torch", "dscomm-direct": "dscomm direct", "gloo": "gloo"}
# The limits for one size and mode.
MOST_BYTES, MOST_ITERATIONS, FEWEST_ITERATIONS = 128 << 20, 100, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--rank", "--ranks", "--cpu"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--op", "--meet", "--out", "--sizes", "--dtypes", "--modes"):
        parser.add_argument(name, required=True)
    parser.add_argument("backend", choices=["dscomm", "gloo"])
    parser.add_argument("--budget-ms", type=float, required=True)
    given = parser.parse_args()
    # gloo has a second thread, and is several times slower if both threads share a core.
    if given.cpu >= 0 and given.backend != "gloo":
        os.sched_setaffinity(0, {given.cpu})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{given.meet}.store", given.ranks)
    dist.init_process_group(given.backend, store=store, rank=given.rank, world_size=given.ranks)
    comm.init_distributed(given.backend, verbose=False)  # for the direct calls; finds the group
    groups = groups_of([given.backend])
    ledger = Ledger()
    for dtype in given.dtypes.split(","):
        for size in map(int, given.sizes.split(",")):
            for mode in given.modes.split(","):
                write(measured(given.op, size, dtype, mode, groups, ledger), dtype, mode, given)
    dist.barrier()
    dist.destroy_process_group()


def measured(
    op: str,
    size: int,
    dtype: str,
    mode: str,
    groups: dict[str, dist.ProcessGroup],
    ledger: Ledger,
) -> list[Row | Refusal]:
    iterations = max(FEWEST_ITERATIONS, min(MOST_ITERATIONS, MOST_BYTES // size))
    warm_ups = min(50, max(2, MOST_BYTES // size // 10))
    options = flags.Options(
        collectives=[op], backends=list(groups), sizes=[size],
        dtypes=["float" if dtype == "float32" else dtype], ops=["sum"], root=0, iters=iterations,
        warmup_iters=warm_ups, agg_iters=1, check=True, touch=mode == "touch",
        direct="dscomm" in groups, json=None, csv=None, plot=None,
    )  # fmt: skip
    [setting] = settings(options, ledger.world)
    return [row for rows in Measurement(options, groups, ledger).rows(setting) for row in rows]


def write(rows: list[Row | Refusal], dtype: str, mode: str, given: argparse.Namespace) -> None:
    if given.rank != 0:
        return
    with Path(given.out).open("a") as file:
        for row in rows:
            line: dict[str, object]
            if isinstance(row, Refusal):
                line = {"refused": f"{NAMES[row.backend]} has no {dtype}: {row.reason}"}
                file.write(json.dumps(line) + "\n")
                continue
            line = {
                "peer": NAMES[row.backend], "dtype": dtype, "size": row.size_bytes, "mode": mode,
                "median_us": row.time_p50_us, "p99_us": row.time_p99_us, "wrong": row.wrong,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
