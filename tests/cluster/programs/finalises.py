"""Calls MPI_Finalize itself at the end, as a program that also uses MPI directly may do."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
from world import World


def main() -> None:
    world = World()
    world.init()
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    # The MPI library is loaded globally, so its functions can be found.
    world.say("done", code=ctypes.CDLL(None).MPI_Finalize())


if __name__ == "__main__":
    main()
