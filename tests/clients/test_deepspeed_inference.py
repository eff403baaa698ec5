"""DeepSpeed's AutoTP inference over two ranks, with deepspeed_comm's inference_all_reduce()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from over_both import needed, run

from tests.cases.harness import World

deepspeed = needed("deepspeed")
transformers = needed("transformers")
layers = needed("deepspeed.module_inject.layers")
needed("transformers.models.gpt2.modeling_gpt2")  # AutoTP asks whether the model is one

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in test_deepspeed_zero.py

LAYERS = 3
HIDDEN = 32
WORDS = 96
TOKENS = torch.arange(2 * 7).reshape(2, 7) * 5 % WORDS


def _model(dtype: torch.dtype) -> Any:
    """A Llama with random weights, the same on every rank."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,  # else all words are about as likely
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits.clone()


def _infer(world: World, backend: str, dtype: torch.dtype) -> dict[str, Any]:
    import deepspeed_comm as dist

    dist.init_distributed(backend, verbose=False)
    # DeepSpeed has no setting for whose all-reduce its layers call; `dist` is the module that they
    # look it up in. deepspeed_comm has all that they use of it.
    layers.dist = dist
    engine = deepspeed.init_inference(
        _model(dtype), tensor_parallel={"tp_size": world.size}, dtype=dtype
    )
    sharded = [
        name for name, module in engine.module.named_modules()
        if isinstance(module, layers.LinearAllreduce)
    ]  # fmt: skip
    dist.configure(enabled=True, prof_all=True)
    logits = _logits(engine)
    dist.configure(enabled=False)
    calls = {size: record[0] for size, record in dist.comms_logger.comms_dict["all_reduce"].items()}
    return {
        "logits": logits,
        "sharded": sharded,
        "operations": dist.get_logged_comm_ops(),
        "calls": calls,
        "rows": engine.module.model.layers[0].self_attn.q_proj.weight.shape[0],
    }


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the differences."""
    return (logits.float() - expected.float()).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sharded_outputs_match_the_whole_model(dtype: torch.dtype) -> None:
    exact = _logits(_model(torch.float32).double())
    whole = _logits(_model(dtype))
    first, second = run("dscomm", _infer, dtype)
    assert torch.equal(first["logits"], second["logits"])
    # Each rank has half of every row-parallel layer, so a sum is rounded in other places than the
    # whole model's: it may be off by as much as the whole model is for its own rounding, twice.
    assert 0 < _distance(first["logits"], exact) <= 2 * _distance(whole, exact)
    for rank in (first, second):
        assert rank["rows"] == HIDDEN // 2  # it is sharded
        assert len(rank["sharded"]) == 2 * LAYERS + 1, rank["sharded"]
        # One call for each such layer, through deepspeed_comm, and no other.
        assert rank["operations"] == ["all_reduce"]
        per_row = TOKENS.numel() * dtype.itemsize
        assert rank["calls"] == {per_row * HIDDEN: 2 * LAYERS, per_row * WORDS: 1}
