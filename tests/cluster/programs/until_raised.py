"""Works until something raises, then ends: until_raised.py WORKLOAD TIMEOUT_S [new_group]."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from world import BACKEND, World

from tests.cases.workloads import WORKLOADS


def main() -> None:
    name, timeout_s, *then = sys.argv[1:]
    step = {workload.__name__: workload for workload in WORKLOADS}[name]
    world = World()
    # The bring-up may take longer than the timeout of the calls.
    world.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    set_timeout = backend._set_default_timeout if BACKEND == "gloo" else backend.set_timeout
    set_timeout(timedelta(seconds=float(timeout_s)))
    dist.barrier()
    world.say("working")
    world.until_raised(lambda number: step(world, number))
    if BACKEND != "gloo":  # gloo's group does not end, so the call would wait for the timeout again
        try:
            dist.all_reduce(torch.ones(9))
        except RuntimeError as error:
            world.say("raised again", text=str(error))
    if then == ["new_group"]:
        try:
            dist.new_group(timeout=timedelta(minutes=30))
        except RuntimeError as error:
            world.say("no group", text=str(error))
    dist.destroy_process_group()
    world.say("destroyed")


if __name__ == "__main__":
    main()
