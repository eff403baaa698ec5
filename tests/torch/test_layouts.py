"""Tensors that are not plain contiguous memory: the right result, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import TORCH_2, RankSets
from tests.cases.layouts import (
    lazy_bits_case,
)
from tests.cases.marks import needs_torch_2
from tests.cases.reference import assert_same_bits, make_input, reduce_reference

Layout = Callable[[torch.dtype], torch.Tensor]
ROWS, COLUMNS = 6, 4


def _transposed(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(COLUMNS, ROWS).to(dtype).t()


def _sliced(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2 * ROWS, 3 * COLUMNS).to(dtype)[::2, 1::3]


def _with_offset(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(ROWS * COLUMNS + 5).to(dtype)[5:].view(ROWS, COLUMNS)


def _columns(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(ROWS, COLUMNS + 3).to(dtype)[:, 2 : 2 + COLUMNS]


def _permuted(dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.zeros(2, COLUMNS, 3)
        .to(dtype)
        .permute(0, 2, 1)
        .flatten(0, 1)
        .as_strided((ROWS, COLUMNS), (COLUMNS, 1))
    )


def _three_dimensional(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(3, COLUMNS, 2).to(dtype).permute(0, 2, 1)


LAYOUTS: dict[str, Layout] = {
    "transposed": _transposed,
    "sliced": _sliced,
    "with_offset": _with_offset,
    "columns": _columns,
    "permuted": _permuted,
    "three_dimensional": _three_dimensional,
}
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


def _fill(layout: str, dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with this layout and the rank's input, and the input as plain memory."""
    tensor = LAYOUTS[layout](dtype)
    plain = make_input(dtype, tensor.shape, rank, seed=3)
    tensor.copy_(plain)
    return tensor, plain


def _untouched_around(tensor: torch.Tensor) -> bool:
    """Whether the storage's memory outside of the tensor is still zero."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.storage() if not TORCH_2 else tensor.untyped_storage()
    )
    around = whole.clone()
    around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return int(around.count_nonzero()) == 0


def _layout_case(layout: str, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def finish(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    for dtype in DTYPES:
        inputs = [_fill(layout, dtype, k)[1] for k in range(size)]
        shape = inputs[0].shape

        tensor, _ = _fill(layout, dtype, rank)
        finish(dist.all_reduce(tensor, async_op=is_async))
        total = reduce_reference(inputs, "SUM")
        assert_same_bits(tensor, total, (layout, dtype))
        assert _untouched_around(tensor)

        tensor, _ = _fill(layout, dtype, rank)
        finish(dist.broadcast(tensor, size - 1, async_op=is_async))
        assert_same_bits(tensor, inputs[-1], (layout, dtype))
        assert _untouched_around(tensor)

        tensor, plain = _fill(layout, dtype, rank)
        finish(dist.reduce(tensor, 0, async_op=is_async))
        assert_same_bits(tensor, total if rank == 0 else plain, (layout, dtype))

        tensor, _ = _fill(layout, dtype, rank)
        outputs = [LAYOUTS[layout](dtype) for _ in range(size)]
        finish(dist.all_gather(outputs, tensor, async_op=is_async))
        for output, expected in zip(outputs, inputs, strict=True):
            assert_same_bits(output, expected, (layout, dtype))
            assert _untouched_around(output)

        # Layouts that differ between ranks: elements match in row-major order.
        tensor, _ = _fill(layout if rank == 0 else "with_offset", dtype, rank)
        tensor = tensor.reshape(shape) if rank else tensor
        finish(dist.all_reduce(tensor, async_op=is_async))
        assert_same_bits(tensor.reshape(shape), total, (layout, dtype, "differs"))

        output = LAYOUTS[layout](dtype)
        given = [_fill(layout, dtype, k)[0] for k in range(size)] if rank == 0 else None
        finish(dist.scatter(output, given, 0, async_op=is_async))
        assert_same_bits(output, inputs[rank], (layout, dtype))
        gathered = [LAYOUTS[layout](dtype) for _ in range(size)] if rank == 0 else None
        finish(dist.gather(output, gathered, 0, async_op=is_async))
        for got, expected in zip(gathered or [], inputs, strict=False):
            assert_same_bits(got, expected, (layout, dtype))

        outputs = [LAYOUTS[layout](dtype) for _ in range(size)]
        pieces = [_fill(layout, dtype, rank * size + k)[0] for k in range(size)]
        finish(dist.all_to_all(outputs, pieces, async_op=is_async))
        for k, got in enumerate(outputs):
            assert_same_bits(got, _fill(layout, dtype, k * size + rank)[1], (layout, dtype))
            assert _untouched_around(got)

        output = LAYOUTS[layout](dtype)
        finish(dist.reduce_scatter(output, pieces, async_op=is_async))
        expected = [_fill(layout, dtype, k * size + rank)[1] for k in range(size)]
        assert_same_bits(output, reduce_reference(expected, "SUM"), (layout, dtype))

        tensor, _ = _fill(layout, dtype, rank)
        received = LAYOUTS[layout](dtype)
        works = [
            dist.isend(tensor, (rank + 1) % size),
            dist.irecv(received, (rank - 1) % size),
        ]
        for work in works:
            work.wait()
        assert_same_bits(received, inputs[(rank - 1) % size], (layout, dtype))
        assert _untouched_around(received)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_of_every_layout(ranks: RankSets, layout: str, is_async: bool) -> None:
    ranks(3).run(_layout_case, layout, is_async)


def _base_layout_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.zeros(4, size * 2).t()
    dist.all_gather_into_tensor(output, torch.full((4, 2), float(rank)).t())
    assert output.tolist() == [[float(k // 2)] * 4 for k in range(size * 2)]
    output = torch.zeros(4, 2).t()
    whole = torch.arange(size * 8).float().reshape(4, size * 2).t() + rank
    dist.reduce_scatter_tensor(output, whole)
    expected = sum(torch.arange(size * 8).float().reshape(4, size * 2).t() + k for k in range(size))
    assert torch.equal(output, expected[rank * 2 : rank * 2 + 2])
    output = torch.zeros(3, size).t()
    dist.all_to_all_single(output, torch.arange(size * 3).reshape(3, size).t().float() + 100 * rank)
    columns = torch.arange(size * 3).reshape(3, size).t()
    assert torch.equal(output, torch.stack([columns[rank] + 100 * k for k in range(size)]).float())


@needs_torch_2
def test_single_tensor_collectives_of_every_layout(ranks: RankSets) -> None:
    ranks(3).run(_base_layout_case)


def _ordered_case() -> None:
    """The result of a queued call is the input of the next one, staged or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4, 5), float(rank + 1)).t()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    outputs = [torch.zeros(5, 4) for _ in range(size)]
    works.append(dist.all_gather(outputs, tensor, async_op=True))
    for work in works:
        work.wait()
    expected = sum(range(1, size + 1)) * size**4
    assert all(output.unique().tolist() == [expected] for output in outputs)


def test_queued_calls_on_one_strided_tensor_keep_their_order(ranks: RankSets) -> None:
    ranks(3).run(_ordered_case)


def _expanded_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(size)))
    # All elements share one address, and get the same value.
    tensor = torch.tensor([float(rank)]).expand(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [total] * 5
    # As an input it is an ordinary tensor.
    outputs = [torch.zeros(3, 2) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([[float(rank)], [1.0], [2.0]]).expand(3, 2))
    assert outputs[-1].tolist() == [[float(size - 1)] * 2, [1.0] * 2, [2.0] * 2]
    # If the elements should differ, the shared address cannot hold the result.
    tensor = torch.zeros(1).expand(3) if rank == 0 else torch.arange(3.0)
    if rank == 0:
        with pytest.raises(
            (ValueError, RuntimeError), match=r"share memory.*made with \.clone\(\)"
        ):
            dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)
        assert tensor.tolist() == [(size - 1) * value for value in (0.0, 1.0, 2.0)]
    # As a part of a coalesced call: the parts after it still run.
    tensors = [torch.zeros(1).expand(3) if rank == 0 else torch.arange(3.0), torch.ones(2)]
    options = dist.AllreduceCoalescedOptions()
    coalesced = dist.group.WORLD.allreduce_coalesced(tensors, options)
    if rank == 0:
        with pytest.raises(
            (ValueError, RuntimeError), match=r"share memory.*made with \.clone\(\)"
        ):
            coalesced.wait()
    else:
        coalesced.wait()
        assert tensors[0].tolist() == [(size - 1) * value for value in (0.0, 1.0, 2.0)]
    assert tensors[1].tolist() == [float(size)] * 2
    dist.barrier()


def test_expanded_tensors(ranks: RankSets) -> None:
    ranks(2).run(_expanded_case)


def _overlapping_outputs_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    same = torch.zeros(4)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"tensor_list\[1\] shares memory with tensor_list\[0\]"
    ):
        dist.all_gather([same] * size, torch.ones(4))
    memory = torch.zeros(4 + size)
    with pytest.raises((ValueError, RuntimeError), match="shares memory"):
        dist.all_gather([memory[k : k + 4] for k in range(size)], torch.ones(4))
    # Columns of a matrix interleave and do not overlap.
    matrix = torch.zeros(6, size)
    dist.all_gather(list(matrix.unbind(1)), torch.full((6,), float(rank)))
    assert matrix.tolist() == [[float(k) for k in range(size)]] * 6
    matrix = torch.zeros(size, 6)
    dist.all_gather(list(matrix.unbind(0)), torch.full((6,), float(rank)))
    assert matrix.tolist() == [[float(k)] * 6 for k in range(size)]
    # The input overlaps the outputs at an arbitrary place.
    memory = torch.arange(3.0 * size) + 100 * rank
    dist.all_gather(list(memory.view(size, 3).unbind(0)), memory[1:4])
    assert memory.tolist() == [100.0 * k + i for k in range(size) for i in (1, 2, 3)]


def test_overlapping_outputs_are_refused(ranks: RankSets) -> None:
    ranks(3).run(_overlapping_outputs_case)


def _overlapping_reduce_scatter_case() -> None:
    """Rank 1's output overlaps its own input and part of another input, over many chunks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunk = 32768
    length = 4 * chunk
    memory = [torch.arange(6.0 * chunk) % 1000 + k for k in range(size)]
    first, second = memory[rank][:length], memory[rank][2 * chunk :]
    expected = sum(one[2 * chunk * rank :][:length] for one in [m.clone() for m in memory])
    output = second if rank == 1 else torch.empty(length)
    dist.reduce_scatter(output, [first, second])
    assert torch.equal(output, expected)


def test_reduce_scatter_into_overlapping_inputs(ranks: RankSets) -> None:
    ranks(2).run(_overlapping_reduce_scatter_case)


def _small_shapes_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum(range(size))
    empty = torch.empty(0, 7, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty.permute(2, 0, 1), 0)
    outputs = [torch.empty(7, 0) for _ in range(size)]
    dist.all_gather(outputs, torch.empty(7, 0).t().t())
    # Shapes may differ between ranks if the numbers of elements are equal.
    tensor = torch.arange(6.0).reshape((2, 3) if rank else (6,))
    dist.all_reduce(tensor)
    assert tensor.flatten().tolist() == [value * size for value in range(6)]
    outputs = [torch.zeros(2, 3), *[torch.zeros(6) for _ in range(size - 1)]]
    dist.all_gather(outputs, torch.arange(6.0) + rank)
    assert outputs[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_scalars_empty_tensors_and_differing_shapes(ranks: RankSets) -> None:
    ranks(3).run(_small_shapes_case)


def _modes_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaf = torch.full((3, 4), float(rank), requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.requires_grad and leaf.grad_fn is None
    assert leaf.tolist() == [[float(sum(range(size)))] * 4] * 3
    with torch.inference_mode():
        plain = torch.full((4, 3), float(rank))
        strided = torch.full((4, 3), float(rank)).t()
    for is_async in (False, True):
        for tensor in (plain, strided):
            tensor_before = tensor.clone()
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=is_async)
            if work is not None:
                work.wait()
            assert tensor.max().item() == size - 1, tensor_before
    strided_leaf = torch.full((3, 4), float(rank)).t().requires_grad_()
    dist.broadcast(strided_leaf, 1)
    assert strided_leaf.unique().tolist() == [1.0]


def test_collectives_accept_leaf_and_inference_tensors(ranks: RankSets) -> None:
    ranks(2).run(_modes_case)


def test_conjugate_and_negative_views(ranks: RankSets) -> None:
    ranks(3).run(lazy_bits_case)


def _gloo_bits_case() -> None:
    """The kernels that pass such views on do not change any other backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    view = torch.complex(torch.zeros(3), torch.full((3,), rank + 1.0)).conj().imag
    outputs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outputs, view, group=group)
    assert [output[0].item() for output in outputs] == [-(k + 1.0) for k in range(size)]
    dist.destroy_process_group(group)


def test_gloo_gets_resolved_copies_of_negative_views(ranks: RankSets) -> None:
    ranks(2).run(_gloo_bits_case)


def _unsupported_layouts_case() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        dist.all_reduce(torch.eye(3).to_sparse_csr())
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    dist.barrier()


def test_sparse_in_unsupported_calls_is_refused(ranks: RankSets) -> None:
    ranks(2).run(_unsupported_layouts_case)
