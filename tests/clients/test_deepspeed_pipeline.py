"""DeepSpeed's pipeline parallelism: two stages, with a layer that both have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from over_both import equal_over_both, needed
from small_model import CLASSES, FEATURES, ROWS, assert_learned, batch, parameters_of

from tests.cases.harness import World

deepspeed = needed("deepspeed")
pipe = needed("deepspeed.pipe")
needed("deepspeed.runtime.pipe.engine")

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in test_deepspeed_zero.py

MICRO_BATCHES = 4
STEPS = 4
HIDDEN = 32


def _layers() -> list[Any]:
    """A layer is tied: both stages have it, and its gradients are summed over them."""
    tied = pipe.TiedLayerSpec
    return [
        pipe.LayerSpec(torch.nn.Linear, FEATURES, HIDDEN),
        tied("mixer", torch.nn.Linear, HIDDEN, HIDDEN, bias=False),
        pipe.LayerSpec(torch.nn.Tanh),
        tied("mixer", torch.nn.Linear, HIDDEN, HIDDEN, bias=False),
        pipe.LayerSpec(torch.nn.Tanh),
        pipe.LayerSpec(torch.nn.Linear, HIDDEN, CLASSES),
    ]


def _micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = 0
    while True:
        yield batch(step, rank=0)  # the same at both stages: one takes inputs, the other targets
        step += 1


def _train(world: World, backend: str) -> dict[str, Any]:
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    model = pipe.PipelineModule(
        layers=_layers(),
        num_stages=2,
        loss_fn=torch.nn.functional.cross_entropy,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
        },
    )
    assert engine.is_first_stage() == (world.rank == 0)
    batches = _micro_batches()
    losses = [engine.train_batch(batches).item() for _ in range(STEPS)]
    return {"losses": losses, "parameters": parameters_of(model)}


def test_pipeline_training_matches_gloo() -> None:
    first, last = equal_over_both(_train)
    assert first["losses"] == last["losses"]
    assert_learned([first])
    tied = [name for name in first["parameters"] if "mixer" in name]
    assert len(tied) == 1, first["parameters"].keys()
    for name in tied:
        assert torch.equal(first["parameters"][name], last["parameters"][name])
    assert first["parameters"].keys() != last["parameters"].keys()
