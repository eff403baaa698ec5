"""Workloads: each is a module of this folder with a WORKLOAD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

GLOO, DSCOMM = "gloo", "dscomm"
DIRECT = "dscomm direct"  # through deepspeed_comm.inference_all_reduce
DEEPSPEED = "DeepSpeed's op"

# By metric, the samples of this rank in seconds (as many on every rank), or a figure; and the
# result, which must have the same bits for every contender.
Measured = tuple[dict[str, list[float]], Any]


@dataclasses.dataclass(frozen=True)
class Metric:
    """Of samples in seconds, the median is shown, in this unit."""

    label: str
    unit: str  # of UNITS
    is_compared: bool = True  # False: the contenders do different work


# Converts a sample or a median from seconds to the unit.
UNITS: dict[str, Callable[[float], float]] = {
    "tokens/s": lambda seconds: 1 / seconds,
    "steps/s": lambda seconds: 1 / seconds,
    "s": lambda seconds: seconds,
    "ms": lambda seconds: seconds * 1e3,
    "us": lambda seconds: seconds * 1e6,
    "together/sum": lambda ratio: ratio,
}
RATES = ("tokens/s", "steps/s")  # more is better


@dataclasses.dataclass(frozen=True)
class Workload:
    metrics: dict[str, Metric]  # by their keys in Measured
    measure: Callable[[str, bool], Measured]  # of a contender, quick or not; in a rank
    contenders: tuple[str, ...] = (GLOO, DSCOMM)
    # Called in the process from which ranks are forked: makes the data that all ranks need, of the
    # quick shapes or not, and returns the unavailable contenders, with the reasons.
    prepare: Callable[[bool], dict[str, str]] = lambda quick: {}
    has_group: bool = True  # made before measure() is called
