"""Groups: subgroups, orders, threads, splits, device meshes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import TORCH_2


def total(group: Any = None, value: float | None = None) -> float:
    tensor = torch.full((3,), float(dist.get_rank()) if value is None else value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def subgroups_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {
        ranks: dist.new_group(list(ranks))
        for ranks in [(0, 1), (1, 3), (2,), (0, 2, 3), (0, 1, 2, 3)]
    }
    for members, group in groups.items():
        if rank in members:
            assert total(group) == sum(members)
            # Roots are given by global rank.
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, members[-1], group=group)
            assert tensor.item() == members[-1]
            assert dist.get_group_rank(group, rank) == members.index(rank) if TORCH_2 else True
    assert total() == sum(range(size))
    for members, group in groups.items():
        if rank in members:
            dist.destroy_process_group(group)
            if TORCH_2:  # torch 1.13 only forgets a group, which lives on while it is referenced
                with pytest.raises((ValueError, RuntimeError)):
                    total(group)
    assert total() == sum(range(size))


def orders_case() -> None:
    """Asynchronous calls in two groups, queued in opposite orders on two ranks, both finish."""
    rank = dist.get_rank()
    groups = [dist.new_group(), dist.new_group()]
    for _ in range(20):
        tensors = [torch.full((2000,), float(rank)) for _ in groups]
        works = {}
        for i in (0, 1) if rank == 0 else (1, 0):
            works[i] = dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        for i in (1, 0) if rank == 0 else (0, 1):
            works[i].wait()
        assert [tensor[0].item() for tensor in tensors] == [1.0, 1.0]
    # Polled instead of waited for: a worker of each group completes the calls.
    tensors = [torch.full((10,), float(rank)) for _ in groups]
    order = (0, 1) if rank == 0 else (1, 0)
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
    deadline = time.monotonic() + 20
    while not all(work.is_completed() for work in works.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [tensor[0].item() for tensor in tensors] == [1.0, 1.0]
    for group in groups:
        dist.destroy_process_group(group)


def threads_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(60):
                tensor = torch.full((i * 7 + 1,), float(rank + number))
                dist.all_reduce(tensor, group=groups[number])
                assert tensor[0].item() == sum(k + number for k in range(size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for group in groups:
        dist.destroy_process_group(group)


def split_case() -> None:
    rank = dist.get_rank()
    world = dist.group.WORLD
    half = [0, 2] if rank % 2 == 0 else [1, 3]
    group = world.split_group(half, timedelta(seconds=20), group_name=f"half{rank % 2}")
    assert group.rank() == half.index(rank) and group.size() == 2
    tensor = torch.full((3,), float(rank))
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [float(sum(half))] * 3
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options.global_ranks_in_group == half
    assert world.split_group([0], timedelta(seconds=20), group_name="alone") is None or rank == 0
    group.shutdown()
    merge = getattr(world, "merge_remote_group", None)
    if merge is None:
        return
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    merged = merge(store, 4, timedelta(seconds=20), "merged")
    tensor = torch.ones(1)
    merged.allreduce([tensor]).wait()
    assert tensor.item() == 4.0 and merged.size() == 4
    merged.shutdown()


def mesh_case() -> None:
    rank = dist.get_rank()
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("rows", "columns")
    )
    row, column = mesh.get_group("rows"), mesh.get_group("columns")
    assert total(column) == sum([0, 1] if rank < 2 else [2, 3])
    assert total(row) == sum([0, 2] if rank % 2 == 0 else [1, 3])
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        whole.t().contiguous(), mesh, [Replicate(), Shard(1)]
    )
    assert torch.equal(product.full_tensor(), whole @ whole.t())
