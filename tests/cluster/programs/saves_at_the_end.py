"""Rank 0 has more work at its end than the others: saves_at_the_end.py."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from world import World

# Longer than a rank stays after it has given up on the others.
SAVING_S = 9.0


def main() -> None:
    world = World()
    world.init()
    dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()
    if world.rank == 0:
        time.sleep(SAVING_S)
    world.say("done")


if __name__ == "__main__":
    main()
