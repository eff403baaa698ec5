"""The rows of the results: the median of the medians of all runs of a peer in one state; and the
comparison of two checkouts by rows."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.one_host.peers import BEFORE
from benchmarks.one_host.runs import Run
from benchmarks.one_host.states import STATES

Key = tuple[str, str, str, int, int, str, str]  # the first fields of a Row


@dataclasses.dataclass(frozen=True)
class Row:
    """Times in us; wrong elements of all of its runs."""

    peer: str
    op: str
    dtype: str
    size: int
    ranks: int
    mode: str
    state: str
    median_us: float
    p99_us: float
    runs: int
    wrong: int
    least_us: float = 0.0  # of the medians of its runs
    most_us: float = 0.0


def rows_of(runs: list[Run]) -> list[Row]:
    """Without rows of mixed states, and without failed runs."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for run in runs:
        for row in [] if run.failure else run.rows:
            if row["state"] in STATES:
                key = (row["peer"], run.op, row["dtype"], row["size"], run.ranks,
                       row["mode"], row["state"])  # fmt: skip
                found.setdefault(key, []).append(row)
    return [
        Row(
            *key, _middle(rows, "median_us"), _middle(rows, "p99_us"), len(rows), _wrong(rows),
            min(row["median_us"] for row in rows), max(row["median_us"] for row in rows),
        )
        for key, rows in found.items()
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same row of the checkout of --before and of this one."""

    before: Row
    now: Row

    @property
    def ratio(self) -> float:
        """Above 1 if the time has become longer."""
        return self.now.median_us / self.before.median_us

    @property
    def is_slower(self) -> bool:
        """Beyond the scatter: each run took longer than every run before. Needs two runs each."""
        return min(self.now.runs, self.before.runs) > 1 and self.now.least_us > self.before.most_us


def pairs_of(rows: list[Row]) -> list[Pair]:
    def case(row: Row) -> Key:
        peer = row.peer.removeprefix(BEFORE)
        return (peer, row.op, row.dtype, row.size, row.ranks, row.mode, row.state)

    earlier = {case(row): row for row in rows if row.peer.startswith(BEFORE)}
    later = [row for row in rows if not row.peer.startswith(BEFORE)]
    return [Pair(earlier[case(row)], row) for row in later if case(row) in earlier]


def _middle(rows: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def _wrong(rows: list[dict[str, Any]]) -> int:
    return sum(row["wrong"] for row in rows)
