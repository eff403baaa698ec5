"""The trace of a job's calls: when each began and ended on every rank, as Chrome's trace format has
it (chrome://tracing, https://ui.perfetto.dev).

A rank keeps its latest calls in a ring. Times are those of its host's monotonic clock, which all
ranks of a host share. Clocks of different hosts are compared when the file is written: no rank
leaves a barrier before the last one has come, so each barrier bounds the offset between two clocks
from both sides, whatever the network does. The middle of the tightest bounds is taken, and half
their distance is written beside it. What clocks have drifted apart before that is not known.

Times in the file count from the same moment as in the traces of torch.profiler, so that a viewer
shows both on one time axis.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed_comm.comms_log.files import replaced_when_complete
from deepspeed_comm.torch import is_unlisted

# Each takes microseconds to a millisecond; the quickest of them decide.
_CLOCK_BARRIERS = 20
_SHOWN_RUNS = 8
# torch.profiler's times count from the latest multiple of this since 1970, three months: see
# ChromeTraceBaseTime of libkineto (https://github.com/pytorch/kineto).
_BASE_INTERVAL_NS = 7_889_238 * 10**9


class Call(NamedTuple):
    """One call, in ns of the host's monotonic clock."""

    operation: str
    logged_as: str
    began_ns: int
    ended_ns: int
    size_bytes: int
    group: str  # its ranks
    dtype: str = ""  # of its data; none of a barrier


class Ring:
    """The latest `limit` calls; none where that is 0. Not thread-safe."""

    def __init__(self, limit: int = 0) -> None:
        self._calls: collections.deque[Call] = collections.deque(maxlen=limit)
        self._added = 0

    @property
    def limit(self) -> int:
        return self._calls.maxlen or 0

    def add(self, call: Call) -> None:
        self._calls.append(call)
        self._added += 1

    def calls(self) -> list[Call]:
        return list(self._calls)

    def left_out(self) -> int:
        """Calls that later ones have taken the place of."""
        return self._added - len(self._calls)


@dataclasses.dataclass
class Clock:
    """What a rank knows of its clock: which one it is, and when it came to and left barriers."""

    host: str
    came_ns: list[int]
    left_ns: list[int]


@dataclasses.dataclass
class Offset:
    """What is to be added to a rank's clock to have rank 0's, and how far off that may be."""

    ns: int
    error_ns: int


@dataclasses.dataclass
class OwnTrace:
    """What a rank gives to the file."""

    limit: int
    calls: list[Call]
    left_out: int
    clock: Clock
    host_name: str
    pid: int


# --- groups

_WORLD = "world"
_ranks_of_groups: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def group_text(group: Any) -> str:
    """The group as the trace names it: by its ranks, or by its own name if torch has no list of
    them (as of the groups that group.split_group() makes)."""
    if group is None or group is dist.group.WORLD:
        return _WORLD
    known = _ranks_of_groups.get(group)
    if known is None:
        if is_unlisted(group):
            known = f"group {group.group_name}"
        else:
            ranks = [dist.get_global_rank(group, k) for k in range(dist.get_world_size(group))]
            known = f"ranks {ranks_text(ranks)}"
        _ranks_of_groups[group] = known
    return known


def ranks_text(ranks: list[int]) -> str:
    """For people: [0, 1, 2, 5] is "0-2,5"; of a long list its beginning."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_SHOWN_RUNS]]
    more = f",… ({len(ranks)} ranks)" if len(runs) > _SHOWN_RUNS else ""
    return ",".join(shown) + more


# --- clocks


def _which_clock() -> str:
    """Equal where two processes read one clock: in one boot of a kernel and one time namespace."""
    parts = [socket.gethostname()]
    readers: tuple[Callable[[], str], ...] = (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: str(os.stat("/proc/self/ns/time").st_ino),
    )
    for read in readers:
        try:
            parts.append(read())
        except OSError:  # not this kernel: the name of the host has to do
            parts.append("")
    # The same boot under two names, as containers have them, is one clock.
    return "/".join(parts[1:] if parts[1] else parts)


def read_clock() -> Clock:
    """Goes through barriers with all ranks. A collective."""
    came, left = [], []
    for _ in range(_CLOCK_BARRIERS):
        came.append(time.perf_counter_ns())
        dist.barrier()
        left.append(time.perf_counter_ns())
    return Clock(_which_clock(), came, left)


def offsets(clocks: list[Clock]) -> list[Offset]:
    """Of each rank's clock to that of rank 0.

    In every barrier, each rank came before any rank left. So for ranks `a` of rank 0's host and `b`
    of another one: a.came <= b.left + offset, and b.came + offset <= a.left.
    """
    of_host: dict[str, list[Clock]] = {}
    for clock in clocks:
        of_host.setdefault(clock.host, []).append(clock)
    first = of_host[clocks[0].host]
    found: dict[str, Offset] = {}
    for host, ranks in of_host.items():
        if ranks is first:
            found[host] = Offset(0, 0)
            continue
        rounds = range(len(clocks[0].came_ns))
        least = max(
            max(a.came_ns[k] for a in first) - min(b.left_ns[k] for b in ranks) for k in rounds
        )
        most = min(
            min(a.left_ns[k] for a in first) - max(b.came_ns[k] for b in ranks) for k in rounds
        )
        # Clocks that drift within the few ms of the barriers may make these cross.
        found[host] = Offset((least + most) // 2, (abs(most - least) + 1) // 2)
    return [found[clock.host] for clock in clocks]


# --- the file


def own_trace(ring_limit: int, calls: list[Call], left_out: int) -> OwnTrace:
    """This rank's part. A collective."""
    return OwnTrace(ring_limit, calls, left_out, read_clock(), socket.gethostname(), os.getpid())


def since_1970_ns() -> int:
    """What is to be added to this host's monotonic clock to have the time since 1970."""
    return time.time_ns() - time.perf_counter_ns()


def write_trace(
    everyones: list[OwnTrace], path: str | os.PathLike[str], since_1970: int | None = None
) -> None:
    """One file of all ranks' parts. Raises ValueError where no rank has kept calls.

    since_1970: since_1970_ns() of rank 0's host, which is this one unless it is given.
    """
    if not any(own.limit for own in everyones):
        raise ValueError("no rank keeps calls for a trace: configure(trace_events=10000) first")
    clocks = offsets([own.clock for own in everyones])
    pairs = list(zip(everyones, clocks, strict=True))
    began = [call.began_ns + clock.ns for own, clock in pairs for call in own.calls]
    if since_1970 is None:
        since_1970 = since_1970_ns()
    first = min(began, default=0) + since_1970
    base = first // _BASE_INTERVAL_NS * _BASE_INTERVAL_NS
    with replaced_when_complete(path) as file:
        file.write(f'{{"displayTimeUnit": "ms",\n"baseTimeNanoseconds": {base},\n"otherData": ')
        ranks = [
            {
                "rank": rank,
                "clock_offset_us": clock.ns / 1e3,
                "clock_error_us": clock.error_ns / 1e3,
                "older_calls_left_out": own.left_out,
            }
            for rank, (own, clock) in enumerate(pairs)
        ]
        json.dump({"world_size": len(everyones), "ranks": ranks}, file)
        file.write(',\n"traceEvents": [')
        separator = "\n"
        for rank, (own, clock) in enumerate(pairs):
            for event in _events(rank, own, clock.ns + since_1970 - base):
                file.write(separator)
                json.dump(event, file)
                separator = ",\n"
        file.write("\n]}\n")


def _events(rank: int, own: OwnTrace, shift_ns: int) -> list[dict[str, Any]]:
    """Of one rank, a process of the trace. Each group is a thread of it."""
    name = f"rank {rank} on {own.host_name} (pid {own.pid})"
    events = [
        _name("process_name", rank, 1, {"name": name}),
        _name("process_sort_index", rank, 1, {"sort_index": rank}),
    ]
    # Calls that overlap, as asynchronous ones do, cannot share a thread: viewers nest what a thread
    # does. Each goes to the first of its group's threads that is free.
    threads: list[tuple[str, int]] = []  # (group, when it is free)
    for call in sorted(own.calls, key=lambda call: call.began_ns):
        free = (
            k
            for k, (group, end_ns) in enumerate(threads)
            if group == call.group and end_ns <= call.began_ns
        )
        thread = next(free, len(threads))
        if thread == len(threads):
            threads.append((call.group, 0))
            number = sum(group == call.group for group, _ in threads)
            title = call.group if number == 1 else f"{call.group} ({number})"
            events.append(_name("thread_name", rank, 1 + thread, {"name": title}))
        threads[thread] = (call.group, call.ended_ns)
        data = {"dtype": call.dtype} if call.dtype else {}
        events.append(
            {
                "ph": "X",
                "name": call.logged_as,
                "cat": call.operation,
                "pid": rank,
                "tid": 1 + thread,
                "ts": (call.began_ns + shift_ns) / 1e3,
                "dur": (call.ended_ns - call.began_ns) / 1e3,
                "args": {"bytes": call.size_bytes, "group": call.group, **data},
            }
        )
    return events


def _name(kind: str, rank: int, thread: int, what: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": what}
