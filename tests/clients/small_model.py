"""A small model, batches that it can learn from, and what is done with both by several clients."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

FEATURES = 20
CLASSES = 5
ROWS = 8  # of a rank's share of a batch


def make_model() -> torch.nn.Sequential:
    """The same on every rank, and in every run."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 48),
        torch.nn.Tanh(),
        torch.nn.Linear(48, CLASSES),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [ROWS, FEATURES] float32 and targets [ROWS] int64; other ones for each rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step % 3)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)  # something that can be learned


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 6
) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, rank)
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shard(
    model: torch.nn.Sequential, policy: MixedPrecisionPolicy | None = None
) -> torch.nn.Sequential:
    """FSDP2 over all ranks, each linear layer by itself."""
    policy = policy or MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it; of a DTensor's on every rank."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def assert_learned(results: list[dict[str, Any]]) -> None:
    """Of results with `losses`: every rank's fell."""
    for result in results:
        losses = result["losses"]
        assert losses[-1] < losses[0], losses
