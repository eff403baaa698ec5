"""FSDP2 (fully_shard), in float32 and in mixed precision, with gradient clipping.

tests/torch/test_training.py has its gradients beside those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from over_both import assert_same_bits, equal_over_both
from small_model import assert_learned, batch, make_model, parameters_of, shard, whole
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.cases.harness import World

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, gradients in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}


def _train(world: World, backend: str, policy: str) -> dict[str, Any]:
    world.init(backend)
    model = shard(make_model(), POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, norms = [], []
    for step in range(6):
        inputs, targets = batch(step, world.rank)
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "parameters": parameters_of(model)}


@pytest.mark.parametrize("policy", POLICIES)
def test_fsdp2_training_matches_gloo(policy: str) -> None:
    first, second = equal_over_both(_train, policy)
    assert_same_bits(first["norms"], second["norms"])
    assert_same_bits(first["parameters"], second["parameters"])
    assert_learned([first, second])
