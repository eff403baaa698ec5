"""The communication log of one rank: which calls are logged, and the records that they fill."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepspeed_comm import constants
from deepspeed_comm._log import logger, warn_once
from deepspeed_comm.comms_log import tables
from deepspeed_comm.comms_log.record import Record
from deepspeed_comm.comms_log.summary import calc_bw_log, convert_size, stragglers
from deepspeed_comm.comms_log.trace import Call, Ring

# Bounds for programs with ever new sizes or names; they keep the log below 100 MB. Beyond
# MOST_RECORDS a new size is rounded up to a power of two; beyond MOST_NAMES a new name is OTHERS.
MOST_RECORDS = 2048
MOST_NAMES = 256
OTHERS = "other calls"


class CommsLogger:
    """The log of this rank. Thread-safe, because asynchronous calls complete on other threads."""

    def __init__(self) -> None:
        self.enabled = constants.COMMS_LOGGER_ENABLED_DEFAULT
        self.verbose = constants.COMMS_LOGGER_VERBOSE_DEFAULT
        self.debug = constants.COMMS_LOGGER_DEBUG_DEFAULT
        self.prof_all = constants.COMMS_LOGGER_PROF_ALL_DEFAULT
        self.prof_ops: list[str] = list(constants.COMMS_LOGGER_PROF_OPS_DEFAULT)
        self._records: dict[str, dict[int, Record]] = {}
        self._record_count = 0
        self._calls = Ring(constants.COMMS_LOGGER_TRACE_EVENTS_DEFAULT)
        self._mutex = threading.Lock()
        self._pending: dict[int, list[Any]] = {}  # by launched()'s number, the Works of the call
        self._launched = 0

    @property
    def trace_events(self) -> int:
        """The number of latest calls kept for save_trace(); 0 keeps none."""
        return self._calls.limit

    @trace_events.setter
    def trace_events(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"trace_events: expected a number of calls, 0 for none; got {limit!r}")
        with self._mutex:
            if limit != self._calls.limit:  # a new limit drops the calls kept so far
                self._calls = Ring(limit)

    def configure(self, comms_config: Any) -> None:
        """Applies a DeepSpeedCommsConfig, of this package or of DeepSpeed."""
        given = getattr(comms_config, "comms_logger", None)
        if given is None and not comms_config.comms_logger_enabled:
            return  # the configuration has no "comms_logger"
        # DeepSpeed's comms_logger_enabled is true even with "enabled": false. So `enabled` counts
        # if the user has set it: see model_fields_set of DeepSpeed's class; ours always counts.
        keys = getattr(given, "model_fields_set", {"enabled"})
        self.enabled = bool(comms_config.comms_logger_enabled) and (
            given is None or "enabled" not in keys or bool(given.enabled)
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
        """Logs a call.

        raw_name: the operation, which decides the factor of busbw. record_name: the name in the
        log. latency: ms. msg_size: bytes. group_size: the ranks of the call's group; by default the
        world size. group: the group's name; stragglers are found among the calls of one group.
        """
        algbw, busbw = calc_bw_log(raw_name, msg_size, latency, group_size)
        with self._mutex:
            self._record_of(record_name, msg_size).add(latency, algbw, busbw, group)
        if self.verbose and dist.is_initialized() and dist.get_rank() == 0:
            logger.info(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: "
                f"{convert_size(msg_size)} | algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def _record_of(self, name: str, size: int) -> Record:
        if name not in self._records and len(self._records) >= MOST_NAMES:
            warn_once(
                f"the communication log has {MOST_NAMES} names; calls with a new name are logged "
                f'as "{OTHERS}". Use a log_name without a counter.'
            )
            name = OTHERS
        of_name = self._records.setdefault(name, {})
        if size not in of_name and self._record_count >= MOST_RECORDS:
            warn_once(
                f"the communication log has {MOST_RECORDS} rows (name and size); a new size is "
                "rounded up to a power of two"
            )
            size = 1 << (size - 1).bit_length() if size > 0 else 0
        if size not in of_name:
            of_name[size] = Record(size)
            self._record_count += 1
        return of_name[size]

    def launched(self, works: list[Any]) -> int:
        """Registers an asynchronous call until its Works complete; returns a number for done()."""
        with self._mutex:
            self._launched += 1
            self._pending[self._launched] = works
            return self._launched

    def done(self, number: int) -> None:
        """Removes a call that launched() registered."""
        with self._mutex:
            self._pending.pop(number, None)

    def settle(self, limit_s: float = 1.0) -> None:
        """Waits, at most limit_s seconds, until another thread has logged all completed calls."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with self._mutex:
                calls = list(self._pending.values())
            if not any(all(work.is_completed() for work in works) for works in calls):
                return
            time.sleep(0.0005)

    def trace(self, call: Call) -> None:
        """Keeps a call for save_trace()."""
        with self._mutex:
            self._calls.add(call)

    def own_calls(self) -> tuple[int, list[Call], int]:
        """trace_events, the calls kept for save_trace(), and the number of older, dropped calls."""
        with self._mutex:
            return self._calls.limit, self._calls.calls(), self._calls.left_out()

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        return self.get_raw_data()

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """{name: {bytes: [count, [ms], [algbw], [busbw]]}}, with the latest 1024 samples each."""
        return self._of_each(Record.raw)

    def has_data(self) -> bool:
        return bool(self._records)

    def reset_data(self) -> None:
        with self._mutex:
            self._records.clear()
            self._record_count = 0
            self._calls = Ring(self._calls.limit)

    def get_operation_names(self) -> list[str]:
        return list(self._records)

    def get_total_operations(self) -> int:
        with self._mutex:
            return sum(r.count for records in self._records.values() for r in records.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """The records of one name by message size in bytes; None if the name is not in the log."""
        with self._mutex:
            records = self._records.get(operation_name)
            if records is None:
                return None
            return {size: record.summary() for size, record in records.items()}

    def get_summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """get_operation_summary() by name."""
        return self._of_each(Record.summary)

    def _of_each(self, read: Callable[[Record], Any]) -> dict[str, dict[int, Any]]:
        """{name: {bytes: read(record)}}"""
        with self._mutex:
            return {
                name: {size: read(record) for size, record in records.items()}
                for name, records in self._records.items()
            }

    def log_all(
        self,
        print_log: bool = True,
        show_straggler: bool = False,
        return_dict: bool = False,
        compact: bool = False,
    ) -> dict[str, Any] | None:
        """Prints the table, returns it as a dictionary, or both; comm.log_summary() lists the keys.

        show_straggler: adds the time lost to stragglers, which makes this call collective over all
        ranks. compact: a table of at most 100 columns instead of DeepSpeed's.
        """
        summary = self.get_summary()
        behind = self._find_stragglers() if show_straggler else None
        if print_log:
            print(tables.compact(summary) if compact else tables.deepspeed(summary), flush=True)
            if behind is not None:
                print(tables.stragglers(behind), flush=True)
        if not return_dict:
            return None
        return {
            "summary": summary,
            "straggler_analysis": behind,
            "metadata": {
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "rank": dist.get_rank() if dist.is_initialized() else 0,
                "timestamp": datetime.datetime.now().isoformat(),
            },
        }

    def _find_stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        mine = self._of_each(Record.latest_by_group)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        return stragglers(mine, everyones)
