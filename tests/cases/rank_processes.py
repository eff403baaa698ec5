"""Ranks that may die: real processes, forked from one that has imported torch, and a watcher.

A `Job` forks `size` ranks. Each runs one function and reports events with the time of
CLOCK_MONOTONIC, which all processes of a host share: so the time from a kill (the killer's clock)
to an error (the survivor's) can be measured. At the end of a job all of its processes are killed. A
job that exceeds its limit fails and reports each rank's last event.
"""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_comm  # noqa: F401 - torch 1.13 learns of the backend by this import.

TORCH_2 = int(torch.__version__.split(".")[0]) >= 2
# The error that a fault raises; torch 1.13 has no special one.
FAULT: type[BaseException] = getattr(dist, "DistBackendError", RuntimeError)
HOST = socket.gethostname()
# Every rank of a group must get the error within this time of a fault.
SOON_S = 1.0
# Longer than any case takes on a loaded machine; a job that takes this long hangs.
HARD_LIMIT_S = 60.0
# Timeout of process groups. Well above SOON_S, so that an error within SOON_S is no timeout.
GROUP_TIMEOUT_S = 30.0

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Event:
    name: str
    at_s: float  # CLOCK_MONOTONIC
    facts: dict[str, Any]


class World:
    """A rank's side: its number, its process group, and its reports."""

    def __init__(self, rank: int, size: int, folder: str, connection: Connection) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self._connection = connection

    def init(
        self,
        name: str = "world",
        timeout_s: float = GROUP_TIMEOUT_S,
        backend: str = "dscomm",
        store: dist.Store | None = None,
    ) -> None:
        if store is None:
            store = dist.FileStore(os.path.join(self.folder, name), self.size)
        else:
            store = dist.PrefixStore(name, store)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )

    def compose(self) -> None:
        """Call it before init(): declares a machine of two NUMA nodes with one core each, and binds
        even and odd ranks to different nodes, so that groups get a HierarchicalTeam of domains [0,
        2] and [1, 3]."""
        os.environ["DSCOMM_TOPOLOGY"] = "numa:2 core:1 pu:1"
        os.sched_setaffinity(0, {self.rank % 2})

    def tcp_store(self, keeper: int = 0) -> dist.Store:
        """A store kept by one rank. It opens no more descriptors once it exists."""
        where = Path(self.folder, "port")
        if self.rank == keeper:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            where.with_suffix(".new").write_text(str(store.port))
            where.with_suffix(".new").rename(where)
            return store
        while not where.exists():
            time.sleep(0.005)
        port = int(where.read_text())
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def say(self, name: str, **facts: Any) -> None:
        self._connection.send(Event(name, time.monotonic(), facts))

    def hear(self) -> Any:
        """Waits for a message from Job.tell(). Ends at the latest at the job's limit."""
        return self._connection.recv()

    def say_raised(self, error: BaseException, at_s: float | None = None) -> None:
        at_s = time.monotonic() if at_s is None else at_s
        facts = {"kind": type(error).__name__, "text": str(error)}
        facts["is_fault"] = isinstance(error, FAULT)
        self._connection.send(Event("raised", at_s, facts))

    def until_raised(self, step: Callable[[int], Any]) -> None:
        """Calls step(0), step(1), ... until one raises the error of a fault; reports it with the
        time."""
        number = 0
        while True:
            try:
                step(number)
            except RuntimeError as error:
                self.say_raised(error, time.monotonic())
                return
            number += 1


def _serve(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # the session identifies processes that this rank starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        world.say("returned", value=function(world, *arguments))
        return 0
    except BaseException as error:
        world.say_raised(error)
        traceback.print_exc()
        return 1


class JobFailure(AssertionError):
    """A job failed: the events and output of every rank."""


class Job:
    """Context manager: `size` ranks that run function(world, *arguments)."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float = HARD_LIMIT_S,
        exit_normally: bool = False,
    ) -> None:
        self.size = size
        self._deadline = time.monotonic() + limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="dscomm-test-")
        self.folder = self._folder.name
        self.pids: list[int] = []
        self.exit_codes: dict[int, int] = {}  # as from waitstatus_to_exitcode: -9 for SIGKILL
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self._connections: list[Connection | None] = []
        for rank in range(size):
            self._fork(rank, function, arguments, exit_normally)

    def _fork(
        self, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], normally: bool
    ) -> None:
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                # Copies of other ranks' ends would keep them from noticing the parent's death.
                for other in [ours, *self._connections]:
                    if other is not None:
                        other.close()
                output = os.open(self._output_path(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                code = _serve(World(rank, self.size, self.folder, theirs), function, arguments)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        theirs.close()
        self.pids.append(pid)
        self._connections.append(ours)

    def _output_path(self, rank: int) -> str:
        return os.path.join(self.folder, f"output{rank}")

    def output(self, rank: int) -> str:
        path = Path(self._output_path(rank))
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills and reaps all remaining processes, including grandchildren."""
        for rank, pid in enumerate(self.pids):
            for victim in {pid, *processes_of_session(pid)}:
                if rank not in self.exit_codes or victim != pid:
                    _send_signal(victim, signal.SIGKILL)
        for rank in range(self.size):
            self._reap(rank, 5.0)
        for connection in self._connections:
            if connection is not None:
                connection.close()
        self._connections = [None] * self.size
        self._folder.cleanup()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal; returns the time just before it."""
        at_s = time.monotonic()
        os.kill(self.pids[rank], number)
        return at_s

    def tell(self, value: Any, ranks: Iterable[int] | None = None) -> None:
        for rank in range(self.size) if ranks is None else ranks:
            connection = self._connections[rank]
            assert connection is not None, f"rank {rank} has gone\n{self.report()}"
            connection.send(value)

    def first(self, rank: int, name: str) -> Event | None:
        return next((event for event in self.events[rank] if event.name == name), None)

    def wait_for(
        self, name: str, ranks: Iterable[int] | None = None, limit_s: float | None = None
    ) -> list[Event]:
        """Every rank's first event of this name; fails if a rank ends before, or at the limit."""
        ranks = list(range(self.size) if ranks is None else ranks)
        deadline = self._deadline
        if limit_s is not None:
            deadline = min(deadline, time.monotonic() + limit_s)
        while True:
            missing = [rank for rank in ranks if self.first(rank, name) is None]
            if not missing:
                return [event for rank in ranks if (event := self.first(rank, name))]
            gone = [rank for rank in missing if self._connections[rank] is None]
            if gone:
                raise JobFailure(f"rank {gone[0]} ended before '{name}'\n{self.report()}")
            if not self._listen(deadline):
                raise JobFailure(f"rank {missing[0]} did not say '{name}'\n{self.report()}")

    def finish(self, ranks: Iterable[int] | None = None, limit_s: float | None = None) -> None:
        """Waits until these ranks have ended."""
        ranks = list(range(self.size) if ranks is None else ranks)
        deadline = self._deadline
        if limit_s is not None:
            deadline = min(deadline, time.monotonic() + limit_s)
        while any(self._connections[rank] is not None for rank in ranks):
            if not self._listen(deadline, ranks):
                raise JobFailure(f"a rank does not end\n{self.report()}")
        for rank in ranks:
            if not self._reap(rank, max(0.1, deadline - time.monotonic())):
                raise JobFailure(f"rank {rank} does not end\n{self.report()}")

    def results(self) -> list[Any]:
        """Finishes the job; returns the ranks' results. Every rank must have returned."""
        self.finish()
        returned = [self.first(rank, "returned") for rank in range(self.size)]
        if None in returned or any(self.exit_codes.values()):
            raise JobFailure(f"not every rank returned\n{self.report()}")
        return [event.facts["value"] for event in returned if event is not None]

    def report(self) -> str:
        lines = []
        for rank in range(self.size):
            state = self.exit_codes.get(rank, process_state(self.pids[rank]))
            lines.append(f"--- rank {rank}, pid {self.pids[rank]}, exit code or state: {state}")
            lines += [f"{event.at_s:.3f} {event.name} {event.facts}" for event in self.events[rank]]
            if output := self.output(rank).strip():
                lines.append(output[-3000:])
        return "\n".join(lines)

    def _listen(self, deadline: float, ranks: Iterable[int] | None = None) -> bool:
        """Reads the ranks' events; False after the deadline."""
        numbers = range(self.size) if ranks is None else ranks
        open_ones = {c: rank for rank in numbers if (c := self._connections[rank]) is not None}
        ready = wait(list(open_ones), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank = open_ones[connection]  # type: ignore[index]
            try:
                self.events[rank].append(connection.recv())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                connection.close()  # type: ignore[union-attr]
                self._connections[rank] = None
                self._reap(rank, 0.0)
        return bool(ready)

    def _reap(self, rank: int, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while rank not in self.exit_codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid != 0:
                self.exit_codes[rank] = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True


# --- observations from outside


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def process_state(pid: int) -> str:
    """The state letter from /proc, or "gone"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def processes_of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def memory_descriptors(pid: int | str = "self") -> list[str]:
    """A process's descriptors of arenas and pools, as inode numbers (each once)."""
    return _descriptors(pid, r"/memfd:dscomm-(arena|pool)")


def _descriptors(pid: int | str, pattern: str) -> list[str]:
    found = []
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for entry in entries:
        try:
            if re.match(pattern, os.readlink(entry)):
                found.append(str(os.stat(entry).st_ino))
        except OSError:
            continue
    return found


def memory_mappings(pid: int | str = "self") -> list[str]:
    """The inode numbers of the arenas and pools that a process maps (each once)."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split()[4] for line in lines if "/memfd:dscomm-" in line})


def sockets_of(pid: int | str = "self") -> list[str]:
    """The abstract sockets of dscomm that a process holds."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if match := re.match(r"socket:\[(\d+)\]", os.readlink(entry)):
                inodes.add(match.group(1))
        except OSError:
            continue
    names = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("@dscomm-"):
            names.append(fields[7])
    return names


def sockets_of_host() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[-1] for line in lines if "@dscomm-" in line}


class ProcessResources:
    """Resources of live processes, to check later that they are gone."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = list(pids)
        self.sockets = {name for pid in self.pids for name in sockets_of(pid)}
        self.memory = {inode for pid in self.pids for inode in memory_descriptors(pid)}
        self._files = _files_in_memory()

    def left_behind(self, limit_s: float = 5.0) -> str:
        """The resources that remain after `limit_s`; returns empty as soon as none remain."""
        deadline = time.monotonic() + limit_s
        while True:
            left = self._look()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def _look(self) -> str:
        found = [f"process {pid}" for pid in self.pids if process_state(pid) not in ("gone", "Z")]
        for pid in self.pids:
            found += [f"process {other} of {pid}" for other in processes_of_session(pid)]
        found += [f"socket {name}" for name in self.sockets & sockets_of_host()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                held = {*memory_descriptors(entry.name), *memory_mappings(entry.name)}
                found += [f"memory {inode} in {entry.name}" for inode in held & self.memory]
        found += [f"file {path}" for path in _files_in_memory() - self._files]
        return ", ".join(found)


def _files_in_memory() -> set[str]:
    """Files that could be left behind: all in /dev/shm, and dscomm's in /tmp."""
    files = {str(path) for path in Path("/dev/shm").iterdir()}
    for path in Path(tempfile.gettempdir()).glob("*dscomm*"):
        if not path.name.startswith("dscomm-test-"):  # of the tests themselves
            files.add(str(path))
    return files


def names_rank(text: str, rank: int, pid: int) -> bool:
    """Whether a message names this rank with pid and host."""
    return f"rank {rank} (pid {pid} on host {HOST})" in text
