"""torch.distributed.pipelining: two stages under the 1F1B schedule."""

from __future__ import annotations

from typing import Any

import torch
from over_both import equal_over_both
from small_model import batch, make_model, parameters_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.cases.harness import World

MICRO_BATCHES = 4
STEPS = 5
SPLIT = 2  # layers of the first stage


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, targets)


def _train(world: World, backend: str) -> dict[str, Any]:
    world.init(backend)
    layers = make_model()
    own = layers[:SPLIT] if world.rank == 0 else layers[SPLIT:]
    stage = PipelineStage(own, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.3, momentum=0.9)
    losses: list[float] = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank=0)
        optimizer.zero_grad()
        if world.rank == 0:
            schedule.step(inputs)
        else:
            parts: list[torch.Tensor] = []
            schedule.step(target=targets, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
    return {"losses": losses, "parameters": parameters_of(own)}


def test_1f1b_training_matches_gloo_and_one_process() -> None:
    first, last = equal_over_both(_train)
    # One process alone gives the same, but for the order in which micro-batches are added.
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank=0)
        optimizer.zero_grad()
        loss = _loss(alone(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(last["losses"], losses, rtol=1e-4, atol=1e-5)
    found = [*first["parameters"].values(), *last["parameters"].values()]
    torch.testing.assert_close(found, [*parameters_of(alone).values()], rtol=1e-3, atol=1e-5)
