"""DDP with communication hooks that chain futures, and with torch's hooks that compress.

tests/torch/test_training.py has DDP without a hook, allreduce_hook and fp16_compress_hook.
"""

# No annotations from __future__: DDP looks for the type of a hook's bucket, not for its name.

from typing import Any

import pytest
import torch
import torch.distributed as dist
from over_both import assert_same_bits, equal_over_both
from small_model import assert_learned, make_model, parameters_of, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.cases.harness import World


def _scale_then_sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Two collectives after each other, the second started by the first one's future."""
    gradients = bucket.buffer()
    largest = gradients.abs().max().reshape(1)
    size = dist.get_world_size(group)

    def sum_up(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        scale = done.value()[0] + 1e-6
        work = dist.all_reduce(gradients.div_(scale * size), group=group, async_op=True)
        return work.get_future().wait()[0].mul_(scale)

    work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True)
    return work.get_future().then(sum_up)


def _in_bfloat16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, which DDP knows by its name and refuses for CPU tensors."""
    return default_hooks.bf16_compress_hook(group, bucket)


def _hook(name: str) -> tuple[Any, Any]:
    """State and function of a hook."""
    if name == "scale_then_sum":
        return None, _scale_then_sum
    if name == "bf16_compress":
        return None, _in_bfloat16
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        return state, powerSGD_hook.powerSGD_hook
    raise AssertionError(name)


def _train(world: World, backend: str, hook: str) -> dict[str, Any]:
    world.init(backend)
    # One bucket, unless the hook makes one call for each: what a future starts would else come
    # before the next bucket's call on one rank and after it on another, on any backend.
    several = hook == "bf16_compress"
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01 if several else 25)
    model.register_comm_hook(*_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = train(model, optimizer, world.rank, steps=8)
    return {"losses": losses, "parameters": parameters_of(model)}


@pytest.mark.parametrize("hook", ["scale_then_sum", "bf16_compress", "powerSGD"])
def test_ddp_hook_training_matches_gloo(hook: str) -> None:
    results = equal_over_both(_train, hook)
    assert_same_bits(results[0]["parameters"], results[1]["parameters"])
    assert_learned(results)
