"""Each rank makes a call, and then waits outside of any library until all others have made it:
waits_elsewhere.py BYTES...

MPI moves nothing meanwhile: data that a call still has to send when it returns would not arrive.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from world import GROUP_TIMEOUT_S, World

CALLS = {
    "all_reduce": lambda tensor, world: dist.all_reduce(tensor),
    "broadcast": lambda tensor, world: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor, world: dist.all_gather(
        [torch.empty_like(tensor) for _ in range(world.size)], tensor
    ),
    "all_to_all": lambda tensor, world: dist.all_to_all_single(torch.empty_like(tensor), tensor),
}


def main() -> None:
    world = World()
    world.init()
    folder = Path(os.environ["TEST_CLUSTER_FOLDER"])
    for size in sys.argv[1:]:
        for name, call in CALLS.items():
            tensor = torch.ones(int(size), dtype=torch.int8)
            dist.barrier()
            call(tensor, world)
            (folder / f"{name}-{size}-{world.rank}").touch()
            deadline = time.monotonic() + GROUP_TIMEOUT_S / 2
            while not all((folder / f"{name}-{size}-{k}").exists() for k in range(world.size)):
                assert time.monotonic() < deadline, f"{name} of {size} bytes: the others are in it"
                time.sleep(0.01)
    dist.destroy_process_group()
    world.say("done")


if __name__ == "__main__":
    main()
