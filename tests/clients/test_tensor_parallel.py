"""DTensor's tensor parallelism: column- and row-wise, with and without SequenceParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from over_both import assert_same_bits, equal_over_both
from small_model import parameters_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.cases.harness import World

WORDS, LENGTH, HIDDEN = 32, 8, 16
STEPS = 5


class Feedforward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(inputs)))


class Model(torch.nn.Module):
    """Predicts a word from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.feedforward = Feedforward()
        self.head = torch.nn.Linear(HIDDEN, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        hidden = hidden + self.feedforward(self.norm(hidden))
        return self.head(hidden)


def _plan(sequence: bool) -> dict[str, Any]:
    """Where each module's tensors lie. With `sequence`, what lies between them is sharded as well:
    each rank has half of every sequence, so all-reduces become reduce-scatters and all-gathers."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "feedforward.up": ColwiseParallel(),
        "feedforward.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
        plan["feedforward"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return plan


def _steps(model: Model) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 2)
        words = torch.randint(0, WORDS, (4, LENGTH + 1), generator=generator)
        logits = model(words[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(world: World, backend: str, sequence: bool) -> dict[str, Any]:
    world.init(backend)
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(Model(), mesh, _plan(sequence))
    with loss_parallel():
        losses = _steps(model)
    return {"losses": losses, "parameters": parameters_of(model)}


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "SequenceParallel"])
def test_tensor_parallel_training_matches_gloo_and_one_process(sequence: bool) -> None:
    first, second = equal_over_both(_train, sequence)
    assert_same_bits(first["parameters"], second["parameters"])
    # Beside one process alone the same numbers are added, in another order.
    alone = Model()
    torch.testing.assert_close(first["losses"], _steps(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first["parameters"], parameters_of(alone), rtol=1e-3, atol=1e-5)
