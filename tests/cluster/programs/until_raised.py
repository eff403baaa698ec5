"""Works until something raises, and ends in peace: until_raised.py WORKLOAD TIMEOUT_S."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from workloads import WORKLOADS
from world import BACKEND, World


def main() -> None:
    name, timeout_s = sys.argv[1:]
    step = {workload.__name__: workload for workload in WORKLOADS}[name]
    world = World()
    world.init(timeout_s=float(timeout_s))
    dist.barrier()
    world.say("working")
    world.until_raised(lambda number: step(world, number))
    if BACKEND != "gloo":  # where the group is not over, and the call waits for the timeout again
        try:
            dist.all_reduce(torch.ones(9))
        except RuntimeError as error:
            world.say("raised again", text=str(error))
    dist.destroy_process_group()
    world.say("destroyed")


if __name__ == "__main__":
    main()
