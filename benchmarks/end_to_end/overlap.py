"""An asynchronous all_reduce of 16 MB beside a matmul of about the same time."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from workload import Measured, Metric, Workload

from deepspeed_comm._timing import slowest

SIDE = 256  # of the square matrices: 0.8 MB with the result, which stay in the cache


def measure(contender: str, quick: bool) -> Measured:
    tensor = torch.zeros((1 << 12) if quick else (4 << 20))
    left, right = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    product = torch.empty(SIDE, SIDE)
    rounds = 3 if quick else 15

    def all_reduce() -> None:
        dist.all_reduce(tensor)

    def matmul(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=product)

    def both(times: int) -> None:
        work = dist.all_reduce(tensor, async_op=True)
        matmul(times)
        work.wait()

    for _ in range(3):
        both(4)
    alone = statistics.median(slowest(all_reduce) for _ in range(rounds))
    once = statistics.median(slowest(lambda: matmul(8)) / 8 for _ in range(rounds))
    times = max(1, round(alone / once))
    samples: dict[str, list[float]] = {"all_reduce": [], "matmul": [], "together": []}
    for _ in range(rounds):
        samples["all_reduce"].append(slowest(all_reduce))
        samples["matmul"].append(slowest(lambda: matmul(times)))
        samples["together"].append(slowest(lambda: both(times)))
    medians = {name: statistics.median(each) for name, each in samples.items()}
    samples["ratio"] = [medians["together"] / (medians["all_reduce"] + medians["matmul"])]
    tensor.fill_(dist.get_rank() + 1)
    both(times)
    return samples, [tensor.unique().tolist(), product.unique().tolist()]


WORKLOAD = Workload(
    {
        "all_reduce": Metric("16 MB all_reduce alone", "ms"),
        "matmul": Metric("matmul of about that time alone", "ms", False),
        "together": Metric("both at once", "ms", False),
        "ratio": Metric("both at once / sum of both alone", "together/sum", False),
    },
    measure,
)
