"""A rank receives from any source while another one dies: any_source.py RECEIVER SENDER."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    receiver, sender = map(int, sys.argv[1:])
    world = World()
    world.init()
    go = Path(os.environ["TEST_CLUSTER_FOLDER"], "go")
    dist.all_reduce(torch.ones(10))
    number = torch.zeros(1)
    if world.rank == receiver:
        dist.recv(number, sender)
        world.say("working")
        try:
            source = dist.recv(number)
            dist.send(number + 1, sender)
            world.say("received", source=source, number=number.item())
        except RuntimeError as error:
            world.say("raised", text=str(error))
    elif world.rank == sender:
        dist.send(number, receiver)
        world.say("working")
        while not go.exists():
            time.sleep(0.01)
        try:
            dist.send(number + 7, receiver)
            dist.recv(number, receiver)
            world.say("received", number=number.item())
        except RuntimeError as error:
            world.say("raised", text=str(error))
    else:
        world.say("working")
        time.sleep(60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
