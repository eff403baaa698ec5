"""The rows of the results: of all runs of a peer in one state, the median of their medians."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

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


def rows_of(runs: list[Run]) -> list[Row]:
    """Without what is of no state, and without runs that failed."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for run in runs:
        for row in [] if run.failure else run.rows:
            if row["state"] in STATES:
                key = (row["peer"], run.op, row["dtype"], row["size"], run.ranks,
                       row["mode"], row["state"])  # fmt: skip
                found.setdefault(key, []).append(row)
    return [
        Row(*key, _middle(rows, "median_us"), _middle(rows, "p99_us"), len(rows), _wrong(rows))
        for key, rows in found.items()
    ]


def _middle(rows: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def _wrong(rows: list[dict[str, Any]]) -> int:
    return sum(row["wrong"] for row in rows)
