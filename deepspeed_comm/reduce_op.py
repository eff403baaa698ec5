"""Reduction operations: deepspeed.comm's ReduceOp, and what torch calls them."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed


class ReduceOp(enum.Enum):
    """Not torch's, which is accepted wherever this is. Which dtypes an operation has depends on the
    backend; AVG of integers, for one, has no meaning."""

    torch_op: Any  # what torch calls it; UNUSED has none

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


for _op in ReduceOp:
    if _op is not ReduceOp.UNUSED:
        _op.torch_op = getattr(torch.distributed.ReduceOp, _op.name)


def torch_reduce_op(op: Any) -> Any:
    """torch's operation for one of ours; torch's own are returned as they are.

    Raises TypeError for anything else, and for ReduceOp.UNUSED.
    """
    if isinstance(op, ReduceOp) and op is not ReduceOp.UNUSED:
        return op.torch_op
    if isinstance(op, (torch.distributed.ReduceOp, type(torch.distributed.ReduceOp.SUM))):
        return op
    raise TypeError(
        f"op: expected one of deepspeed_comm.ReduceOp (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, "
        f"AVG) or of torch.distributed.ReduceOp, got {op!r}"
    )
