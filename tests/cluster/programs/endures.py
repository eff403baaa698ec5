"""Works, rests, and works again, with new connections and groups: endures.py S.

S is the timeout in seconds of the groups that work. Making the first group may take longer.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from world import World


def work(world: World, seconds: float, group: dist.ProcessGroup) -> None:
    end_s = time.monotonic() + seconds
    ends = torch.zeros(1)
    while ends.item() == 0:
        ends.fill_(float(time.monotonic() > end_s))
        dist.broadcast(ends, 0, group=group)
        for count in (1, 300_000):
            total = torch.full((count,), 1.0)
            dist.all_reduce(total, group=group)
            assert total.eq(world.size).all()


def main() -> None:
    world = World()
    world.init()
    timeout = timedelta(seconds=float(sys.argv[1]))
    group = dist.new_group(timeout=timeout)
    work(world, 1.5, group)
    world.say("working")
    time.sleep(1.0)
    # Messages between all pairs: connections that MPI has not made so far.
    for distance in range(1, world.size):
        number = torch.zeros(1)
        after = (world.rank + distance) % world.size
        sent = dist.isend(torch.full((1,), float(world.rank)), after, group=group)
        dist.recv(number, (world.rank - distance) % world.size, group=group)
        sent.wait()
        assert number.item() == (world.rank - distance) % world.size
    group = dist.new_group(timeout=timeout)
    total = torch.full((1000,), 1.0)
    dist.all_reduce(total, group=group)
    assert total.eq(world.size).all()
    work(world, 1.5, group)
    world.say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
