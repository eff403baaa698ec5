"""The communication log: how often each collective was called, how long it took, how fast it was.

Bandwidths are in Gbit/s, by nccl-tests' definitions
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): algbw is the size of the data
over the time, busbw the same times what of it has to cross the wire, which does not depend on the
number of ranks.

Counts, totals, averages and percentiles are of all calls. The samples themselves are kept of the
latest calls alone, for get_raw_data() and for stragglers: memory does not grow with the calls.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import math
import threading
import time
from typing import Any

import torch.distributed as dist

from deepspeed_comm import comms_trace, constants
from deepspeed_comm._log import logger, warn_once
from deepspeed_comm.histogram import Histogram
from deepspeed_comm.utils import get_caller_func  # noqa: F401 - where the original has it

# Samples that a record keeps, the latest ones.
KEPT_SAMPLES = 1024
# Where a program's sizes or names never end, the log stays below some 100 MB: from so many records
# on, a new size is logged as the next power of two; from so many names on, a new one as OTHERS.
MOST_RECORDS = 2048
MOST_NAMES = 256
OTHERS = "other calls"
# Of the samples, at either end, that averages leave out.
_TRIMMED = 0.1
_COLUMN = 20

_HALF_EACH_WAY = ("all_to_all_single", "all_to_all")
# Every rank gives one part of the whole.
_GIVEN_A_PART = ("all_gather", "all_gather_into_tensor")
_GIVEN_THE_WHOLE = ("reduce_scatter", "reduce_scatter_tensor")
_REDUCED_AND_SPREAD = (
    "all_reduce",
    "all_reduce_caching",
    "all_reduce_coalesced",
    "inference_all_reduce",
)


def print_rank_0(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def convert_size(size_bytes: int) -> str:
    """For people: 1536 is "1.5 KB", in steps of 1024."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    step = int(math.floor(math.log(size_bytes, 1024)))
    return f"{round(size_bytes / 1024**step, 2)} {units[step]}"


def calc_bw_log(
    comm_op: str, size: int, duration: float, group_size: int | None = None
) -> tuple[float, float]:
    """(algbw, busbw) in Gbit/s of a call that was given `size` bytes and took `duration` ms.

    `group_size` is that of the group of the call, by default of the world. A call whose name is not
    known is taken for one whose data crosses the wire once. 0 where no time was measured.
    """
    if duration <= 0:
        return 0.0, 0.0
    ranks = dist.get_world_size() if group_size is None else group_size
    if comm_op in _GIVEN_A_PART:
        size *= ranks
    algbw = size / duration * 8 / 1e6
    if comm_op in (*_HALF_EACH_WAY, *_GIVEN_A_PART, *_GIVEN_THE_WHOLE):
        return algbw, algbw * (ranks - 1) / ranks
    if comm_op in _REDUCED_AND_SPREAD:
        return algbw, algbw * 2 * (ranks - 1) / ranks
    return algbw, algbw


def trimmed_mean(samples: list[float]) -> float:
    """The mean without the tenth at either end; 0 of none."""
    cut = round(len(samples) * _TRIMMED)
    kept = sorted(samples)[cut : len(samples) - cut]
    return sum(kept) / len(kept) if kept else 0.0


class _Latest:
    """The latest KEPT_SAMPLES numbers."""

    def __init__(self) -> None:
        self._kept = array.array("d")
        self._oldest = 0

    def add(self, value: float) -> None:
        if len(self._kept) < KEPT_SAMPLES:
            self._kept.append(value)
            return
        self._kept[self._oldest] = value
        self._oldest = (self._oldest + 1) % KEPT_SAMPLES

    def in_order(self) -> list[float]:
        """The oldest one first."""
        return [*self._kept[self._oldest :], *self._kept[: self._oldest]]


class _Figure:
    """Of one kind of number: all of them in a histogram, the latest ones as they are."""

    def __init__(self) -> None:
        self.all = Histogram()
        self.latest = _Latest()

    def add(self, value: float) -> None:
        self.all.add(value)
        self.latest.add(value)


@dataclasses.dataclass
class _Record:
    """Of one name and one message size."""

    latency_ms: _Figure = dataclasses.field(default_factory=_Figure)
    algbw: _Figure = dataclasses.field(default_factory=_Figure)
    busbw: _Figure = dataclasses.field(default_factory=_Figure)
    # Of the latest calls, as the latencies.
    groups: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT_SAMPLES)
    )

    def latest_by_group(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for group, ms in zip(self.groups, self.latency_ms.latest.in_order(), strict=True):
            found.setdefault(group, []).append(ms)
        return found

    @property
    def count(self) -> int:
        return self.latency_ms.all.count

    def summary(self, size: int) -> dict[str, Any]:
        latency_ms = self.latency_ms.all
        return {
            "count": latency_ms.count,
            "total_latency_ms": latency_ms.total,
            "avg_latency_ms": latency_ms.trimmed_mean(_TRIMMED),
            "tput_avg_gbps": self.algbw.all.trimmed_mean(_TRIMMED),
            "busbw_avg_gbps": self.busbw.all.trimmed_mean(_TRIMMED),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
            "p50_latency_ms": latency_ms.percentile(50),
            "p99_latency_ms": latency_ms.percentile(99),
        }


class CommsLogger:
    """What was logged on this rank. Thread-safe: asynchronous calls end on other threads."""

    def __init__(self) -> None:
        self.enabled = constants.COMMS_LOGGER_ENABLED_DEFAULT
        self.verbose = constants.COMMS_LOGGER_VERBOSE_DEFAULT
        self.debug = constants.COMMS_LOGGER_DEBUG_DEFAULT
        self.prof_all = constants.COMMS_LOGGER_PROF_ALL_DEFAULT
        self.prof_ops: list[str] = list(constants.COMMS_LOGGER_PROF_OPS_DEFAULT)
        self._records: dict[str, dict[int, _Record]] = {}
        self._record_count = 0
        self._calls = comms_trace.Ring(constants.COMMS_LOGGER_TRACE_EVENTS_DEFAULT)
        self._mutex = threading.Lock()
        self._under_way: dict[int, list[Any]] = {}  # the Works of a call, by a number of its own
        self._launched = 0

    @property
    def trace_events(self) -> int:
        """How many calls are kept for a trace, the latest ones; 0: none."""
        return self._calls.limit

    @trace_events.setter
    def trace_events(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"trace_events: expected a number of calls, 0 for none; got {limit!r}")
        with self._mutex:
            if limit != self._calls.limit:  # what was kept before is dropped
                self._calls = comms_trace.Ring(limit)

    def configure(self, comms_config: Any) -> None:
        """Takes over a DeepSpeedCommsConfig, of this package or of DeepSpeed."""
        given = getattr(comms_config, "comms_logger", None)
        if given is None and not comms_config.comms_logger_enabled:
            return  # the configuration says nothing of the log
        # DeepSpeed's comms_logger_enabled is true with "enabled": false as well.
        self.enabled = bool(comms_config.comms_logger_enabled) and (
            given is None or "enabled" not in _set_fields(given) or bool(given.enabled)
        )
        if self.enabled and given is not None:
            self.verbose = given.verbose
            self.debug = given.debug
            self.prof_ops = list(given.prof_ops)
            self.prof_all = given.prof_all
            # DeepSpeed's own configuration has no such key.
            self.trace_events = getattr(given, "trace_events", self.trace_events)

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: list[str]) -> None:
        self.prof_ops = [*self.prof_ops, *(op for op in op_name_list if op not in self.prof_ops)]

    def stop_profiling_op(self, op_name_list: list[str]) -> None:
        self.prof_ops = [op for op in self.prof_ops if op not in op_name_list]

    def append(
        self,
        raw_name: str,
        record_name: str,
        latency: float,
        msg_size: int,
        group_size: int | None = None,
        group: str = "",
    ) -> None:
        """Logs a call: the collective, the name to log it under, ms, bytes, the size of its group,
        and the group: stragglers are looked for among the calls of one."""
        algbw, busbw = calc_bw_log(raw_name, msg_size, latency, group_size)
        with self._mutex:
            record = self._record_of(record_name, msg_size)
            record.latency_ms.add(latency)
            record.algbw.add(algbw)
            record.busbw.add(busbw)
            record.groups.append(group)
        if self.verbose and dist.is_initialized() and dist.get_rank() == 0:
            logger.info(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: "
                f"{convert_size(msg_size)} | algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def _record_of(self, name: str, size: int) -> _Record:
        if name not in self._records and len(self._records) >= MOST_NAMES:
            warn_once(
                f"the communication log has {MOST_NAMES} names; calls of further ones are logged "
                f'as "{OTHERS}". log_name should not have a number that grows.'
            )
            name = OTHERS
        of_name = self._records.setdefault(name, {})
        if size not in of_name and self._record_count >= MOST_RECORDS:
            warn_once(
                f"the communication log has {MOST_RECORDS} message sizes; further ones are logged "
                "as the next power of two"
            )
            size = 1 << (size - 1).bit_length() if size > 0 else 0
        if size not in of_name:
            of_name[size] = _Record()
            self._record_count += 1
        return of_name[size]

    def launched(self, works: list[Any]) -> int:
        """A call that is logged when its Works are done; returns its number for done()."""
        with self._mutex:
            self._launched += 1
            self._under_way[self._launched] = works
            return self._launched

    def done(self, number: int) -> None:
        with self._mutex:
            self._under_way.pop(number, None)

    def settle(self, limit_s: float = 1.0) -> None:
        """Until what is complete has been logged, which another thread may be about to do."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with self._mutex:
                calls = list(self._under_way.values())
            if not any(all(work.is_completed() for work in works) for works in calls):
                return
            time.sleep(0.0005)

    def trace(self, call: comms_trace.Call) -> None:
        """Keeps a call for the trace."""
        with self._mutex:
            self._calls.add(call)

    def own_calls(self) -> list[comms_trace.Call]:
        """What is kept for the trace, the oldest call first."""
        with self._mutex:
            return self._calls.calls()

    def own_trace(self) -> comms_trace.OwnTrace:
        """This rank's part of the trace. A collective, which compares clocks."""
        with self._mutex:
            kept = (self._calls.limit, self._calls.calls(), self._calls.left_out())
        return comms_trace.own_trace(*kept)

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        return self.get_raw_data()

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """{name: {bytes: [count, [ms], [algbw], [busbw]]}}; of each, the last 1024 samples."""
        with self._mutex:
            return {
                name: {
                    size: [
                        record.count,
                        record.latency_ms.latest.in_order(),
                        record.algbw.latest.in_order(),
                        record.busbw.latest.in_order(),
                    ]
                    for size, record in records.items()
                }
                for name, records in self._records.items()
            }

    def has_data(self) -> bool:
        return bool(self._records)

    def reset_data(self) -> None:
        with self._mutex:
            self._records.clear()
            self._record_count = 0
            self._calls = comms_trace.Ring(self._calls.limit)

    def get_operation_names(self) -> list[str]:
        return list(self._records)

    def get_total_operations(self) -> int:
        with self._mutex:
            return sum(r.count for records in self._records.values() for r in records.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """By message size; None when nothing was logged under that name."""
        with self._mutex:
            records = self._records.get(operation_name)
            if records is None:
                return None
            return {size: record.summary(size) for size, record in records.items()}

    def get_summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """get_operation_summary() of every name."""
        with self._mutex:
            return {
                name: {size: record.summary(size) for size, record in records.items()}
                for name, records in self._records.items()
            }

    def log_all(
        self,
        print_log: bool = True,
        show_straggler: bool = False,
        return_dict: bool = False,
        compact: bool = False,
    ) -> dict[str, Any] | None:
        """Prints the table, DeepSpeed's or a compact one, returns it as a dictionary, or both.

        With show_straggler it is a collective over all ranks, which may have logged different
        calls: a call is compared among those ranks that logged it.
        """
        summary = self.get_summary()
        stragglers = self._find_stragglers() if show_straggler else None
        if print_log:
            print(_compact_table(summary) if compact else _table(summary), flush=True)
            if stragglers is not None:
                print(_straggler_table(stragglers), flush=True)
        if not return_dict:
            return None
        return {
            "summary": summary,
            "straggler_analysis": stragglers,
            "metadata": {
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "rank": dist.get_rank() if dist.is_initialized() else 0,
                "timestamp": datetime.datetime.now().isoformat(),
            },
        }

    def _find_stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        """How long each call took on the fastest rank, and how much longer here: what the others
        waited for. The latest calls of each group are compared, pair by pair: of each name and size
        1024 at most, which "count" says."""
        with self._mutex:
            mine = {
                name: {size: record.latest_by_group() for size, record in records.items()}
                for name, records in self._records.items()
            }
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for name, records in mine.items():
            for size, by_group in records.items():
                fastest: list[float] = []
                behind: list[float] = []
                for group, own in by_group.items():
                    lists = [
                        samples
                        for theirs in everyones
                        if (samples := theirs.get(name, {}).get(size, {}).get(group))
                    ]
                    shared = min(len(samples) for samples in lists)
                    for k in range(-shared, 0):
                        least = min(samples[k] for samples in lists)
                        fastest.append(least)
                        behind.append(own[k] - least)
                found.setdefault(name, {})[size] = {
                    "count": len(fastest),
                    "total_comm_lat_ms": sum(fastest),
                    "total_straggler_ms": sum(behind),
                    "avg_comm_lat_ms": trimmed_mean(fastest),
                    "avg_straggler_ms": trimmed_mean(behind),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return found


def _set_fields(config: Any) -> set[str]:
    """What the user gave of DeepSpeed's configuration (a pydantic model); of ours, everything."""
    given = getattr(config, "model_fields_set", None)
    return {"enabled"} if given is None else set(given)


def _row(cells: list[str]) -> str:
    return "".join(f"{cell: <{_COLUMN}}" for cell in cells).rstrip()


def _table(summary: dict[str, Any]) -> str:
    heads = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"]
    ours = ["p50 Latency(ms)", "p99 Latency(ms)"]  # the others are the original's
    lines = [_row([*heads, "tput_avg (Gbps)", "busbw_avg (Gbps)", *ours])]
    for name, records in summary.items():
        lines.append(name)
        for size, of in sorted(records.items()):
            numbers = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
            figures = [f"{of[key]:.2f}" for key in numbers]
            figures += [f"{of[key]:.3f}" for key in ("p50_latency_ms", "p99_latency_ms")]
            lines.append(_row(["", convert_size(size), str(of["count"]), *figures]))
    return "\n".join(lines)


# Of the compact table: the head, the key in the summary, digits behind the point, width.
_COMPACT = (
    ("count", "count", 0, 9),
    ("total ms", "total_latency_ms", 1, 13),
    ("avg ms", "avg_latency_ms", 3, 11),
    ("p50 ms", "p50_latency_ms", 3, 11),
    ("p99 ms", "p99_latency_ms", 3, 11),
    ("algbw Gbps", "tput_avg_gbps", 2, 12),
    ("busbw Gbps", "busbw_avg_gbps", 2, 12),
)
_COMPACT_SIZE = 21


def _compact_table(summary: dict[str, Any]) -> str:
    """At most 100 columns, but for long names."""
    lines = [
        f"{'operation, size': <{_COMPACT_SIZE}}"
        + "".join(f"{head: >{width}}" for head, _, _, width in _COMPACT)
    ]
    for name, records in summary.items():
        lines.append(name)
        for size, of in sorted(records.items()):
            cells = (f"{of[key]: >{width}.{digits}f}" for _, key, digits, width in _COMPACT)
            lines.append(f"{'  ' + convert_size(size): <{_COMPACT_SIZE}}" + "".join(cells))
    return "\n".join(lines)


def _straggler_table(stragglers: dict[str, Any]) -> str:
    heads = ["Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)"]
    lines = [
        "Breakdown with straggler effect",
        "-------------------------------",
        _row([*heads, "Avg comm lat(ms)", "Avg straggler(ms)"]),
    ]
    for name, records in stragglers.items():
        lines.append(name)
        for size, of in sorted(records.items()):
            numbers = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms")
            figures = [f"{of[key]:.2f}" for key in (*numbers, "avg_straggler_ms")]
            lines.append(_row(["", convert_size(size), str(of["count"]), *figures]))
    return "\n".join(lines)
