"""Random shapes and splits, from hypothesis; every example runs on reused ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.harness import RankSets
from tests.cases.reference import assert_same_bits, make_input, reduce_reference

SIZE = 3
EXAMPLES = settings(
    max_examples=40,
    deadline=None,  # ranks share few cores, so an example may be slow
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int16, torch.float16, torch.float32, torch.float64]
)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
counts = st.lists(st.integers(0, 70), min_size=SIZE, max_size=SIZE)
matrices = st.lists(counts, min_size=SIZE, max_size=SIZE)


def _strided_like(tensor: torch.Tensor, order: list[int], step: int) -> torch.Tensor:
    """The same values, in memory of another order, with gaps."""
    order = [d for d in order if d < tensor.dim()]
    permuted = tensor.permute(order)
    memory = torch.zeros([extent * step for extent in permuted.shape], dtype=tensor.dtype)
    view = memory[tuple(slice(None, None, step) for _ in order)]
    back = [order.index(d) for d in range(len(order))]
    view = view.permute(back)
    return view.copy_(tensor)


def _reduction_case(
    shape: tuple[int, ...], dtype: torch.dtype, order: list[int], steps: list[int]
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [make_input(dtype, shape, k) for k in range(size)]
    tensor = _strided_like(inputs[rank], order, steps[rank])
    dist.all_reduce(tensor)
    assert_same_bits(tensor, reduce_reference(inputs, "SUM"))
    outputs = [_strided_like(torch.zeros_like(inputs[k]), order, steps[k]) for k in range(size)]
    dist.all_gather(outputs, _strided_like(inputs[rank], order, steps[-1 - rank]))
    for output, expected in zip(outputs, inputs, strict=True):
        assert_same_bits(output, expected)


@EXAMPLES
@given(
    shape=shapes,
    dtype=dtypes,
    order=st.permutations(range(4)),
    steps=st.lists(st.integers(1, 3), min_size=SIZE, max_size=SIZE),
)
def test_reductions_of_any_shape_and_stride(
    ranks: RankSets, shape: tuple[int, ...], dtype: torch.dtype, order: list[int], steps: list[int]
) -> None:
    ranks(SIZE).run(_reduction_case, shape, dtype, order, steps)


def _splits_case(matrix: list[list[int]], dtype: torch.dtype, width: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [
        [make_input(dtype, (matrix[a][b], width), a * size + b) for b in range(size)]
        for a in range(size)
    ]
    expected = torch.cat([pieces[k][rank] for k in range(size)])
    output = torch.zeros_like(expected)
    received = [matrix[k][rank] for k in range(size)]
    dist.all_to_all_single(output, torch.cat(pieces[rank]), received, matrix[rank])
    assert_same_bits(output, expected, matrix)
    outputs = [torch.zeros_like(pieces[k][rank]) for k in range(size)]
    dist.all_to_all(outputs, pieces[rank])
    assert_same_bits(torch.cat(outputs), expected, matrix)


@EXAMPLES
@given(matrix=matrices, dtype=dtypes, width=st.integers(0, 5))
def test_all_to_all_with_any_splits(
    ranks: RankSets, matrix: list[list[int]], dtype: torch.dtype, width: int
) -> None:
    ranks(SIZE).run(_splits_case, matrix, dtype, width)


def _uneven_case(sizes: list[int], dtype: torch.dtype, root: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [make_input(dtype, (sizes[k],), k) for k in range(size)]
    outputs = [torch.zeros_like(tensor) for tensor in inputs]
    dist.all_gather(outputs, inputs[rank])
    for output, expected in zip(outputs, inputs, strict=True):
        assert_same_bits(output, expected, sizes)
    whole = [[make_input(dtype, (count,), k) for count in sizes] for k in range(size)]
    output = torch.zeros_like(whole[rank][rank])
    dist.reduce_scatter(output, whole[rank])
    assert_same_bits(output, reduce_reference([whole[k][rank] for k in range(size)], "SUM"), sizes)
    gathered = [torch.zeros_like(tensor) for tensor in inputs] if rank == root else None
    dist.gather(inputs[rank], gathered, root)
    for got, expected in zip(gathered or [], inputs, strict=False):
        assert_same_bits(got, expected, sizes)
    output = torch.zeros_like(inputs[rank])
    dist.scatter(output, inputs if rank == root else None, root)
    assert_same_bits(output, inputs[rank], sizes)


@EXAMPLES
@given(sizes=counts, dtype=dtypes, root=st.integers(0, SIZE - 1))
def test_collectives_with_uneven_counts_match_reference(
    ranks: RankSets, sizes: list[int], dtype: torch.dtype, root: int
) -> None:
    ranks(SIZE).run(_uneven_case, sizes, dtype, root)
