"""Some ranks end as soon as a group is made; the others work on: leaves_at_once.py RANK..."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    leavers = [int(rank) for rank in sys.argv[1:]]
    world = World()
    world.init()
    stay = dist.new_group([rank for rank in range(world.size) if rank not in leavers])
    for _ in range(20):
        group = dist.new_group()
    if world.rank not in leavers:
        total = torch.ones(1000)
        dist.all_reduce(total, group=stay)
        assert total.eq(world.size - len(leavers)).all()
        # Not a call: the group's calls need the ranks that left.
        assert dist.get_world_size(group) == world.size
    world.say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
