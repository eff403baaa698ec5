"""Tensors whose conjugation or negation is pending."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


def lazy_bits_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def negative(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.complex(torch.arange(3.0) + rank, torch.arange(3.0) * 10 + rank + 1)
        view = base.conj().imag
        assert view.is_neg()
        return base, view

    # The result is written through the view into its base.
    base, view = negative()
    expected = sum(-(torch.arange(3.0) * 10 + k + 1) for k in range(size))
    for is_async in (False, True):
        base, view = negative()
        work = dist.all_reduce(view, async_op=is_async)
        if work is not None:
            work.wait()
        assert torch.equal(view, expected) and torch.equal(base.imag, -expected)
        assert torch.equal(base.real, torch.arange(3.0) + rank)
    base, view = negative()
    dist.all_reduce(view, dist.ReduceOp.MAX)
    assert torch.equal(view, -(torch.arange(3.0) * 10 + 1))

    base = torch.complex(torch.arange(3.0) + rank, torch.arange(3.0) + 10 * rank)
    view = base.conj()
    world = dist.group.WORLD
    options = dist.BroadcastOptions()
    options.rootRank = 0
    world.broadcast([view], options).wait()
    assert view.is_conj()
    assert torch.equal(view, torch.complex(torch.arange(3.0), -torch.arange(3.0)))
    assert torch.equal(base, torch.complex(torch.arange(3.0), torch.arange(3.0)))
    # torch.distributed views complex tensors as real ones, which a conjugate view does not allow.
    with pytest.raises(RuntimeError, match="view_as_real"):
        dist.all_reduce(view)

    outputs = [torch.zeros(3, dtype=torch.complex64).conj() for _ in range(size)]
    world.allgather([outputs], [torch.full((3,), complex(rank, 1)).conj()]).wait()
    assert [output[0].item() for output in outputs] == [complex(k, -1) for k in range(size)]

    received = torch.zeros(3, dtype=torch.complex64).conj()
    sender = world.send([torch.full((3,), complex(rank, 2)).conj()], (rank + 1) % size, 0)
    world.recv([received], (rank - 1) % size, 0).wait()
    sender.wait()
    assert received[0].item() == complex((rank - 1) % size, -2)
