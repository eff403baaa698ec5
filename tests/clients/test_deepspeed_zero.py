"""DeepSpeed's ZeRO, all stages, and the three ways in which a program gives it dscomm."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from over_both import assert_same_bits, needed, run, run_once
from small_model import ROWS, assert_learned, batch, make_model, parameters_of

from tests.cases.harness import World

deepspeed = needed("deepspeed")
needed("deepspeed.runtime.zero.muon.original_muon")  # its import takes seconds

# DeepSpeed builds its own all-reduce over shared memory with every process group, for
# inference_all_reduce() alone, which nothing here calls in it. That takes half a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS = 5
LEARNING_RATE = 5e-3
ACCUMULATED = 2  # micro-batches of a step


def _choose(way: str, backend: str) -> None:
    """What a program does before deepspeed.initialize()."""
    if way == "init_distributed":
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
    elif way == "accelerator":
        deepspeed.get_accelerator()._communication_backend_name = backend
    else:
        import deepspeed_comm

        deepspeed_comm.init_distributed(backend, verbose=False)


def _config(stage: int, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        # So small that there are several of each.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2048,
            "allgather_bucket_size": 2048,
            "stage3_prefetch_bucket_size": 2048,
            "stage3_param_persistence_threshold": 0,
        },
    }


def _train(world: World, backend: str, stage: int, precision: str, way: str) -> dict[str, Any]:
    _choose(way, backend)
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        config=_config(stage, precision),
    )
    assert engine.zero_optimization_stage() == stage
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    losses = []
    for step in range(STEPS * ACCUMULATED):
        inputs, targets = batch(step, world.rank)
        loss = torch.nn.functional.cross_entropy(engine(inputs.to(dtype)).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    norm = float(engine.get_global_grad_norm() or 0.0)
    if way == "deepspeed_comm":
        losses = _own_collectives(losses)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {"losses": losses, "norm": norm, "parameters": parameters_of(model)}


def _own_collectives(losses: list[float]) -> list[float]:
    """What a program does beside DeepSpeed with deepspeed_comm as its `dist`; returns the same."""
    import deepspeed_comm as dist

    own = torch.tensor(losses, dtype=torch.float64)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own)
    assert not torch.equal(*everyones)  # each rank has data of its own
    return everyones[dist.get_rank()].tolist()


WAYS = ["init_distributed", "accelerator", "deepspeed_comm"]
# Each stage once, each precision and each way on two stages; the drill has all combinations.
QUICK = {
    (0, "fp32", "init_distributed"),
    (1, "bf16", "accelerator"),
    (2, "fp32", "deepspeed_comm"),
    (3, "bf16", "init_distributed"),
    (3, "fp32", "deepspeed_comm"),
}


@pytest.mark.parametrize(
    ("stage", "precision", "way"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.drill)
        for case in itertools.product(range(4), ["fp32", "bf16"], WAYS)
    ],
)
def test_zero_training_matches_gloo(stage: int, precision: str, way: str) -> None:
    expected = run_once("gloo", _train, stage, precision, "init_distributed")
    found = run("dscomm", _train, stage, precision, way)
    assert_same_bits(found, expected)
    assert_same_bits(found[0]["parameters"], found[1]["parameters"])
    assert_learned(found)


@pytest.mark.drill
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_training_of_four_ranks_is_close_to_gloo(stage: int, precision: str) -> None:
    expected = run("gloo", _train, stage, precision, "init_distributed", ranks=4)
    found = run("dscomm", _train, stage, precision, "init_distributed", ranks=4)
    for result in found:
        assert_same_bits(result["parameters"], found[0]["parameters"])
    assert_learned(found)
    # Four addends have an order, and gloo's is another one.
    if precision == "fp32":
        for name, parameter in found[0]["parameters"].items():
            torch.testing.assert_close(
                parameter, expected[0]["parameters"][name], rtol=1e-5, atol=1e-5 * LEARNING_RATE
            )
        return
    # In bfloat16 a gradient of either may have the other sign, and AdamW makes whole steps of it.
    # So each is compared with training in float32.
    exact = run_once("gloo", _train, stage, "fp32", "init_distributed", ranks=4)[0]["parameters"]
    assert _distance(found[0], exact) <= 1.2 * _distance(expected[0], exact)


def _distance(result: dict[str, Any], exact: dict[str, torch.Tensor]) -> float:
    """Root mean square of the differences of all parameters."""
    differences = [
        (parameter.float() - exact[name]).flatten()
        for name, parameter in result["parameters"].items()
    ]
    return torch.cat(differences).square().mean().sqrt().item()
