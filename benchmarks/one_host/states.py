"""Where the cores are: near ones share a cache, far ones do not, and a hypervisor may move them.

The hypervisor may even run two cores as threads of one core, which share all caches. Only a
measurement can tell: the time in which two cores exchange a cache line, before and after the timed
calls. Calls between two probes that disagree belong to no state.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from deepspeed_comm._machine import core_count

STATES = ("same core", "near", "far")
# Beyond the last limit, the cores take turns on one core of the host.
SAME_CORE_BELOW_NS, NEAR_BELOW_NS, FAR_ABOVE_NS, FAR_BELOW_NS = 40.0, 100.0, 150.0, 1000.0


def state_of(exchange_ns: float) -> str:
    """One of STATES, or mixed if it is none of them."""
    if exchange_ns < NEAR_BELOW_NS:
        return "same core" if exchange_ns < SAME_CORE_BELOW_NS else "near"
    return "far" if FAR_ABOVE_NS < exchange_ns < FAR_BELOW_NS else "mixed"


def state_between(before_ns: float, after_ns: float) -> str:
    """The state that both probes agree on, else mixed."""
    before, after = state_of(before_ns), state_of(after_ns)
    return before if before == after else "mixed"


def cpus_of_ranks(usable: set[int], ranks: int) -> list[int] | None:
    """A cpu for each rank, no two of them of one core; None if there are fewer cores."""
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
