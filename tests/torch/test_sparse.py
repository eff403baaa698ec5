"""All-reduce of sparse COO tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import RankSets
from tests.cases.reference import assert_same_bits, make_input, reduce_reference


def _sparse(
    rank: int, shape: tuple[int, ...], sparse_dims: int, dtype: torch.dtype
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    entries = 3 * rank  # rank 0 has none
    rows = [torch.randint(0, shape[d], (entries,), generator=generator) for d in range(sparse_dims)]
    values = torch.randint(-5, 6, (entries, *shape[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(torch.stack(rows), values, shape)


def _sparse_case(shape: tuple[int, ...], sparse_dims: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        expected = sum(_sparse(k, shape, sparse_dims, dtype).to_dense() for k in range(size))
        for is_async in (False, True):
            tensor = _sparse(rank, shape, sparse_dims, dtype)
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            assert tensor.is_sparse and tensor.shape == shape
            assert torch.equal(tensor.to_dense(), expected), (dtype, tensor, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape, sparse_dims", [((7,), 1), ((4, 5), 2), ((6, 3, 2), 1)])
def test_sparse_all_reduce(
    ranks: RankSets, size: int, shape: tuple[int, ...], sparse_dims: int
) -> None:
    ranks(size).run(_sparse_case, shape, sparse_dims)


def _one_rounding_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [make_input(dtype, (50,), k) for k in range(size)]
        tensor = torch.sparse_coo_tensor(torch.arange(50).unsqueeze(0), inputs[rank], (50,))
        dist.all_reduce(tensor)
        assert_same_bits(tensor.to_dense(), reduce_reference(inputs, "SUM"), dtype)
        # Entries with the same index on one rank are also summed before rounding.
        values = torch.tensor([1.0, 2.0**-7, 2.0**-7, 2.0**-11]).to(dtype)
        tensor = torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.int64), values, (1,))
        dist.all_reduce(tensor)
        expected = (values.to(torch.float32).sum() * size).to(dtype)
        assert_same_bits(tensor.to_dense(), expected.reshape(1), (dtype, "duplicates"))


def test_sparse_sum_of_16_bit_floats_is_rounded_once(ranks: RankSets) -> None:
    ranks(4).run(_one_rounding_case)


def _same_bits_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 10, (1, 40), generator=generator)
    tensor = torch.sparse_coo_tensor(indices, torch.randn(40, generator=generator), (10,))
    dist.all_reduce(tensor)
    outputs = [torch.zeros(10) for _ in range(size)]
    dist.all_gather(outputs, tensor.to_dense())
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_sparse_sum_is_bit_identical_on_every_rank(ranks: RankSets) -> None:
    ranks(4).run(_same_bits_case)


def _refused_case() -> None:
    tensor = torch.eye(3).to_sparse()
    with pytest.raises(
        (ValueError, RuntimeError), match="got MAX for a sparse tensor, expected SUM"
    ):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    dist.barrier()


def test_sparse_reduction_other_than_sum_is_refused(ranks: RankSets) -> None:
    ranks(2).run(_refused_case)


def _different_shapes_case() -> None:
    group = dist.new_group()
    shape = (3, 4) if dist.get_rank() == 0 else (3, 5)
    with pytest.raises(RuntimeError, match=r"\[3, 4\].*\[3, 5\]|\[3, 5\].*\[3, 4\]"):
        dist.all_reduce(torch.sparse_coo_tensor([[0], [1]], [1.0], shape), group=group)
    # The mismatch ended the group.
    with pytest.raises(
        RuntimeError, match="ended earlier: .*pass the same shape, dtype and number"
    ):
        dist.barrier(group=group)


def test_sparse_shapes_that_differ_are_named_on_both_ranks(ranks: RankSets) -> None:
    ranks(2).run(_different_shapes_case)
