"""Works until something raises, then fails; after a restart, completes a job."""

from __future__ import annotations

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    world = World()
    world.init()
    dist.barrier()
    world.say("working")
    if world.attempt == 0:
        world.until_raised(lambda number: dist.all_reduce(torch.ones(3000)))
        raise SystemExit(1)
    for count in (3, 4000, 500_000):
        for number in range(20):
            tensor = torch.full((count,), float(world.rank + number))
            dist.all_reduce(tensor)
            expected = float(sum(rank + number for rank in range(world.size)))
            assert bool((tensor == expected).all()), (count, number, tensor)
    dist.destroy_process_group()
    world.say("done")


if __name__ == "__main__":
    main()
