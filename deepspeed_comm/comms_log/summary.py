"""The figures of the log: sizes, bandwidths, means, and the time lost to stragglers.

Bandwidths are in Gbit/s and follow nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). algbw is the data size
divided by the time. busbw is algbw times a factor of the collective, and is comparable between
different numbers of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

# The share of the samples that a trimmed mean drops at either end.
TRIMMED = 0.1

_ALL_TO_ALL = ("all_to_all_single", "all_to_all")
# The size of an all-gather is that of one rank's input; its bandwidth counts all ranks' inputs.
_ALL_GATHER = ("all_gather", "all_gather_into_tensor")
_REDUCE_SCATTER = ("reduce_scatter", "reduce_scatter_tensor")
_ALL_REDUCE = (
    "all_reduce",
    "all_reduce_caching",
    "all_reduce_coalesced",
    "inference_all_reduce",
)


def print_rank_0(message: str) -> None:
    """Prints on rank 0, or on every process without a process group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def convert_size(size_bytes: int) -> str:
    """Formats a size: 1536 becomes "1.5 KB". Units are powers of 1024."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    step = int(math.floor(math.log(size_bytes, 1024)))
    return f"{round(size_bytes / 1024**step, 2)} {units[step]}"


def calc_bw_log(
    comm_op: str, size: int, duration: float, group_size: int | None = None
) -> tuple[float, float]:
    """Returns (algbw, busbw) in Gbit/s of a call with `size` bytes of data that took `duration` ms.

    group_size: the number of ranks of the call's group; by default the world size.

    busbw equals algbw for operations other than all-reduce, all-gather, reduce-scatter and
    all-to-all. Both are 0 if duration is 0.
    """
    if duration <= 0:
        return 0.0, 0.0
    ranks = dist.get_world_size() if group_size is None else group_size
    if comm_op in _ALL_GATHER:
        size *= ranks
    algbw = size / duration * 8 / 1e6
    if comm_op in (*_ALL_TO_ALL, *_ALL_GATHER, *_REDUCE_SCATTER):
        return algbw, algbw * (ranks - 1) / ranks
    if comm_op in _ALL_REDUCE:
        return algbw, algbw * 2 * (ranks - 1) / ranks
    return algbw, algbw


def trimmed_mean(samples: list[float]) -> float:
    """The mean without the smallest and the largest tenth of the samples; 0 without samples."""
    cut = round(len(samples) * TRIMMED)
    kept = sorted(samples)[cut : len(samples) - cut]
    return sum(kept) / len(kept) if kept else 0.0


# The latest latencies in ms, oldest first, by operation, message size in bytes, and group.
Latencies = dict[str, dict[int, dict[str, list[float]]]]


def stragglers(mine: Latencies, everyones: list[Latencies]) -> dict[str, dict[int, dict[str, Any]]]:
    """The latency of each call on the fastest rank, and how much longer it took on this rank.

    Compares the latest calls of each group among the ranks that logged them, counted from the end:
    the last call of each rank, the second last, and so on. "count" is the number of calls compared.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, records in mine.items():
        for size, by_group in records.items():
            fastest: list[float] = []
            behind: list[float] = []
            for group, own in by_group.items():
                lists = [
                    samples
                    for theirs in everyones
                    if (samples := theirs.get(name, {}).get(size, {}).get(group))
                ]
                shared = min(len(samples) for samples in lists)
                for k in range(-shared, 0):
                    least = min(samples[k] for samples in lists)
                    fastest.append(least)
                    behind.append(own[k] - least)
            found.setdefault(name, {})[size] = {
                "count": len(fastest),
                "total_comm_lat_ms": sum(fastest),
                "total_straggler_ms": sum(behind),
                "avg_comm_lat_ms": trimmed_mean(fastest),
                "avg_straggler_ms": trimmed_mean(behind),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
    return found
