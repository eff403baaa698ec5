"""Messages: tags, order, any source, sizes, batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2
from tests.cases.point_to_point import (
    batch_case,
    beside_collectives_case,
    blocking_case,
    crossing_case,
    order_case,
    source_of_subgroup_case,
    tags_case,
)
from tests.cases.reference import MOVED, assert_same_bits, make_input


def _every_dtype_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for number, (dtype, count) in enumerate(itertools.product(MOVED, (0, 1, 300))):
        sender = dist.isend(make_input(dtype, (count,), rank, seed=number), right)
        received = torch.zeros(count).to(dtype)
        dist.recv(received, left)
        sender.wait()
        assert_same_bits(received, make_input(dtype, (count,), left, seed=number), (dtype, count))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_every_dtype(ranks: RankSets, size: int) -> None:
    ranks(size).run(_every_dtype_case)


def test_blocking_send_and_receive(ranks: RankSets) -> None:
    ranks(2).run(blocking_case)


def test_tags_received_out_of_order(ranks: RankSets) -> None:
    ranks(2).run(tags_case)


def test_messages_of_one_tag_keep_their_order(ranks: RankSets) -> None:
    ranks(2).run(order_case)


def _any_source_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = []
        for _ in range(2 * (size - 1)):
            tensor = torch.zeros(3)
            source = dist.recv(tensor)
            assert tensor.unique().tolist() == [float(source)]
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, size)))
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(rank)), 0)


@pytest.mark.parametrize("size", [2, 4])
def test_receive_from_any_source(ranks: RankSets, size: int) -> None:
    ranks(size).run(_any_source_case)


def test_recv_in_subgroup_returns_global_rank(ranks: RankSets) -> None:
    ranks(4).run(source_of_subgroup_case)


@pytest.mark.parametrize("size", [2, 4])
def test_batch_isend_irecv(ranks: RankSets, size: int) -> None:
    ranks(size).run(batch_case)


def test_large_messages_in_both_directions_do_not_deadlock(ranks: RankSets) -> None:
    ranks(2).run(crossing_case)


def test_waiting_receive_does_not_delay_collectives(ranks: RankSets) -> None:
    ranks(2).run(beside_collectives_case)


def _size_mismatch_case() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    with pytest.raises(RuntimeError, match="dscomm"):
        if rank == 0:
            dist.send(torch.ones(8), 1, group=group)
            dist.recv(
                torch.zeros(1), 1, group=group
            )  # the sender may have left before it could get the error
        else:
            dist.recv(torch.zeros(4), 0, group=group)
    dist.barrier()


def test_receive_smaller_than_send_raises(ranks: RankSets) -> None:
    ranks(2).run(_size_mismatch_case)


def _threads_case(world: World) -> None:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from deepspeed_comm import _C

    store, size, rounds = dist.HashStore(), 3, 20
    together = threading.Barrier(size, timeout=60)
    problems: list[str] = []

    def check(got: torch.Tensor, expected: int) -> None:
        if got.tolist() != [float(expected)]:
            problems.append(f"got {got.tolist()}, expected {expected}")

    def work(rank: int) -> None:
        try:
            options = _DistributedBackendOptions()
            options.store, options.group_rank, options.group_size = store, rank, size
            options.timeout = timedelta(seconds=60)
            backend = _C.create_backend(options)
            for number in range(rounds):
                for other in range(size):
                    if other != rank:
                        value = torch.tensor([float(100 * rank + 10 * other + number)])
                        backend.send([value], other, 0).wait()
                for other in range(size):
                    if other != rank:
                        got = torch.zeros(1)
                        backend.recv([got], other, 0).wait()
                        check(got, 100 * other + 10 * rank + number)
            together.wait()
            if rank == 0:
                backend.shutdown()  # ends nothing on the other ranks
            together.wait()
            if rank == 1:
                backend.send([torch.tensor([7.0])], 2, 5).wait()
            if rank == 2:
                got = torch.zeros(1)
                backend.recv([got], 1, 5).wait()
                check(got, 7)
            together.wait()
        except Exception as error:
            problems.append(f"rank {rank}: {error!r}")
            together.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


@needs_torch_2
def test_ranks_that_are_threads_get_their_own_messages() -> None:
    run_fresh(1, _threads_case)


def _abort_case() -> None:
    """A message sent before an abort is received, as with gloo; then comes the error."""
    rank = dist.get_rank()
    tensor = torch.zeros(1)
    if rank == 0:
        dist.send(torch.ones(1), 1)
        dist.send(torch.ones(1) * 2, 1)
        _backend().abort()
    else:
        dist.recv(tensor, 0)
        assert tensor.item() == 1
        dist.recv(tensor, 0)
        assert tensor.item() == 2
        with pytest.raises(RuntimeError, match=r"aborted by rank 0: its program called abort\(\)"):
            dist.recv(tensor, 0)


def _backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


@needs_torch_2
def test_messages_before_an_abort_are_received() -> None:
    run_fresh(2, _in_fresh_group, _abort_case)


def _in_fresh_group(world: World, case: Callable[[], None]) -> None:
    world.init()
    case()
