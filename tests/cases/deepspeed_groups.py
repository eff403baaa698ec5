"""Process groups of deepspeed.comm's API, over dscomm and over gloo."""

from __future__ import annotations

import os

import deepspeed_comm as dist
from tests.cases.harness import World

BACKENDS = ["dscomm", "gloo"]


def init(world: World, backend: str = "dscomm", name: str = "meet") -> None:
    dist.init_distributed(
        backend,
        auto_mpi_discovery=False,
        init_method=f"file://{os.path.join(world.folder, name)}",
        rank=world.rank,
        world_size=world.size,
        verbose=False,
    )
