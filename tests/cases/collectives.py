"""Collectives: special operators and values, refusals, coalescing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import TORCH_2
from tests.cases.reference import (
    FLOAT8,
    OPS,
    REDUCED,
    assert_same_bits,
    has_meaning,
    make_input,
    reduce_reference,
)


def premultiplied_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    make = dist._make_nccl_premul_sum
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for factor in (0.5, 1.7, torch.tensor([3.0])):
            inputs = [make_input(dtype, (33,), k) for k in range(size)]
            tensor = inputs[rank].clone()
            op = make(factor if isinstance(factor, float) or TORCH_2 else [factor])
            dist.all_reduce(tensor, op)
            assert_same_bits(
                tensor, reduce_reference(inputs, "PREMUL_SUM", float(factor)), (dtype, factor)
            )


def not_a_number_case() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in ("MIN", "MAX", "SUM"):
            tensor = torch.tensor(
                [1.0, float("nan") if rank == 1 else 2.0, float("inf")], dtype=dtype
            )
            dist.all_reduce(tensor, OPS[op])
            assert tensor.isnan().tolist() == [False, True, False], (dtype, op, tensor)


def refused_reductions_case() -> None:
    for dtype, op in itertools.product(REDUCED + FLOAT8, OPS):
        if has_meaning(dtype, op):
            continue
        tensor = torch.zeros(3).to(dtype)
        with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as caught:
            dist.all_reduce(tensor, OPS[op])
        assert op in str(caught.value) or "complex" in str(caught.value), str(caught.value)
    # Peers saw nothing of the call, so the group still works.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 3


def coalescing_manager_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank)) for n in (1, 50)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        assert tensor.unique().tolist() == [sum(range(size))]
    outputs = [torch.zeros(size * n) for n in (1, 50)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, tensor + rank)
    manager.wait()
    for output in outputs:
        assert output.unique().tolist() == [sum(range(size)) + k for k in range(size)]


def null_work_case() -> None:
    """A synchronous call is over when it returns, so its Work is null."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    tensor = torch.ones(3)
    assert dist.group.WORLD.allreduce([tensor], options) is None
    assert tensor.tolist() == [float(dist.get_world_size())] * 3
    assert dist.irecv(tensor, 1 - dist.get_rank()) is not None
    dist.send(torch.zeros(3), 1 - dist.get_rank())
    dist.barrier()
