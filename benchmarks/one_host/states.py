"""Where the cores are: near ones share a cache, far ones do not, and a hypervisor may move them.

Only a measurement can tell: the time in which two cores exchange a cache line, before and after
each run. A run whose two probes disagree belongs to neither state.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from deepspeed_comm._machine import core_count

STATES = ("near", "far")
NEAR_BELOW_NS, FAR_ABOVE_NS = 100.0, 150.0


def state_of(exchange_ns: float) -> str:
    """near, far, or mixed for what is between the two."""
    if exchange_ns < NEAR_BELOW_NS:
        return "near"
    return "far" if exchange_ns > FAR_ABOVE_NS else "mixed"


def state_of_run(before_ns: float, after_ns: float) -> str:
    """The state that both probes agree on, else mixed."""
    before, after = state_of(before_ns), state_of(after_ns)
    return before if before == after else "mixed"


def cpus_of_ranks(usable: set[int], ranks: int) -> list[int] | None:
    """A cpu for each rank, no two of them of one core; None where there are fewer cores."""
    chosen: list[int] = []
    for cpu in sorted(usable):
        if core_count({*chosen, cpu}) > len(chosen):
            chosen.append(cpu)
    return chosen[:ranks] if len(chosen) >= ranks else None


def probe(program: Path, cpus: list[int]) -> float:
    """ns of an exchange between the first cpu and the farthest of the others."""
    result = subprocess.run(
        [str(program), *map(str, cpus)], capture_output=True, text=True, timeout=120
    )
    if result.returncode != 0:
        raise RuntimeError(f"the probe of the cores failed: {result.stderr.strip()}")
    return float(max(json.loads(result.stdout)))
