"""A step of training under FSDP2 (fully_shard), each layer by itself."""

from __future__ import annotations

import torch
from model import Model
from torch.distributed.fsdp import fully_shard
from training import prepare, train, whole_model
from workload import Measured, Metric, Workload


def shard(model: Model) -> torch.nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def measure(contender: str, quick: bool) -> Measured:
    return train(shard(whole_model(quick)), quick)


WORKLOAD = Workload({"step": Metric("training step, FSDP2", "steps/s")}, measure, prepare=prepare)
