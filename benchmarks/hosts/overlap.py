"""In a rank: communication beside compute, over each backend, in turns.

Two figures tell how well communication proceeds while its caller computes: for an asynchronous
all-reduce of 16 MB beside matrix products of about the same time, and for a step of
DistributedDataParallel, whose buckets are reduced during the backward pass. A figure is the time of
both at once divided by the sum of both alone: 1 means no overlap. Compute has one thread.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepspeed_comm._timing import slowest

COUNT = 4 << 20  # float32 elements: 16 MB
SIDE = 256  # of the square matrices: 0.8 MB in all
WIDTH, DEPTH, ROWS = 512, 6, 64  # of the model, 6.3 MB, and of a rank's batch
BUCKET_MB = 1

Calls = dict[str, Callable[[], Any]]


def measure(groups: dict[str, Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By group and call, the seconds of each round."""
    calls: dict[str, Calls] = {
        name: {**all_reduce_calls(group), **step_calls(group)} for name, group in groups.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {
        name: {call: [] for call in of_group} for name, of_group in calls.items()
    }
    for _ in range(rounds):
        for name, of_group in calls.items():
            for call, made in of_group.items():
                seconds[name][call].append(slowest(made))
    return seconds


def all_reduce_calls(group: Any) -> Calls:
    tensor = torch.zeros(COUNT)
    left, right, product = (torch.ones(SIDE, SIDE) for _ in range(3))

    def all_reduce() -> None:
        dist.all_reduce(tensor, group=group)

    def matmul(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=product)

    def both(times: int) -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        matmul(times)
        work.wait()

    tensor.fill_(dist.get_rank() + 1)
    both(4)
    world = dist.get_world_size()
    if tensor.unique().tolist() != [world * (world + 1) / 2]:
        raise RuntimeError("an all-reduce beside compute gave a wrong sum")
    tensor.zero_()
    alone = statistics.median(slowest(all_reduce) for _ in range(3))
    once = statistics.median(slowest(lambda: matmul(8)) / 8 for _ in range(3))
    times = max(1, round(alone / once))
    return {
        "all_reduce": all_reduce,
        "matmul": lambda: matmul(times),
        "all_reduce beside matmul": lambda: both(times),
    }


def step_calls(group: Any) -> Calls:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.ReLU())))
    buckets = [torch.zeros(count) for count in bucket_sizes(copy.deepcopy(model), group)]
    step = make_step(replicated(model, group))

    def communicate() -> None:
        for work in [dist.all_reduce(each, group=group, async_op=True) for each in buckets]:
            work.wait()

    for is_synced in (True, True, False):
        step(is_synced)  # DDP makes its buckets again after the first step
    return {
        "buckets": communicate,
        "step without them": lambda: step(False),
        "step": lambda: step(True),
    }


def replicated(model: torch.nn.Module, group: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)


def make_step(model: DistributedDataParallel) -> Callable[[bool], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.ones(ROWS, WIDTH)

    def forward_and_backward() -> None:
        model(rows).mean().backward()

    def step(is_synced: bool) -> None:
        optimizer.zero_grad()
        if is_synced:
            forward_and_backward()
        else:
            with model.no_sync():
                forward_and_backward()
        optimizer.step()

    return step


def bucket_sizes(model: torch.nn.Module, group: Any) -> list[int]:
    """Elements of each bucket of a step, as DDP tells its hook."""
    sizes: list[int] = []

    # Without types: DDP refuses annotations that are strings, as all annotations of this file are.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp = replicated(model, group)
    ddp.register_comm_hook(None, hook)
    step = make_step(ddp)
    for _ in range(3):
        sizes.clear()
        step(True)
    return sizes
