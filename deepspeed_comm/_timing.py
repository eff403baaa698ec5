"""Times of calls that all ranks make, taken in turns, so that noise meets every contender alike."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

# A sample runs as many calls as take about this long, so that the clock and the start of the sample
# do not show in it.
SAMPLE_S = 0.005
MOST_CALLS = 1000


def median_times(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of one call of each contender, in us; of every sample the slowest rank's.

    Collective over the default group, in which every rank names the same contenders. `rounds` is
    the number of samples of each.
    """
    calls = {}
    for name, call in contenders.items():
        # The second of two calls: the first may set something up.
        _sample(call, 1)
        pilot = torch.tensor(_sample(call, 1), dtype=torch.float64)
        dist.all_reduce(pilot, dist.ReduceOp.MAX)
        calls[name] = min(MOST_CALLS, max(1, int(SAMPLE_S / pilot.item())))
    times = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    for k in range(rounds):
        for row, (name, call) in enumerate(contenders.items()):
            times[row, k] = _sample(call, calls[name])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    medians = [1e6 * statistics.median(row) for row in times.tolist()]
    return dict(zip(contenders, medians, strict=True))


def _sample(call: Callable[[], object], calls: int) -> float:
    """Seconds that a call takes, once all ranks are there."""
    dist.barrier()
    return seconds_per_call(call, calls)


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    """The mean of `calls` in a row, on this rank."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def all_reduce_times(
    contenders: Mapping[str, Callable[[torch.Tensor], object]], size: int, rounds: int
) -> dict[str, float]:
    """median_times() of all-reduces in place of `size` bytes of float32, with checked results."""
    # The sum of zeros stays what it is, however often it is taken.
    tensors = {name: torch.zeros(size // 4) for name in contenders}
    for name, all_reduce in contenders.items():
        _check(name, all_reduce, size)
    medians = median_times(
        {name: functools.partial(contenders[name], tensors[name]) for name in contenders}, rounds
    )
    for name, all_reduce in contenders.items():
        if tensors[name].any():
            raise RuntimeError(f"{name}: an all-reduce of {size} bytes of zeros gave other values")
        _check(name, all_reduce, size)
    return medians


def _check(name: str, all_reduce: Callable[[torch.Tensor], object], size: int) -> None:
    """Integers of different ranks, whose sum float32 holds exactly, against the sum by hand."""
    ramp = torch.arange(size // 4) % 1000
    world = dist.get_world_size()
    tensor = (ramp + dist.get_rank()).float()
    all_reduce(tensor)
    expected = (ramp * world + world * (world - 1) // 2).float()
    if not torch.equal(tensor, expected):
        raise RuntimeError(f"{name}: an all-reduce of {size} bytes gave a wrong result")
