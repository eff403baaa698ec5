"""A rank's side of a job: its placement, its process group, and its events for the test."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND = os.environ["TEST_CLUSTER_BACKEND"]
# A rank left alone by a failed one raises before the job's limit.
GROUP_TIMEOUT_S = 30.0


# The variables with which launchers number ranks, and the init_method for each.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "env://"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpi://"),
    ("SLURM_PROCID", "SLURM_NTASKS", "mpi://"),
)


class World:
    def __init__(self) -> None:
        rank, size, self._init_method = next(kind for kind in _LAUNCHERS if kind[0] in os.environ)
        self.rank, self.size = int(os.environ[rank]), int(os.environ[size])
        self.placement: list[int] = json.loads(os.environ["TEST_CLUSTER_PLACEMENT"])
        self._events = Path(os.environ["TEST_CLUSTER_FOLDER"], f"events-{self.rank}")
        # TORCHELASTIC_RESTART_COUNT may differ between hosts.
        before = self._events.read_text() if self._events.exists() else ""
        self.attempt = before.count('"started"')
        # Otherwise the test would prove nothing about hosts.
        host = f"host-{'abcdefgh'[self.placement[self.rank]]}"
        assert socket.gethostname() == host, (socket.gethostname(), host)
        torch.set_num_threads(1)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        self.say("started", pid=os.getpid(), restarts_of_host=restarts)

    def init(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(BACKEND, init_method=self._init_method, timeout=timeout)
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.size)

    def ranks_of_host(self, number: int) -> list[int]:
        return [rank for rank, host in enumerate(self.placement) if host == number]

    def say(self, name: str, at_s: float | None = None, **facts: Any) -> None:
        at_s = time.monotonic() if at_s is None else at_s
        event = {"name": name, "at_s": at_s, "attempt": self.attempt, "facts": facts}
        with self._events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def until_raised(self, step: Callable[[int], Any]) -> None:
        """Calls step(0), step(1), ... until one raises the error of a fault; reports it with the
        time."""
        number = 0
        while True:
            try:
                step(number)
            except RuntimeError as error:
                at_s = time.monotonic()
                is_fault = isinstance(error, dist.DistBackendError)
                self.say("raised", at_s, text=str(error), is_fault=is_fault, step=number)
                return
            number += 1
