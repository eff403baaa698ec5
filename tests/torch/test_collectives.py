"""Every collective with every dtype and op, synchronous and asynchronous, against references."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases.collectives import (
    coalescing_manager_case,
    not_a_number_case,
    null_work_case,
    premultiplied_case,
    refused_reductions_case,
)
from tests.cases.harness import TORCH_2, RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2
from tests.cases.reference import (
    FLOAT8,
    INTEGERS,
    MOVED,
    OPS,
    REDUCED,
    assert_same_bits,
    has_meaning,
    make_input,
    reduce_reference,
)

SIZES = [1, 2, 3, 4]
# Below and above one cache line's payload, odd, and several chunks of staging.
COUNTS = [0, 1, 7, 1000]
BIG = 300_001


def _finish(work: Any, is_async: bool) -> None:
    if is_async:
        work.wait()
        assert work.is_completed()


def _reductions() -> list[tuple[torch.dtype, str]]:
    return [(dtype, op) for dtype, op in itertools.product(REDUCED, OPS) if has_meaning(dtype, op)]


def _all_reduce_case(count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, op) in enumerate(_reductions()):
        inputs = [make_input(dtype, (count,), k, seed=number) for k in range(size)]
        tensor = inputs[rank].clone()
        is_async = number % 2 == 0
        _finish(dist.all_reduce(tensor, OPS[op], async_op=is_async), is_async)
        assert_same_bits(tensor, reduce_reference(inputs, op), (dtype, op, count))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce(ranks: RankSets, size: int, count: int) -> None:
    ranks(size).run(_all_reduce_case, count)


def _big_all_reduce_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, op in [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int8, "MAX")]:
        inputs = [make_input(dtype, (BIG,), k) for k in range(size)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, OPS[op])
        assert_same_bits(tensor, reduce_reference(inputs, op), (dtype, op))


@pytest.mark.parametrize("size", SIZES)
def test_large_all_reduce(ranks: RankSets, size: int) -> None:
    ranks(size).run(_big_all_reduce_case)


@pytest.mark.skipif(
    not hasattr(dist, "_make_nccl_premul_sum"), reason="this build of torch cannot make PREMUL_SUM"
)
@pytest.mark.parametrize("size", [1, 3])
def test_premultiplied_sum(ranks: RankSets, size: int) -> None:
    ranks(size).run(premultiplied_case)


def test_nan_of_one_rank_reaches_all_results(ranks: RankSets) -> None:
    ranks(3).run(not_a_number_case)


def test_undefined_reductions_are_refused(ranks: RankSets) -> None:
    ranks(2).run(refused_reductions_case)


def _broadcast_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, count) in enumerate(itertools.product(MOVED, COUNTS)):
        root = number % size
        expected = make_input(dtype, (count,), root, seed=number)
        tensor = make_input(dtype, (count,), rank, seed=number)
        is_async = number % 3 == 0
        _finish(dist.broadcast(tensor, root, async_op=is_async), is_async)
        assert_same_bits(tensor, expected, (dtype, count, root))


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(ranks: RankSets, size: int) -> None:
    ranks(size).run(_broadcast_case)


def _reduce_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, op) in enumerate(_reductions()):
        root, count = number % size, COUNTS[number % len(COUNTS)]
        inputs = [make_input(dtype, (count,), k, seed=number) for k in range(size)]
        tensor = inputs[rank].clone()
        is_async = number % 2 == 0
        _finish(dist.reduce(tensor, root, OPS[op], async_op=is_async), is_async)
        expected = reduce_reference(inputs, op) if rank == root else inputs[rank]
        assert_same_bits(tensor, expected, (dtype, op, root))


@pytest.mark.parametrize("size", SIZES)
def test_reduce(ranks: RankSets, size: int) -> None:
    ranks(size).run(_reduce_case)


def _all_gather_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, count) in enumerate(itertools.product(MOVED, COUNTS)):
        inputs = [make_input(dtype, (count,), k, seed=number) for k in range(size)]
        outputs = [torch.zeros(count).to(dtype) for _ in range(size)]
        is_async = number % 2 == 0
        _finish(dist.all_gather(outputs, inputs[rank], async_op=is_async), is_async)
        for got, expected in zip(outputs, inputs, strict=True):
            assert_same_bits(got, expected, (dtype, count))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(ranks: RankSets, size: int) -> None:
    ranks(size).run(_all_gather_case)


def _uneven_all_gather_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(k, 3) for k in range(size)]  # rank 0's is empty
    inputs = [make_input(torch.float32, shape, k) for k, shape in enumerate(shapes)]
    outputs = [torch.empty(shape) for shape in shapes]
    dist.all_gather(outputs, inputs[rank])
    for got, expected in zip(outputs, inputs, strict=True):
        assert_same_bits(got, expected)
    # In place: the input is this rank's output.
    outputs = [torch.zeros(5) for _ in range(size)]
    outputs[rank] += rank + 1
    dist.all_gather(outputs, outputs[rank])
    assert [out[0].item() for out in outputs] == [k + 1 for k in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_and_in_place_all_gather(ranks: RankSets, size: int) -> None:
    ranks(size).run(_uneven_all_gather_case)


def _into_tensor(output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
    function = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
    return function(output, tensor, **options)


def _from_tensor(output: torch.Tensor, tensor: torch.Tensor, op: Any, **options: Any) -> Any:
    function = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
    return function(output, tensor, op, **options)


def _all_gather_into_tensor_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, rows) in enumerate(itertools.product(MOVED, (0, 1, 40))):
        inputs = [make_input(dtype, (rows, 3), k, seed=number) for k in range(size)]
        together = torch.cat([tensor.view(torch.uint8) for tensor in inputs]).view(dtype)
        is_async = number % 2 == 0
        joined = torch.zeros(size * rows, 3).to(dtype)
        _finish(_into_tensor(joined, inputs[rank], async_op=is_async), is_async)
        assert_same_bits(joined, together, (dtype, rows))
        stacked = torch.zeros(size, rows, 3).to(dtype)
        _finish(_into_tensor(stacked, inputs[rank], async_op=is_async), is_async)
        assert_same_bits(stacked, together.reshape(size, rows, 3), (dtype, rows, "stacked"))
    # In place: the input is this rank's slice of the output.
    output = torch.zeros(size, 4)
    output[rank] = rank + 1
    _into_tensor(output, output[rank])
    assert output[:, 0].tolist() == [k + 1 for k in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_into_tensor(ranks: RankSets, size: int) -> None:
    ranks(size).run(_all_gather_into_tensor_case)


def _gather_and_scatter_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, count) in enumerate(itertools.product(MOVED, COUNTS)):
        root = number % size
        is_async = number % 2 == 0
        inputs = [make_input(dtype, (count,), k, seed=number) for k in range(size)]
        outputs = [torch.zeros(count).to(dtype) for _ in range(size)] if rank == root else None
        _finish(dist.gather(inputs[rank], outputs, root, async_op=is_async), is_async)
        for got, expected in zip(outputs or [], inputs, strict=False):
            assert_same_bits(got, expected, ("gather", dtype, count))
        output = torch.zeros(count).to(dtype)
        given = inputs if rank == root else None
        _finish(dist.scatter(output, given, root, async_op=is_async), is_async)
        assert_same_bits(output, inputs[rank], ("scatter", dtype, count))


@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter(ranks: RankSets, size: int) -> None:
    ranks(size).run(_gather_and_scatter_case)


def _reduce_scatter_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, op) in enumerate(_reductions()):
        count, is_async = COUNTS[number % len(COUNTS)], number % 2 == 0
        whole = [make_input(dtype, (size, count), k, seed=number) for k in range(size)]
        expected = reduce_reference([tensor[rank] for tensor in whole], op)
        output = torch.zeros(count).to(dtype)
        pieces = list(whole[rank].unbind(0))
        _finish(dist.reduce_scatter(output, pieces, OPS[op], async_op=is_async), is_async)
        assert_same_bits(output, expected, (dtype, op, count))
        output = torch.zeros(count).to(dtype)
        _finish(_from_tensor(output, whole[rank].reshape(-1), OPS[op], async_op=is_async), is_async)
        assert_same_bits(output, expected, (dtype, op, count, "tensor"))
    # Uneven, and in place.
    shapes = [(k + 1, 2) for k in range(size)]
    inputs = [
        [make_input(torch.float64, shape, k, seed=9) for shape in shapes] for k in range(size)
    ]
    expected = reduce_reference([inputs[k][rank] for k in range(size)], "SUM")
    output = inputs[rank][rank]
    dist.reduce_scatter(output, inputs[rank])
    assert_same_bits(output, expected, "uneven")


def _complex_product_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.complex64, torch.complex128):
        # Whole numbers, so that the product needs no rounding.
        inputs = [torch.tensor([1 + 1j, 2 - 1j, k + 2j]).to(dtype) for k in range(size)]
        product = torch.stack(inputs).prod(0)
        tensor = inputs[rank].clone()
        dist.reduce(tensor, 0, dist.ReduceOp.PRODUCT)
        assert torch.equal(tensor, product if rank == 0 else inputs[rank]), (dtype, "reduce")
        output = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(output, [inputs[rank]] * size, dist.ReduceOp.PRODUCT)
        assert torch.equal(output, product), (dtype, "reduce_scatter")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_complex_product_reductions(ranks: RankSets, size: int) -> None:
    ranks(size).run(_complex_product_case)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(ranks: RankSets, size: int) -> None:
    ranks(size).run(_reduce_scatter_case)


def _all_to_all_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, dtype in enumerate(MOVED):
        is_async = number % 2 == 0
        # Rank a sends a + b elements to rank b: nothing from rank 0 to itself.
        pieces = [
            [make_input(dtype, (a + b,), a * 10 + b, seed=number) for b in range(size)]
            for a in range(size)
        ]
        expected = [pieces[k][rank] for k in range(size)]
        outputs = [torch.zeros(rank + k).to(dtype) for k in range(size)]
        _finish(dist.all_to_all(outputs, pieces[rank], async_op=is_async), is_async)
        for got, wanted in zip(outputs, expected, strict=True):
            assert_same_bits(got, wanted, dtype)

        sent = torch.cat([piece.view(torch.uint8) for piece in pieces[rank]]).view(dtype)
        wanted = torch.cat([piece.view(torch.uint8) for piece in expected]).view(dtype)
        output = torch.zeros(wanted.numel()).to(dtype)
        splits_out, splits_in = [rank + k for k in range(size)], [rank + k for k in range(size)]
        _finish(
            dist.all_to_all_single(output, sent, splits_out, splits_in, async_op=is_async), is_async
        )
        assert_same_bits(output, wanted, (dtype, "single"))

        rows = make_input(dtype, (size * 2, 3), rank, seed=number)
        output = torch.zeros(size * 2, 3).to(dtype)
        _finish(dist.all_to_all_single(output, rows, async_op=is_async), is_async)
        for k in range(size):
            theirs = make_input(dtype, (size * 2, 3), k, seed=number)[2 * rank : 2 * rank + 2]
            assert_same_bits(output[2 * k : 2 * k + 2], theirs, (dtype, "equal"))
    # In place, which needs staging.
    tensor = torch.arange(size * 2) + 100 * rank
    dist.all_to_all_single(tensor, tensor)
    assert tensor.tolist() == [100 * k + 2 * rank + i for k in range(size) for i in range(2)]


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(ranks: RankSets, size: int) -> None:
    ranks(size).run(_all_to_all_case)


def _coalesced_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(3,), (0,), (2, 2), (1000,)]
    backend = dist.group.WORLD
    inputs = [
        [make_input(torch.float32, shape, k, seed=i) for i, shape in enumerate(shapes)]
        for k in range(size)
    ]
    tensors = [tensor.clone() for tensor in inputs[rank]]
    dist.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        assert_same_bits(tensor, reduce_reference([inputs[k][i] for k in range(size)], "SUM"))

    lists = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(lists, inputs[rank])
    for k in range(size):
        for got, expected in zip(lists[k], inputs[k], strict=True):
            assert_same_bits(got, expected)

    if TORCH_2:
        outputs = [torch.zeros(size, *shape) for shape in shapes]
        backend.allgather_into_tensor_coalesced(outputs, inputs[rank]).wait()
        for i, output in enumerate(outputs):
            assert_same_bits(output, torch.stack([inputs[k][i] for k in range(size)]))
        outputs = [torch.zeros(shape) for shape in shapes]
        whole = [torch.stack([tensor + k for k in range(size)]) for tensor in inputs[rank]]
        backend.reduce_scatter_tensor_coalesced(outputs, whole).wait()
        for i, output in enumerate(outputs):
            expected = reduce_reference([inputs[k][i] + rank for k in range(size)], "SUM")
            assert_same_bits(output, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_coalesced_collectives(ranks: RankSets, size: int) -> None:
    ranks(size).run(_coalesced_case)


OVERLAPS: list[Callable[[torch.Tensor, int], list[torch.Tensor]]] = [
    lambda t, n: [t[: 5 * n], t[3 * n :]],
    lambda t, n: [t[: 4 * n], t[4 * n :], t],
    lambda t, n: [t[2 * n : 6 * n], t[: 2 * n], t[n : n + 1], t[5 * n :]],
    lambda t, n: [t[::2], t[: 6 * n], t[1::2]],
    lambda t, n: [t[n : 7 * n], t[::2], t[1::2]],
]


def _coalesced_overlap_case(world: World, backend: str) -> None:
    """Parts that share memory: each reads the values from before the call."""
    world.init(backend)
    group, rank = dist.group.WORLD, world.rank

    def pair() -> torch.Tensor:
        return torch.tensor([1.0 + rank, 10.0 + rank])

    options = dist.AllreduceCoalescedOptions()
    tensor = pair()
    group.allreduce_coalesced([tensor, torch.ones(3), tensor], options).wait()
    assert tensor.tolist() == [3.0, 21.0]
    for parts in OVERLAPS:
        for n in (1, 2000):
            before = torch.arange(8.0 * n) + 10 * rank
            tensor, covered = before.clone(), torch.zeros(8 * n, dtype=torch.bool)
            given = parts(tensor, n)
            if backend == "gloo" and not all(part.is_contiguous() for part in given):
                continue  # gloo ignores strides
            group.allreduce_coalesced(given, options).wait()
            for part in parts(covered, n):
                part.fill_(True)
            total = 2 * torch.arange(8.0 * n) + 10
            assert torch.equal(tensor, torch.where(covered, total, before)), (parts, n)
    with dist._coalescing_manager():
        tensor = pair()
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 21.0]
    tensor = pair()
    torch.ops._c10d_functional.all_reduce_coalesced_([tensor, tensor], "sum", group.group_name)
    torch.ops._c10d_functional.wait_tensor(tensor)
    assert tensor.tolist() == [3.0, 21.0]

    # The second part's input is the first part's output.
    first, second = torch.zeros(4), torch.zeros(8)
    group.allgather_into_tensor_coalesced([first, second], [pair(), first]).wait()
    assert first.tolist() == [1.0, 10.0, 2.0, 11.0] and not second.any()
    outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(2)]
    group.allgather_coalesced(outputs, [pair(), outputs[1][0]]).wait()
    assert outputs[1][0].tolist() == [2.0, 11.0] and not outputs[1][1].any()
    first, second = torch.zeros(2), torch.zeros(1)
    source = torch.arange(4.0) + rank
    group.reduce_scatter_tensor_coalesced([first, second], [source, first]).wait()
    assert first.tolist() == [4 * rank + 1.0, 4 * rank + 3.0] and second.tolist() == [0.0]
    # Where two outputs overlap, the later one's values remain.
    first = torch.zeros(4)
    group.allgather_into_tensor_coalesced([first, first], [pair(), pair() + 100]).wait()
    assert first.tolist() == [101.0, 110.0, 102.0, 111.0]
    # Each rank's input is a slice of the output: in place, with a second such part.
    gathered = [torch.zeros(4), torch.zeros(6)]
    own = [each.chunk(2)[rank].fill_(rank + 1.0) for each in gathered]
    group.allgather_into_tensor_coalesced(gathered, own).wait()
    assert [each.tolist() for each in gathered] == [[1.0] * n + [2.0] * n for n in (2, 3)]
    dist.barrier()


@needs_torch_2
def test_overlapping_coalesced_tensors_are_read_as_before_the_call() -> None:
    run_fresh(2, _coalesced_overlap_case, "dscomm")


@needs_torch_2
def test_gloo_reads_overlapping_coalesced_tensors_as_before_the_call() -> None:
    """gloo gives the results that the case above expects."""
    run_fresh(2, _coalesced_overlap_case, "gloo")


@needs_torch_2
def test_coalescing_manager(ranks: RankSets) -> None:
    ranks(2).run(coalescing_manager_case)


def _coalescing_by_device_case() -> None:
    """With a device, the manager makes the backend start all calls and wait for them together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    total = float(sum(range(size)))
    tensors = [torch.full((n,), float(rank)) for n in (1, 50, 5000)]
    outputs = [torch.zeros(3) for _ in range(size)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
        dist.all_gather(outputs, torch.full((3,), float(rank)))
    manager.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[total]] * 3
    assert [output[0].item() for output in outputs] == list(range(size))

    backend = dist.group.WORLD._get_backend(device)
    backend._start_coalescing()
    with pytest.raises(ValueError, match="being coalesced already"):
        backend._start_coalescing()
    works = [dist.isend(torch.full((4,), float(rank)), (rank + 1) % size)]
    received = torch.zeros(4)
    works.append(dist.irecv(received, (rank - 1) % size))
    work = backend._end_coalescing()
    future = work.get_future()
    assert len(future.wait()) == 2 and work.is_completed() and work.is_success()
    assert received.unique().tolist() == [float((rank - 1) % size)]
    with pytest.raises(ValueError, match="has not started"):
        backend._end_coalescing()

    # An exception inside the block ends the coalescing, which torch leaves open: later calls run,
    # and are done when they return.
    def body_that_raises(how: str) -> None:
        with dist._coalescing_manager(group, device=device):
            dist.broadcast(torch.ones(3), 0, group=group)
            dist.all_reduce(torch.ones(3), group=group)
            if how == "call":
                dist.all_gather(outputs, torch.zeros(4), group=group)
            raise ValueError("expected by nobody")

    for how in ("call", "body", "body, then a manager", "body, held"):
        group = dist.new_group()
        with pytest.raises(ValueError, match="expected") as raised:
            body_that_raises(how)
        if how == "body, then a manager":
            with dist._coalescing_manager(group, device=device, async_ops=True) as manager:
                dist.broadcast(tensors[0], 0, group=group)
            manager.wait()
        if how != "body, held":
            del raised  # and with it the frames that hold the manager
        for number in range(10):
            tensor = torch.full((100_000,), float(number if rank == 0 else -1))
            dist.broadcast(tensor, 0, group=group)
            assert tensor[-1].item() == number, how
            tensor = torch.full((100_000,), float(number + rank))
            dist.all_reduce(tensor, group=group)
            assert tensor[-1].item() == 2 * number + 1, how
        dist.barrier()
        dist.destroy_process_group(group)


@needs_torch_2
def test_coalescing_manager_with_a_device(ranks: RankSets) -> None:
    ranks(2).run(_coalescing_by_device_case)


@needs_torch_2
def test_synchronous_calls_return_no_work(ranks: RankSets) -> None:
    ranks(2).run(null_work_case)


def _barrier_case() -> None:
    for _ in range(20):
        dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("size", SIZES)
def test_barrier(ranks: RankSets, size: int) -> None:
    ranks(size).run(_barrier_case)


def _object_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (rank * 100), "list": list(range(rank))}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    assert [entry["rank"] for entry in everyone] == list(range(size))
    assert len(everyone[-1]["text"]) == 100 * (size - 1)

    sent = [mine, "second"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(sent, src=size - 1)
    assert sent[0]["rank"] == size - 1 and sent[1] == "second"

    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is not None:
        assert [entry["rank"] for entry in gathered] == list(range(size))

    received: list[Any] = [None]
    dist.scatter_object_list(
        received, [f"for {k}" for k in range(size)] if rank == 0 else None, src=0
    )
    assert received[0] == f"for {rank}"


@pytest.mark.parametrize("size", [2, 3])
def test_object_collectives(ranks: RankSets, size: int) -> None:
    ranks(size).run(_object_case)


def _mixed_asynchronous_case(rounds: int) -> None:
    """Many calls in flight, waited for out of order, with synchronous calls between them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works, checks = [], []
    for i in range(rounds):
        tensor = torch.full((i % 37 + 1,), float(rank + i))
        works.append(dist.all_reduce(tensor, async_op=True))
        checks.append((tensor, float(sum(k + i for k in range(size)))))
        if i % 5 == 0:
            outputs = [torch.zeros(3) for _ in range(size)]
            works.append(dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True))
            checks += [(output, float(k)) for k, output in enumerate(outputs)]
        if i % 11 == 0:
            single = torch.tensor([rank])
            dist.all_reduce(single, dist.ReduceOp.MAX)
            assert single.item() == size - 1
    for work in reversed(works):
        work.wait()
    for tensor, expected in checks:
        assert tensor.unique().tolist() == [expected]


@pytest.mark.parametrize("size", [2, 4])
def test_mixed_synchronous_and_asynchronous_collectives(ranks: RankSets, size: int) -> None:
    ranks(size).run(_mixed_asynchronous_case, 100)


def test_lists_cover_every_integer_and_float8_dtype() -> None:
    """A dtype of this torch that is missing from the lists above would go untested."""
    expected = 8 if TORCH_2 else 5
    assert len(INTEGERS) == expected
    assert len(FLOAT8) == (5 if TORCH_2 else 0)


def _three_gib_case() -> None:
    """Bytes, counts and offsets exceed 2^31, and the sum of all moved bytes exceeds 2^32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3 << 30,), rank + 1, dtype=torch.uint8)
    marks = torch.tensor([0, (1 << 31) - 1, 1 << 31, (3 << 30) - 1])
    tensor[marks] = torch.arange(4, dtype=torch.uint8) + rank
    dist.all_reduce(tensor)
    expected = torch.tensor([sum(i + k for k in range(size)) for i in range(4)], dtype=torch.uint8)
    assert torch.equal(tensor[marks], expected)
    tensor[marks] = size * (size + 1) // 2
    assert int(tensor.min()) == int(tensor.max()) == size * (size + 1) // 2
    dist.broadcast(tensor.fill_(rank + 7), 1)
    assert int(tensor.min()) == int(tensor.max()) == 8


def test_collectives_of_three_gib(ranks: RankSets) -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 8 << 30:  # one tensor in each of two ranks
        pytest.skip("needs 8 GiB of free memory")
    ranks(2).run(_three_gib_case)
