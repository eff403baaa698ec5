"""Reduction operators, and their conversion to torch's.

Mirrors deepspeed.comm.reduce_op: same names.
"""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed

from deepspeed_comm._plugin import loaded_extension


class ReduceOp(enum.Enum):
    """Operators of reductions. torch's ReduceOp is accepted wherever this is.

    Which dtypes an operator takes depends on the backend; AVG of integers is undefined.
    """

    torch_op: Any  # torch's operator; missing for UNUSED

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


# Members of other packages' enums: (the member, torch's operator) by the member's id. Holding the
# member keeps its id valid. Bounded, as a program may keep making enums.
MOST_FOREIGN_OPS = 64
foreign_ops: dict[int, tuple[Any, Any]] = {}


def torch_reduce_op(op: Any) -> Any:
    """Converts an operator to torch's.

    op: a member of this ReduceOp or of another enum called ReduceOp, such as deepspeed.comm's, or
    one of torch's operators.

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
    # The direct calls of the native module must be told of the operator. If the module is not
    # loaded yet, _direct.py later passes all of foreign_ops.
    native = loaded_extension()
    if native is not None:
        native.remember_op(op, torch_op)
