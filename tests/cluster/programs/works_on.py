"""Works until the test says "go", then in a new group: works_on.py."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    world = World()
    world.init()
    go = Path(os.environ["TEST_CLUSTER_FOLDER"], "go")
    goes = torch.zeros(1)
    dist.barrier()
    world.say("working")
    while goes.item() == 0:
        goes.fill_(float(go.exists()))
        dist.broadcast(goes, 0)
        total = torch.full((300_000,), 1.0)
        dist.all_reduce(total)
        assert total.eq(world.size).all()
    group = dist.new_group()
    for count in (1, 100_000, 5_000_000):
        total = torch.full((count,), 1.0)
        dist.all_reduce(total, group=group)
        assert total.eq(world.size).all()
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    number = torch.zeros(1)
    sent = dist.isend(torch.full((1,), float(world.rank)), after)
    dist.recv(number, before)
    sent.wait()
    assert number.item() == before
    world.say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
