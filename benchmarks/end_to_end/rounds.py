"""All rounds of a workload: its contenders take turns, and must have the same results."""

from __future__ import annotations

import dataclasses
import gc
import sys
from typing import Any

from ranks import RunFailed, run
from report import Row
from workload import UNITS, Workload

# Reports runs in which other processes had a larger share of a rank's core; on an idle machine they
# have less than a hundredth. If one computes there, every wait for the rank is longer by the
# scheduler's slice.
DISTURBED = 0.1


@dataclasses.dataclass
class Found:
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # what was left out, and why
    disturbed: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)


def measure(
    name: str, workload: Workload, rounds: int, quick: bool, found: Found, pinned: bool = True
) -> None:
    """Adds the results of a workload's rounds. A contender that failed once is not run again."""
    absent = workload.prepare(quick)
    found.notes += [f"{name}, {contender}: {reason}" for contender, reason in absent.items()]
    gc.collect()
    gc.freeze()  # then ranks do not walk through the parent's objects when they collect garbage
    contenders = [contender for contender in workload.contenders if contender not in absent]
    rows = [
        Row(name, key, metric, {contender: [] for contender in contenders})
        for key, metric in workload.metrics.items()
    ]
    expected: Any = None
    for number in range(rounds):
        for contender in list(contenders):
            print(f"{name}, {contender}, round {number + 1}", file=sys.stderr, flush=True)
            try:
                done = run(workload, contender, quick, pinned)
            except RunFailed as failure:
                found.failures.append(f"{name}, {contender}: {failure}")
                contenders.remove(contender)
                continue
            expected = done.outcome if expected is None else expected
            if done.outcome != expected:
                found.failures.append(f"{name}, {contender}: {done.outcome} instead of {expected}")
            if done.disturbance > DISTURBED:
                found.disturbed.append(
                    f"{name}, {contender}, round {number + 1}: other processes had "
                    f"{done.disturbance:.0%} of a rank's core"
                )
            for row in rows:
                row.rounds[contender].append(UNITS[row.metric.unit](done.figures[row.key]))
    found.rows += [row for row in rows if row.medians()]
