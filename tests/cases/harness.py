"""Ranks for tests: real processes, forked from a parent that has imported torch.

Importing torch takes longer than most cases here, so ranks are forked and reused. `Ranks` is a set
of processes with one process group; it runs module-level functions in every rank and returns their
results, or raises one error with the traceback of every rank that raised. A set whose case failed
is killed, and forked anew for the next case. `run_fresh` is for cases that make their own process
group, or none.

The parent never makes a process group and computes on one thread, since the threads of an OpenMP
pool do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_comm  # noqa: F401 - torch 1.13 learns of the backend by this import.

TORCH_2 = int(torch.__version__.split(".")[0]) >= 2
# Well above what a loaded machine needs; a case that takes this long hangs.
HARD_LIMIT_S = 90.0
# How long the other ranks may continue once one has failed.
_GRACE_AFTER_FAILURE_S = 5.0
# Timeout of the process group: a rank left alone by a failed one raises before HARD_LIMIT_S.
GROUP_TIMEOUT = timedelta(seconds=30)

_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


class RankFailure(AssertionError):
    """The errors of a case, by rank."""


@dataclasses.dataclass
class World:
    """The parameters from which a function run by run_fresh makes its process group."""

    rank: int
    size: int
    folder: str

    def init(
        self,
        backend: str = "dscomm",
        name: str = "world",
        timeout: timedelta = GROUP_TIMEOUT,
        **options: Any,
    ) -> None:
        store = dist.FileStore(os.path.join(self.folder, name), self.size)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, **options
        )


def _serve(world: World, connection: Connection, with_group: bool) -> None:
    """Runs a rank: gets cases from the connection and answers them until None arrives."""
    # If the parent is killed, so is this rank.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)
    try:
        if with_group:
            world.init()
    except BaseException:
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, None))
    while True:
        case = connection.recv()
        if case is None:
            break
        function, arguments = case
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    if with_group:
        dist.destroy_process_group()


def _child(
    world: World, connections: list[tuple[Connection, Connection]], with_group: bool
) -> None:
    # Inherited copies of the parent's ends would keep the ranks from noticing the parent's death.
    for rank, (parent_end, child_end) in enumerate(connections):
        parent_end.close()
        if rank != world.rank:
            child_end.close()
    _serve(world, connections[world.rank][1], with_group)
    sys.stdout.flush()
    sys.stderr.flush()


class Ranks:
    """`size` processes that run cases together."""

    def __init__(self, size: int, with_group: bool = True) -> None:
        self.size = size
        self.with_group = with_group
        self._folder = tempfile.TemporaryDirectory(prefix="dscomm-test-")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float = HARD_LIMIT_S
    ) -> list[Any]:
        """Runs function(*arguments) in every rank; returns the ranks' results, by rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send((function, arguments))
        return self._collect(limit_s, function.__name__)

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        """Lets the ranks end by themselves, then kills the rest."""
        for connection in self._connections:
            # An explicit message: ranks forked later hold copies of this end, which keep it open.
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        deadline = time.monotonic() + 20
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        self._kill()
        if any(code != 0 for code in codes):
            raise RankFailure(f"exit codes of the ranks (None: it had to be killed): {codes}")

    def _start(self) -> None:
        folder = tempfile.mkdtemp(dir=self._folder.name)
        pipes = [_fork.Pipe() for _ in range(self.size)]
        for rank in range(self.size):
            world = World(rank, self.size, folder)
            process = _fork.Process(
                target=_child, args=(world, pipes, self.with_group), daemon=True
            )
            process.start()
            self._processes.append(process)
        for parent_end, child_end in pipes:
            child_end.close()
            self._connections.append(parent_end)
        self._collect(HARD_LIMIT_S, "init_process_group")

    def _collect(self, limit_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting:
                    failures[rank] = "not finished " + (
                        "when another rank had failed" if failures else f"after {limit_s:.0f} s"
                    )
                break
            for rank, connection in list(waiting.items()):
                if connection not in ready:
                    continue
                del waiting[rank]
                try:
                    ok, value = connection.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    ok, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
        if failures:
            self._kill()
            text = "\n".join(f"--- rank {rank}:\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailure(f"{what} failed on {len(failures)} of {self.size} ranks\n{text}")
        return [results[rank] for rank in range(self.size)]

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _call_with_world(function: Callable[..., Any], world: World, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(world, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _fresh_case(
    function: Callable[..., Any], size: int, folder: str, pids: Any, arguments: tuple[Any, ...]
) -> Any:
    world = World(pids.index(os.getpid()), size, folder)
    return _call_with_world(function, world, arguments)


def run_fresh(
    size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = HARD_LIMIT_S
) -> list[Any]:
    """Runs function(world, *arguments) in `size` new processes without a process group."""
    ranks = Ranks(size, with_group=False)
    try:
        ranks._start()
        with tempfile.TemporaryDirectory(prefix="dscomm-test-") as folder:
            return ranks.run(
                _fresh_case, function, size, folder, ranks.pids(), arguments, limit_s=limit_s
            )
    finally:
        ranks.close()


class RankSets:
    """The reused sets, by size."""

    def __init__(self) -> None:
        self._sets: dict[int, Ranks] = {}

    def __call__(self, size: int) -> Ranks:
        if size not in self._sets:
            self._sets[size] = Ranks(size)
        return self._sets[size]

    def close(self) -> None:
        for ranks in self._sets.values():
            ranks.close()


@contextlib.contextmanager
def rank_sets() -> Iterator[RankSets]:
    sets = RankSets()
    try:
        yield sets
    finally:
        sets.close()
