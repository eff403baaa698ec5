"""Small programs, each run by the ranks of a job: processes of their own, which find torch imported
and are otherwise as launchers start them.

The same text is run over deepspeed.comm (with gloo) and over deepspeed_comm (with dscomm): the line
that imports `dist` is all that differs. What the ranks say, and how each of them ends, comes back;
a rank that has not ended is killed, and has None for an exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import random
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.cases.forked_ranks import ForkedRank, RankStarter

# Well above what a loaded machine needs to run one of these programs to its end.
LIMIT_S = 90.0
# A rank that said that it is ready and has done nothing for so long hangs.
HANG_S = 6.0
_POLL_S = 0.02
_SAID = "-> "

_PRELUDE = """
import atexit, json, os, signal, sys, time
from datetime import timedelta
import torch
{import_line}
BACKEND = "{backend}"
signal.alarm({limit})  # should nobody be left who would kill it

def say(*values):
    # One write: a line is never half there.
    os.write(1, ("\\n-> " + json.dumps(values) + "\\n").encode())

"""
_INIT = """
dist.init_distributed(BACKEND, timeout=timedelta(seconds=60), verbose=False)
rank, size = dist.get_rank(), dist.get_world_size()
# Threads of a gloo group that is still there may abort a process at its end.
atexit.register(dist.destroy_process_group)
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """What a program imports, and the backend that it uses."""

    import_line: str
    backend: str


THEIRS = Package("from deepspeed import comm as dist", "gloo")
OURS = Package("import deepspeed_comm as dist", "dscomm")


@dataclasses.dataclass
class Outcome:
    """Of a program, by rank."""

    exit_codes: list[int | None]  # -11 for a segmentation fault, None where it had to be killed
    said: list[list[list[Any]]]  # the values of each say()
    output: list[str]
    port: int  # MASTER_PORT

    def last(self, rank: int = 0) -> list[Any]:
        """The values of the rank's last say()."""
        assert self.said[rank], self
        return self.said[rank][-1]

    def __str__(self) -> str:
        texts = (
            f"--- rank {rank}, exit code {code}\n{output[-3000:]}"
            for rank, (code, output) in enumerate(zip(self.exit_codes, self.output, strict=True))
        )
        return "\n".join(texts)

    def must_be_well(self) -> Outcome:
        assert set(self.exit_codes) == {0}, str(self)
        return self


@functools.cache
def _rank_starter() -> RankStarter:
    starter = RankStarter(dict(os.environ, OMP_NUM_THREADS="1"))
    atexit.register(starter.close)
    return starter


class Job:
    """A program that runs. Use as a context manager: at its end no rank is left."""

    def __init__(
        self,
        package: Package,
        program: str,
        folder: Path,
        ranks: int = 2,
        init: bool = True,
        port: int | None = None,
        variables: dict[str, str] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder / package.backend
        self.folder.mkdir(exist_ok=True)
        self.port = free_port() if port is None else port
        self._began_s = time.monotonic()
        text = _PRELUDE.format(
            import_line=package.import_line, backend=package.backend, limit=int(LIMIT_S) + 10
        )
        text += (_INIT if init else "") + textwrap.dedent(program)
        (self.folder / "program.py").write_text(text)
        self._ranks: list[ForkedRank] = []
        for rank in range(ranks):
            # What torchrun sets.
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            environment = dict(os.environ, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", **place)
            # Its ninja, with which DeepSpeed builds.
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
            environment.pop("LOCAL_SIZE", None)
            environment |= variables or {}
            for name in without:
                environment.pop(name, None)
            output, folder = self.folder / f"output{rank}", str(self.folder)
            starter = _rank_starter()
            self._ranks.append(starter.fork(["program.py"], environment, output, folder))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _said(self, rank: int) -> list[list[Any]]:
        lines = self._ranks[rank].output().splitlines()
        return [json.loads(line[len(_SAID) :]) for line in lines if line.startswith(_SAID)]

    def outcome(self, may_hang: bool = False) -> Outcome:
        """Waits until all have ended. With may_hang, for HANG_S once every rank has said "ready"
        or has ended."""
        deadline = self._began_s + LIMIT_S
        waits_for_ready = may_hang
        while any(rank.exit_code() is None for rank in self._ranks):
            if waits_for_ready and all(
                process.exit_code() is not None or ["ready"] in self._said(rank)
                for rank, process in enumerate(self._ranks)
            ):
                waits_for_ready = False
                deadline = min(deadline, time.monotonic() + HANG_S)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        codes = [rank.exit_code() for rank in self._ranks]
        self._kill()
        texts = [rank.output() for rank in self._ranks]
        said = [self._said(rank) for rank in range(len(self._ranks))]
        return Outcome(codes, said, texts, self.port)


def run_both(
    program: str, folder: Path, they_may_hang: bool = False, **options: Any
) -> tuple[Outcome, Outcome]:
    """(deepspeed.comm's, deepspeed_comm's), which run at the same time."""
    with (
        Job(THEIRS, program, folder, **options) as theirs,
        Job(OURS, program, folder, **options) as ours,
    ):
        # Ours first: it gets all of its limit.
        outcome = ours.outcome()
        return theirs.outcome(they_may_hang), outcome


def free_port() -> int:
    """Below those that the kernel gives to connections, which could take it before it is used."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):  # it is in use
            listener.bind(("127.0.0.1", port))
            return port
