"""A row for each metric, with a column for each contender, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from workload import DSCOMM, GLOO, RATES, Metric

from deepspeed_comm._machine import processor_name


@dataclasses.dataclass
class Row:
    """rounds: by contender, the figure of each round, in the metric's unit."""

    workload: str
    key: str
    metric: Metric
    rounds: dict[str, list[float]]

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(each) for name, each in self.rounds.items() if each}

    def speedup(self, contender: str) -> float | None:
        """The speed of the contender over that of gloo: above 1 if the contender is faster."""
        medians = self.medians()
        if not self.metric.is_compared or not {contender, GLOO} <= medians.keys():
            return None
        ratio = medians[contender] / medians[GLOO]
        return ratio if self.metric.unit in RATES else 1 / ratio

    def as_json(self) -> list[dict[str, Any]]:
        """One entry for each contender."""
        return [
            {
                "workload": self.workload,
                "metric": self.key,
                "label": self.metric.label,
                "unit": self.metric.unit,
                "contender": contender,
                "median": median,
                "rounds": self.rounds[contender],
                "times_gloo": self.speedup(contender),
            }
            for contender, median in self.medians().items()
        ]


def machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }


def print_table(rows: list[Row], contenders: list[str], pinned: bool) -> None:
    """A cell has the median; the speed-up is that of the medians of dscomm and gloo."""
    where = "not pinned"
    if pinned:
        cores = len(os.sched_getaffinity(0))
        where = "each on a core of its own" if cores > 1 else "both on one core"
    table = Table(title=f"2 ranks, {where}; medians")
    table.add_column("workload")
    table.add_column("unit")
    for contender in contenders:
        table.add_column(contender, justify="right")
    table.add_column("dscomm : gloo", justify="right")
    for row in rows:
        medians = row.medians()
        cells = [figure(medians[name]) if name in medians else "" for name in contenders]
        ratio = row.speedup(DSCOMM)
        table.add_row(row.metric.label, row.metric.unit, *cells, f"{ratio:.2f}x" if ratio else "")
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no width
    console.print(table)


def figure(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
