"""torch's own users of a backend: DDP, functional collectives, torch.compile, FSDP2."""

from __future__ import annotations

import copy
import functools
import os
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepspeed_comm._plugin import load_extension
from tests.cases.harness import TORCH_2, RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2
from tests.cases.training import (
    functional_case,
)


def is_in_pool(tensor: torch.Tensor) -> bool:
    return bool(load_extension().is_in_pool(tensor))


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 5)
    )


def _train(group: Any, hook: Any) -> list[torch.Tensor]:
    """Weights and losses after some steps of DDP over a group."""
    rank = dist.get_rank()
    model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.01)
    if hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(6):
        inputs = torch.randn(16, 20, generator=generator)
        targets = torch.randint(0, 5, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach().clone() for parameter in model.parameters())]


def _ddp_case(hook_name: str | None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = getattr(default_hooks, hook_name) if hook_name else None
    results = {}
    for backend in ("gloo", "dscomm"):
        group = dist.new_group(backend=backend)
        results[backend] = _train(group, hook)
        dist.destroy_process_group(group)
    # With two addends there is one order: gloo must give the same bits where both sum in fp32.
    for theirs, ours in zip(results["gloo"], results["dscomm"], strict=True):
        assert torch.equal(theirs, ours), (theirs - ours).abs().max()


@pytest.mark.parametrize("hook", [None, "allreduce_hook", "fp16_compress_hook"])
def test_ddp_equals_gloo(ranks: RankSets, hook: str | None) -> None:
    ranks(2).run(_ddp_case, hook)


def _ddp_memory_case(world: World) -> None:
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"  # torch reads it at the first DDP of a process
    world.init("dscomm")
    seen = []

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        seen.append(is_in_pool(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer().div_(world.size), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    _train(dist.group.WORLD, hook)
    assert seen and any(seen)  # buckets of less than a page are not pooled
    _ddp_case(None)


@needs_torch_2
def test_ddp_with_buckets_from_the_backend() -> None:
    run_fresh(2, _ddp_memory_case)


def _allocate_case() -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cuda:0"))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = backend.allocate_tensor(33, dtype=dtype, device=torch.device("cpu"))
        assert tensor.shape == (33,) and tensor.dtype == dtype and tensor.device.type == "cpu"
        tensor.fill_(1)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert tensor.eq(1).all()
    large = backend.allocate_tensor(5000, dtype=torch.float32, device=torch.device("cpu"))
    assert is_in_pool(large) and not is_in_pool(torch.ones(5000))
    assert is_in_pool(large[77:200]) and not is_in_pool(large.clone())
    assert is_in_pool(large.resize_(50_000))  # keeps its allocator
    assert backend.allocate_tensor(0, dtype=torch.float32, device=torch.device("cpu")).numel() == 0
    for size, device, got in [(-1, "cpu", "size -1"), (3, "meta", "device meta")]:
        with pytest.raises(ValueError, match=f"allocate_tensor: got {got}, expected"):
            backend.allocate_tensor(size, dtype=torch.float32, device=torch.device(device))


@needs_torch_2
def test_tensors_allocated_by_the_backend(ranks: RankSets) -> None:
    ranks(2).run(_allocate_case)


@needs_torch_2
def test_functional_collectives(ranks: RankSets) -> None:
    ranks(3).run(functional_case)


def _compiled_case() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()

    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        result = compiled(torch.full((3,), float(rank)))
        assert result.tolist() == [2.0 * sum(range(size)) + 1] * (3 * size)


@needs_torch_2
def test_torch_compile(ranks: RankSets) -> None:
    ranks(2).run(_compiled_case, limit_s=240.0)


def _fsdp_case(from_backend: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    in_pool = []

    def spy(call: Callable[..., Any], **given: Any) -> Any:
        in_pool.append(is_in_pool(given["input"]))
        return call(**given)

    with unittest.mock.patch.object(
        dist, "reduce_scatter_single", functools.partial(spy, dist.reduce_scatter_single)
    ):
        _check_fsdp(from_backend, fully_shard)
    assert in_pool and set(in_pool) == {from_backend}


def _check_fsdp(from_backend: bool, fully_shard: Callable[..., Any]) -> None:

    rank, size = dist.get_rank(), dist.get_world_size()
    plain = _model()[:2]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    sharded.set_allocate_memory_from_process_group_for_comm(from_backend)
    inputs = torch.randn(4 * size, 20, generator=torch.Generator().manual_seed(1))
    (plain(inputs).sum() / size).backward()
    sharded(inputs[4 * rank : 4 * rank + 4]).sum().backward()
    for expected, parameter in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no fully_shard")
@pytest.mark.parametrize("from_backend", [False, True])
def test_fsdp2(ranks: RankSets, from_backend: bool) -> None:
    ranks(2).run(_fsdp_case, from_backend)
