"""A step of training under DistributedDataParallel."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from training import prepare, train, whole_model
from workload import Measured, Metric, Workload


def measure(contender: str, quick: bool) -> Measured:
    return train(DistributedDataParallel(whole_model(quick)), quick)


WORKLOAD = Workload(
    {"step": Metric("training step, DDP", "steps/s")},
    measure,
    prepare=prepare,
)
