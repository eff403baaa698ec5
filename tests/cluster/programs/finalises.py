"""Calls MPI_Finalize by itself in the end, as a program may that uses MPI beside dscomm."""

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
    # The library that carries dscomm is loaded for all.
    world.say("done", code=ctypes.CDLL(None).MPI_Finalize())


if __name__ == "__main__":
    main()
