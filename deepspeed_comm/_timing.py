"""Times calls that all ranks make. The slowest rank's time counts.

The demo, `dscomm bench` and benchmarks/ measure with these functions.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

# A sample of median_times() makes as many calls as take about this long, so that reading the clock
# and leaving the barrier are negligible.
SAMPLE_S = 0.005
MOST_CALLS = 1000


def median_times(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of one call of each contender, in us, by name.

    contenders: the calls by name, the same names on all ranks. They take turns, so that noise meets
    all of them. rounds: the number of samples of each.

    Collective over the default group.
    """
    calls = {}
    for name, call in contenders.items():
        sample(call)  # the first call may set something up
        calls[name] = min(MOST_CALLS, max(1, int(SAMPLE_S / slowest(call))))
    times = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    for k in range(rounds):
        for row, (name, call) in enumerate(contenders.items()):
            times[row, k] = sample(call, calls[name])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    medians = [1e6 * statistics.median(row) for row in times.tolist()]
    return dict(zip(contenders, medians, strict=True))


def slowest(call: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank, the same on all ranks. Collective."""
    found = torch.tensor(sample(call), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def sample(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call on this rank, after a barrier of the default group."""
    dist.barrier()
    return seconds_per_call(call, calls)


def seconds_per_call(call: Callable[[], object], calls: int = 1) -> float:
    """The mean seconds of `calls` consecutive calls on this rank."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def all_reduce_times(
    contenders: Mapping[str, Callable[[torch.Tensor], object]], size: int, rounds: int
) -> dict[str, float]:
    """median_times() of in-place all-reduces of `size` bytes of float32; checks the results.

    Raises RuntimeError for a wrong result.
    """
    # Zeros, because their sum does not grow from call to call.
    tensors = {name: torch.zeros(size // 4) for name in contenders}
    for name, all_reduce in contenders.items():
        _check(name, all_reduce, size)
    medians = median_times(
        {name: functools.partial(contenders[name], tensors[name]) for name in contenders}, rounds
    )
    for name, all_reduce in contenders.items():
        if tensors[name].any():
            where = f"rank {dist.get_rank()}, {size} bytes"
            raise RuntimeError(f"defect of {name}: sum of zeros is not zero ({where})")
        _check(name, all_reduce, size)
    return medians


def _check(name: str, all_reduce: Callable[[torch.Tensor], object], size: int) -> None:
    """Reduces whole numbers that differ between ranks; float32 holds their sum exactly."""
    ramp = torch.arange(size // 4) % 1000
    world = dist.get_world_size()
    tensor = (ramp + dist.get_rank()).float()
    all_reduce(tensor)
    expected = (ramp * world + world * (world - 1) // 2).float()
    if not torch.equal(tensor, expected):
        raise RuntimeError(f"defect of {name}: wrong sum of {size} bytes on rank {dist.get_rank()}")
