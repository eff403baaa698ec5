"""Messages between ranks: tags, order, sizes, batches."""

from __future__ import annotations

import torch
import torch.distributed as dist


def blocking_case() -> None:
    """Blocking calls send and receive a message that exceeds any channel's staging."""
    rank = dist.get_rank()
    for count in (1, 100_000, 3_000_000):
        tensor = torch.arange(count, dtype=torch.float32)
        if rank == 0:
            dist.send(tensor, 1)
            back = torch.zeros(count)
            dist.recv(back, 1)
            assert torch.equal(back, tensor + 1)
        else:
            got = torch.zeros(count)
            assert dist.recv(got, 0) == 0
            dist.send(got + 1, 0)


def tags_case() -> None:
    rank = dist.get_rank()
    tags = [7, 0, 3, 2_000_000_000]
    if rank == 0:
        works = [dist.isend(torch.full((5,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        for tag in reversed(tags):
            tensor = torch.zeros(5)
            dist.recv(tensor, 0, tag=tag)
            assert tensor.unique().tolist() == [float(tag)]


def order_case() -> None:
    """Messages of one tag arrive in the order in which they were sent."""
    rank = dist.get_rank()
    if rank == 0:
        for i in range(50):
            dist.send(torch.full((i % 9,), float(i)), 1)
    else:
        receives = []
        for i in range(50):
            tensor = torch.zeros(i % 9)
            receives.append((i, tensor, dist.irecv(tensor, 0)))
        for i, tensor, work in reversed(receives):
            work.wait()
            assert tensor.tolist() == [float(i)] * (i % 9)


def source_of_subgroup_case() -> None:
    """dist.recv returns the sender's global rank in a subgroup."""
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank == 3:
        dist.send(torch.ones(2), 1, group=group)
    elif rank == 1:
        tensor = torch.zeros(2)
        assert dist.recv(tensor, group=group) == 3
        assert tensor.tolist() == [1.0, 1.0]


def batch_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [torch.full((10,), float(rank * 10 + k)) for k in range(size)]
    received = [torch.zeros(10) for _ in range(size)]
    operations = []
    for k in range(size):
        if k != rank:
            operations.append(dist.P2POp(dist.irecv, received[k], k))
            operations.append(dist.P2POp(dist.isend, sent[k], k))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for k in range(size):
        if k != rank:
            assert received[k].unique().tolist() == [float(k * 10 + rank)]


def crossing_case() -> None:
    """Both send 4 MiB before either receives: messages progress while no rank waits for them."""
    rank = dist.get_rank()
    tensor = torch.full((1 << 20,), float(rank))
    sender = dist.isend(tensor, 1 - rank)
    received = torch.zeros(1 << 20)
    dist.recv(received, 1 - rank)
    sender.wait()
    assert received.unique().tolist() == [float(1 - rank)]


def beside_collectives_case() -> None:
    """A waiting message does not delay collectives, and vice versa."""
    rank = dist.get_rank()
    tensor = torch.zeros(4)
    if rank == 0:
        receive = dist.irecv(tensor, 1)
    reduced = torch.ones(3)
    works = [dist.all_reduce(reduced, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.barrier()
    if rank == 1:
        dist.send(torch.full((4,), 5.0), 0)
    else:
        receive.wait()
        assert tensor.tolist() == [5.0] * 4
    assert reduced.tolist() == [8.0] * 3
