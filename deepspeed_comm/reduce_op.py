"""Reduction operations: deepspeed.comm's ReduceOp, and what torch calls them."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed

from deepspeed_comm._plugin import loaded_extension


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


# Operations of other packages' enums: by the id of the member, the member, which keeps the id its
# own, and torch's operation. Bounded, as a program may make enums without end.
MOST_FOREIGN_OPS = 64
foreign_ops: dict[int, tuple[Any, Any]] = {}


def torch_reduce_op(op: Any) -> Any:
    """torch's operation for one of ours, or for the member of the same name of another enum called
    ReduceOp, as deepspeed.comm's is; torch's own are returned as they are.

    Raises TypeError for anything else, and for UNUSED.
    """
    if isinstance(op, ReduceOp) and op is not ReduceOp.UNUSED:
        return op.torch_op
    if isinstance(op, (torch.distributed.ReduceOp, type(torch.distributed.ReduceOp.SUM))):
        return op
    known = foreign_ops.get(id(op))
    if known is not None:
        return known[1]
    if isinstance(op, enum.Enum) and type(op).__name__ == "ReduceOp":
        own = ReduceOp.__members__.get(op.name, ReduceOp.UNUSED)
        if own is not ReduceOp.UNUSED:
            _remember_foreign(op, own.torch_op)
            return own.torch_op
    raise TypeError(
        f"op: expected one of deepspeed_comm.ReduceOp (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, "
        f"AVG), deepspeed.comm.ReduceOp or torch.distributed.ReduceOp, got {op!r}"
    )


def _remember_foreign(op: Any, torch_op: Any) -> None:
    if len(foreign_ops) >= MOST_FOREIGN_OPS:
        return
    foreign_ops[id(op)] = (op, torch_op)
    # Before the extension is loaded there is no direct call to tell; see _direct.py.
    native = loaded_extension()
    if native is not None:
        native.remember_op(op, torch_op)
