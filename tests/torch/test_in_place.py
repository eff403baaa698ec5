"""Tensors that other ranks read in place: results have the same bits as with staging, whichever
ranks use such tensors, and the tensors may be written once a call has returned."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_comm
from deepspeed_comm._plugin import load_extension
from tests.cases.harness import World, run_fresh
from tests.cases.marks import needs_torch_2

# More than a one-shot call, and no multiple of a chunk.
COUNT = 300_007


class Maker:
    """Tensors of one rank, some of them read in place, each at an odd offset of the pool."""

    def __init__(self, rank: int, share: float) -> None:
        self.random = random.Random(f"{rank} of {share}")
        self.share = share
        self.in_place = 0

    def like(self, values: torch.Tensor) -> torch.Tensor:
        if self.random.random() >= self.share:
            return values.clone()
        offset = self.random.randrange(1, 100)
        whole = deepspeed_comm.empty(values.numel() + 100, dtype=values.dtype)
        tensor = whole[offset : offset + values.numel()].view(values.shape)
        assert load_extension().is_in_pool(tensor)
        self.in_place += 1
        return tensor.copy_(values)


def _values(seed: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def _results(rank: int, size: int, dtype: torch.dtype, make: Maker) -> list[torch.Tensor]:
    """The results of every collective with random data. A call's tensors are overwritten when it
    returns."""
    results: list[torch.Tensor] = []

    def done(used: torch.Tensor, *outputs: torch.Tensor) -> None:
        results.extend(output.clone() for output in outputs)
        used.fill_(77)

    for number, op in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)):
        tensor = make.like(_values(100 * number + rank, dtype))
        dist.all_reduce(tensor, op)
        done(tensor, tensor)
    tensor = make.like(_values(rank, dtype))
    work = dist.all_reduce(tensor, async_op=True)
    other = make.like(_values(rank + 50, dtype))
    dist.all_reduce(other)
    work.wait()
    done(tensor, tensor)
    done(other, other)
    for root in range(size):
        tensor = make.like(_values(rank, dtype))
        dist.broadcast(tensor, root)
        done(tensor, tensor)
        tensor = make.like(_values(rank, dtype))
        dist.reduce(tensor, root)
        done(tensor, *([tensor] if rank == root else []))
        tensor = make.like(_values(rank, dtype))
        parts = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
        dist.gather(tensor, parts, root)
        done(tensor, *(parts or []))
        whole = make.like(_values(rank, dtype, COUNT // size * size))
        output = torch.empty(COUNT // size, dtype=dtype)
        dist.scatter(output, list(whole.chunk(size)) if rank == root else None, root)
        done(whole, output)
    tensor = make.like(_values(rank, dtype))
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor)
    done(tensor, *parts)
    # As in FSDP2: the input is a part of the output.
    whole = make.like(torch.zeros(COUNT * size, dtype=dtype))
    whole.chunk(size)[rank].copy_(_values(rank, dtype))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, whole.chunk(size)[rank])
    done(whole, whole)
    whole = make.like(_values(rank, dtype, COUNT // size * size))
    output = torch.empty(COUNT // size, dtype=dtype)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, whole)
    done(whole, output)
    sent = [10_000 * (rank + k) for k in range(size)]  # received by rank k
    whole = make.like(_values(rank, dtype, sum(sent)))
    output = torch.empty(sum(sent), dtype=dtype)
    dist.all_to_all_single(output, whole, sent, sent)
    done(whole, output)
    return results


def _same_bits_case(world: World, dtype: torch.dtype) -> None:
    world.init()
    staged = _results(world.rank, world.size, dtype, Maker(world.rank, 0))
    for share in (1.0, 0.5):
        make = Maker(world.rank, share)
        for expected, result in zip(
            staged, _results(world.rank, world.size, dtype, make), strict=True
        ):
            assert torch.equal(expected.view(torch.uint8), result.view(torch.uint8))
        assert make.in_place > 0
    dist.destroy_process_group()


@needs_torch_2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_of_in_place_reads_match_staged_ones_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("DSCOMM_IN_PLACE_BYTES", "0")
    run_fresh(size, _same_bits_case, dtype)


def _large_case(world: World) -> None:
    """Uses the measured threshold, with tensors that exceed all caches."""
    world.init()
    count = 10_000_000
    for number in range(3):
        tensor = deepspeed_comm.empty(count)
        torch.arange(count, out=tensor).add_(world.rank * (number + 1))
        dist.all_reduce(tensor)
        expected = torch.arange(count, dtype=torch.float32) * 2 + (number + 1)
        assert torch.equal(tensor, expected)
        del tensor  # the next one gets the same memory
    dist.destroy_process_group()


def test_all_reduce_of_large_pool_tensors() -> None:
    run_fresh(2, _large_case)


def _overlapping_case(world: World) -> None:
    """Arguments that share memory, which peers must not read while it is written."""
    world.init()
    rank, size = world.rank, world.size
    whole = deepspeed_comm.empty(COUNT * size).fill_(-1)
    whole[:COUNT] = _values(rank, torch.float32)  # not this rank's slot
    parts = list(whole.chunk(size))
    dist.all_gather(parts, whole[:COUNT])
    for k, part in enumerate(parts):
        assert torch.equal(part, _values(k, torch.float32))
    whole.fill_(1)
    out: Any = whole[5 : 5 + COUNT]
    dist.reduce_scatter(out, [part for part in whole.chunk(size)])
    assert out.eq(size).all()
    dist.destroy_process_group()


def test_pool_arguments_that_overlap_give_correct_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSCOMM_IN_PLACE_BYTES", "0")
    run_fresh(3, _overlapping_case)


def _keywords_case(world: World) -> None:
    """The keywords of torch.empty() and empty_like(): the same tensors, in the pool if possible."""
    world.init()
    made = deepspeed_comm.empty(100, 200, dtype=torch.float64, device="cpu", requires_grad=True)
    assert made.is_leaf and made.requires_grad and deepspeed_comm.is_pooled(made)
    assert (made.shape, made.dtype) == ((100, 200), torch.float64)
    elsewhere = deepspeed_comm.empty(100, 200, device="meta", requires_grad=True)
    assert elsewhere.is_meta and elsewhere.requires_grad

    dense = torch.empty(40, 50, 60)
    for tensor in (dense, dense.permute(2, 0, 1), dense[:, ::2], dense[:1].expand(7, 50, 60)):
        like = deepspeed_comm.empty_like(tensor)
        assert (like.shape, like.stride()) == (tensor.shape, torch.empty_like(tensor).stride())
        assert like.dtype == tensor.dtype and not like.requires_grad
        assert deepspeed_comm.is_pooled(like) and not deepspeed_comm.is_pooled(tensor)
    like = deepspeed_comm.empty_like(made, dtype=torch.bfloat16, requires_grad=True)
    assert like.dtype == torch.bfloat16 and like.requires_grad
    assert deepspeed_comm.empty_like(dense, device="meta").is_meta
    assert not deepspeed_comm.is_pooled(deepspeed_comm.empty_like(torch.empty(0)))
    with pytest.raises(TypeError, match="tensor: expected a strided one, got one of torch.sparse"):
        deepspeed_comm.empty_like(torch.eye(3).to_sparse())
    # Has its own dense memory, with its elements in the source's order.
    transposed = deepspeed_comm.empty_like(dense.permute(2, 0, 1)).fill_(world.rank)
    dist.all_reduce(transposed)
    assert transposed.eq(sum(range(world.size))).all()
    dist.destroy_process_group()


def test_empty_and_empty_like_with_keywords_match_those_of_torch() -> None:
    run_fresh(2, _keywords_case)


def _other_backend_case(world: World) -> None:
    world.init("gloo")
    assert not deepspeed_comm.is_pooled(deepspeed_comm.empty(10_000))
    dist.destroy_process_group()


def test_empty_over_gloo_makes_ordinary_tensors() -> None:
    run_fresh(1, _other_backend_case)
