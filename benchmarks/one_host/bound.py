"""The memory bound of an all-reduce of two ranks with private tensors: docs/benchmarks.md.

The rates were measured on a Zen 4 with two cores; on another processor the bound is a yardstick.
"""

from __future__ import annotations

import dataclasses

CACHE_BYTES = 32 << 20  # an L3's
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Rates:
    exchange_us: float  # both cores store a line, and both see the other's
    write_gb_s: float  # lines that the other core reads, per core
    read_gb_s: float  # lines that the other core wrote, per core
    memory_gb_s: float  # both cores together, from DRAM and to it


RATES = {"near": Rates(0.047, 100, 99, 51), "far": Rates(0.185, 27, 37, 90)}


def bound_us(op: str, size: int, state: str, ranks: int) -> float | None:
    """None if there is no bound: for another operation, more ranks, a state without rates.

    Each rank publishes `size` bytes and reads as many. Data that no cache holds crosses the
    memory four times: each rank reads its tensor and writes it."""
    rates = RATES.get(state)
    if rates is None or (op, ranks) != ("all_reduce", RANKS):
        return None
    if RANKS * size >= CACHE_BYTES:
        return 4 * size / rates.memory_gb_s / 1e3
    return rates.exchange_us + size / rates.write_gb_s / 1e3 + size / rates.read_gb_s / 1e3
