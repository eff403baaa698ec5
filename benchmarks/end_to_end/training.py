"""The common parts of the training steps: the model, its batches, and the loop."""

from __future__ import annotations

import functools
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from model import TINY, TRAINED, Model, make_model
from torch.distributed.tensor import DTensor

ROWS, LENGTH = 2, 32  # of a rank's batch
WARM_UP = 3  # steps


@functools.cache
def whole_model(quick: bool) -> Model:
    """In float32. The parent makes it, and ranks are forked with it."""
    return make_model(TINY if quick else TRAINED, torch.float32)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: torch.nn.Module, quick: bool) -> tuple[dict[str, list[float]], Any]:
    """Seconds of each step; every loss of this rank, and a digest of its parameters at the end."""
    optimizer = make_optimizer(model)
    losses, seconds = [], []
    for step in range(WARM_UP + (4 if quick else 10)):
        words = batch(step, TINY.words if quick else TRAINED.words)
        began = time.perf_counter()
        losses.append(train_step(model, optimizer, words).hex())
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return {"step": seconds}, {"losses": losses, "parameters": digest(model)}


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor
) -> float:
    logits = model(words[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def batch(step: int, words: int) -> torch.Tensor:
    """int64 [ROWS, LENGTH + 1]; different on each rank."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randint(words, (ROWS, LENGTH + 1), generator=generator)


def digest(model: torch.nn.Module) -> str:
    """A digest of the parameters' bits that this rank has."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def prepare(quick: bool) -> dict[str, str]:
    whole_model(quick)
    return {}
