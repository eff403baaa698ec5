"""A bfloat16 sum, whose bits show in which format it travelled: halves.py VALUE_OF_RANK..."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from world import World

world = World()
world.init()
tensor = torch.tensor([float(sys.argv[1 + world.rank])], dtype=torch.bfloat16)
dist.all_reduce(tensor)
team = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
dist.barrier()
dist.destroy_process_group()
world.say("done", sum=tensor.item(), team=team)
