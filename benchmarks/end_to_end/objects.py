"""The calls of data loaders and trainers between batches: a barrier, and object collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from workload import Measured, Metric, Workload

from deepspeed_comm._timing import seconds_per_call

WARM_UP = 20  # calls


def measure(contender: str, quick: bool) -> Measured:
    rank = dist.get_rank()
    # The next samples: one rank draws them for all.
    order = [{"epoch": 3, "seed": 1234, "indices": list(range(64))}] if rank == 0 else [None]
    place = {"rank": rank, "epoch": 3, "batch": 17, "samples": 64 * rank, "finished": False}
    places: list[Any] = [None] * dist.get_world_size()

    def broadcast() -> None:
        received = order if rank == 0 else [None]
        dist.broadcast_object_list(received)
        order[:] = received

    count = 20 if quick else 300
    return {
        "barrier": times(dist.barrier, count),
        "broadcast": times(broadcast, count),
        "gather": times(lambda: dist.all_gather_object(places, place), count),
    }, [order, places]


def times(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each call, one after the other."""
    return [seconds_per_call(call) for _ in range(WARM_UP + count)][WARM_UP:]


WORKLOAD = Workload(
    {
        "barrier": Metric("barrier", "us"),
        "broadcast": Metric("broadcast_object_list, 64 indices", "us"),
        "gather": Metric("all_gather_object, a loader's place", "us"),
    },
    measure,
)
