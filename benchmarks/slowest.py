"""The time of a call that counts: that of its slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def slowest(call: Callable[[], Any]) -> float:
    """Seconds of the rank that took longest, the same on all ranks, which begin together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    found = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
