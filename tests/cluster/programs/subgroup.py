"""The members of a group work until something raises; the others sleep: subgroup.py MEMBER..."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    members = [int(rank) for rank in sys.argv[1:]]
    world = World()
    world.init()
    group = dist.new_group(members)
    dist.barrier()
    world.say("working")
    if world.rank not in members:
        time.sleep(60)
    world.until_raised(lambda number: dist.all_reduce(torch.full((100,), number), group=group))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
