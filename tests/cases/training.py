"""torch's functional collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist


def functional_case() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    tensor = torch.full((4, 2), float(rank))
    assert (
        functional.all_reduce(tensor, "sum", group).tolist() == [[float(sum(range(size)))] * 2] * 4
    )
    gathered = functional.all_gather_tensor(tensor, 0, group)
    assert gathered.shape == (4 * size, 2) and gathered[-1, 0].item() == size - 1
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * size, 3), "sum", 0, group)
    assert scattered.tolist() == [[float(size)] * 3] * 2
    assert functional.broadcast(tensor, size - 1, group)[0, 0].item() == size - 1
    exchanged = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    assert exchanged.tolist() == [float(k) for k in range(size)]
    several = functional.all_reduce_coalesced([tensor, torch.ones(3)], "max", group)
    assert several[0][0, 0].item() == size - 1 and several[1].tolist() == [1.0] * 3
    lists = functional.all_gather_into_tensor_coalesced([tensor, torch.ones(3)], group)
    assert lists[0].shape == (4 * size, 2) and lists[1].shape == (3 * size,)
    # Works that were waited for must have left the registry, or torch warns of them at exit.
    registry_size = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    for result in (gathered, scattered, exchanged, *several, *lists):
        result.clone()
    if registry_size is not None:
        assert registry_size() == 0
