"""The last rank ends while the others wait: departs.py raises|forgets|execs all_reduce|recv|exit.

exit: they wait in an all_reduce, rank 1 at the end of its process.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    ending, waits_in = sys.argv[1:]
    world = World()
    world.init()
    dist.all_reduce(torch.ones(100_000))
    if world.rank == world.size - 1:
        if ending == "execs":
            time.sleep(0.3)
            world.say("leaving")
            os.execv("/bin/sleep", ["sleep", "60"])
        if ending == "raises":
            raise ValueError("of the test")
        return
    if waits_in == "exit" and world.rank == 1:
        dist.all_reduce(torch.ones(4), async_op=True)
        return
    try:
        if waits_in == "recv":
            dist.recv(torch.ones(4), world.size - 1)
        else:
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        world.say("told", text=str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
