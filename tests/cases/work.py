"""The Work of an asynchronous call."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch
import torch.distributed as dist


def semantics_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(size)))
    tensor = torch.full((10,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True and work.wait(timedelta(seconds=5)) is True
    assert work.is_completed() and work.is_success()
    assert tensor.unique().tolist() == [total]
    assert [result.data_ptr() for result in work.result()] == [tensor.data_ptr()]

    outputs = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    future = work.get_future()
    value = future.wait()
    assert future.done() and work.get_future().done()
    assert [tensor.data_ptr() for tensor in value] == [output.data_ptr() for output in outputs]
    assert [tensor[0].item() for tensor in value] == [float(k) for k in range(size)]

    # A future requested after the end is complete.
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.get_future().done()


def callbacks_case() -> None:
    """Callbacks run after the call has left the queue, so they may start the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order: list[str] = []

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        order.append("callback")
        tensor = future.value()[0] * 2
        dist.all_reduce(tensor)
        return tensor

    tensor = torch.full((4,), float(rank + 1))
    chained = dist.all_reduce(tensor, async_op=True).get_future().then(again)
    total = float(sum(range(1, size + 1)))
    assert chained.wait().tolist() == [2 * total * size] * 4
    assert order == ["callback"]


def lifetime_case() -> None:
    """A queued call owns its data: the caller may drop tensors and works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = torch.zeros(1)
    for i in range(50):
        dist.all_reduce(torch.full((10_000 + i,), float(rank)), async_op=True)
        outputs = [torch.zeros(100, 3).t() for _ in range(size)]
        work = dist.all_gather(outputs, torch.full((3, 100), float(rank)), async_op=True)
        del outputs
        if i % 2:
            del work
        gc.collect(0)
    dist.all_reduce(last, async_op=True).wait()
    work = dist.isend(torch.full((50_000,), 3.0), (rank + 1) % size)
    received = torch.zeros(50_000)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    assert received.unique().tolist() == [3.0]
