"""The trace of a job: the start and end of each call on every rank, in Chrome's trace format
(chrome://tracing, https://ui.perfetto.dev).

A rank keeps its latest calls in a ring buffer. Times are those of the host's monotonic clock, which
all ranks of a host share. The clocks of different hosts are compared when the file is written: no
rank leaves a barrier before all ranks have entered it, so each barrier bounds the offset between
two clocks from both sides. The file has the middle of the tightest bounds as the offset, and half
their distance as its error. Drift before that moment is not corrected.

Times have the same origin as in traces of torch.profiler, so that a viewer shows both on one axis.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed_comm._machine import ranges
from deepspeed_comm.comms_log.files import replaced_when_complete
from deepspeed_comm.torch import is_unlisted

# A barrier takes microseconds to a millisecond; the fastest ones give the tightest bounds.
_CLOCK_BARRIERS = 20
_SHOWN_RUNS = 8
# torch.profiler's origin is the latest multiple of three months since 1970: see ChromeTraceBaseTime
# in libkineto (https://github.com/pytorch/kineto).
_BASE_INTERVAL_NS = 7_889_238 * 10**9


class Call(NamedTuple):
    """One call; times in ns of the host's monotonic clock."""

    operation: str
    logged_as: str
    began_ns: int
    ended_ns: int
    size_bytes: int
    group: str  # group_text()
    dtype: str = ""  # "" without data, as in a barrier


class Ring:
    """The latest `limit` calls. Not thread-safe."""

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
        """The number of calls that were overwritten."""
        return self._added - len(self._calls)


@dataclasses.dataclass
class Clock:
    """A rank's clock: its name, and when the rank entered and left each barrier."""

    host: str
    came_ns: list[int]
    left_ns: list[int]


@dataclasses.dataclass
class Offset:
    """The time to add to a rank's clock to get rank 0's clock, with the largest error."""

    ns: int
    error_ns: int


@dataclasses.dataclass
class OwnTrace:
    """One rank's part of the file."""

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
    """The group's name in the trace: "world", "ranks 0-3", or torch's name if torch has no list of
    the ranks, as for groups of group.split_group()."""
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
    """Formats ranks: [0, 1, 2, 5] becomes "0-2,5"; a long list is cut."""
    runs = ranges(ranks).split(",")
    more = f",… ({len(ranks)} ranks)" if len(runs) > _SHOWN_RUNS else ""
    return ",".join(runs[:_SHOWN_RUNS]) + more


# --- clocks


def _which_clock() -> str:
    """The name of this process's clock: the kernel's boot id and the time namespace."""
    boot = namespace = ""  # as on an old kernel
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/time").st_ino)
    # Without the host's name if possible: containers of one host share the clock.
    return f"{boot}/{namespace}" if boot else f"{socket.gethostname()}//{namespace}"


def read_clock() -> Clock:
    """Measures barriers with all ranks. Collective over the default group."""
    came, left = [], []
    for _ in range(_CLOCK_BARRIERS):
        came.append(time.perf_counter_ns())
        dist.barrier()
        left.append(time.perf_counter_ns())
    return Clock(_which_clock(), came, left)


def offsets(clocks: list[Clock]) -> list[Offset]:
    """For each rank, the time to add to its clock to get rank 0's clock.

    In a barrier, every rank enters before any rank leaves. So for ranks `a` of rank 0's host and
    `b` of another host: a.came <= b.left + offset, and b.came + offset <= a.left.
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
        # The bounds may cross if the clocks drift during the barriers.
        found[host] = Offset((least + most) // 2, (abs(most - least) + 1) // 2)
    return [found[clock.host] for clock in clocks]


# --- the file


def own_trace(ring_limit: int, calls: list[Call], left_out: int) -> OwnTrace:
    """This rank's part of the trace. Collective, because it measures barriers."""
    return OwnTrace(ring_limit, calls, left_out, read_clock(), socket.gethostname(), os.getpid())


def since_1970_ns() -> int:
    """The time since 1970 minus this host's monotonic clock, in ns."""
    # The largest, because a pause between two readings makes it smaller.
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(10))


def write_trace(
    everyones: list[OwnTrace], path: str | os.PathLike[str], since_1970: int | None = None
) -> None:
    """Writes the parts of all ranks, in rank order, to one file.

    since_1970: since_1970_ns() of rank 0's host; by default this host's.

    Raises ValueError if no rank has kept calls.
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
    """The events of one rank, which is a process of the trace. Each group is a thread of it."""
    name = f"rank {rank} on {own.host_name} (pid {own.pid})"
    events = [
        _name("process_name", rank, 1, {"name": name}),
        _name("process_sort_index", rank, 1, {"sort_index": rank}),
    ]
    # Viewers nest the events of a thread, so overlapping (asynchronous) calls need several threads.
    # Each call goes to the first free thread of its group.
    threads: list[tuple[str, int]] = []  # (group, end of its last call in ns)
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
