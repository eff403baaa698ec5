"""The calls of one operation with one message size.

Counts, totals, means and percentiles cover all calls. Individual samples are kept for the latest
calls only, so memory does not grow with the number of calls.
"""

from __future__ import annotations

import array
import collections
import dataclasses
from typing import Any

from deepspeed_comm.comms_log.histogram import Histogram
from deepspeed_comm.comms_log.summary import TRIMMED, convert_size

KEPT_SAMPLES = 1024  # the latest ones of each record


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
        """The numbers, oldest first."""
        return [*self._kept[self._oldest :], *self._kept[: self._oldest]]


class _Series:
    """One measured quantity: a histogram of all values, and the latest values."""

    def __init__(self) -> None:
        self.all = Histogram()
        self.latest = _Latest()

    def add(self, value: float) -> None:
        self.all.add(value)
        self.latest.add(value)


@dataclasses.dataclass
class Record:
    """The calls of one operation with one message size. Not thread-safe."""

    size_bytes: int
    latency_ms: _Series = dataclasses.field(default_factory=_Series)
    algbw: _Series = dataclasses.field(default_factory=_Series)
    busbw: _Series = dataclasses.field(default_factory=_Series)
    # The groups of the latest calls, in the order of latency_ms.latest.
    groups: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT_SAMPLES)
    )

    def add(self, latency_ms: float, algbw: float, busbw: float, group: str) -> None:
        self.latency_ms.add(latency_ms)
        self.algbw.add(algbw)
        self.busbw.add(busbw)
        self.groups.append(group)

    def latest_by_group(self) -> dict[str, list[float]]:
        """The latest latencies in ms of each group, oldest first."""
        found: dict[str, list[float]] = {}
        for group, ms in zip(self.groups, self.latency_ms.latest.in_order(), strict=True):
            found.setdefault(group, []).append(ms)
        return found

    @property
    def count(self) -> int:
        return self.latency_ms.all.count

    def raw(self) -> list[Any]:
        """[count, [ms], [algbw], [busbw]], with the latest samples only."""
        series = (self.latency_ms, self.algbw, self.busbw)
        return [self.count, *(each.latest.in_order() for each in series)]

    def summary(self) -> dict[str, Any]:
        """The record's row of the table."""
        latency_ms = self.latency_ms.all
        return {
            "count": latency_ms.count,
            "total_latency_ms": latency_ms.total,
            "avg_latency_ms": latency_ms.trimmed_mean(TRIMMED),
            "tput_avg_gbps": self.algbw.all.trimmed_mean(TRIMMED),
            "busbw_avg_gbps": self.busbw.all.trimmed_mean(TRIMMED),
            "msg_size_bytes": self.size_bytes,
            "msg_size_str": convert_size(self.size_bytes),
            "p50_latency_ms": latency_ms.percentile(50),
            "p99_latency_ms": latency_ms.percentile(99),
        }
