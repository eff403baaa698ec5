"""The plans of all_reduce_caching(): the call that each match_id stands for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_comm._direct import not_implemented
from deepspeed_comm.reduce_op import torch_reduce_op


class Plan:
    """The first call with a match_id.

    `repeat` makes the call again. It returns NotImplemented if the arguments differ, or if the
    group does not use dscomm.
    """

    def __init__(self, tensor: Any, op: Any, group: Any, is_listed: bool) -> None:
        self.repeat: Callable[[Any, Any, Any, Any], Any] = not_implemented
        self.group = weakref.ref(group)
        self.is_listed = is_listed
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.op = op

    def fits(self, tensor: Any, op: Any, group: Any) -> bool:
        return (
            self.group() is group
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (op is self.op or torch_reduce_op(op) == torch_reduce_op(self.op))
        )


class Plans:
    """All plans by match_id, in `known`. A match_id can be reused once its group is destroyed.

    ranks_of: returns the ranks of a group, for error messages. is_listed: whether torch has a list
    of the group's ranks, which it drops when the group is destroyed. Without such a list, a
    match_id can be reused once the program has released the group.
    """

    def __init__(
        self,
        ranks_of: Callable[[Any], Sequence[int]],
        is_listed: Callable[[Any], bool] = lambda group: True,
    ) -> None:
        self.known: dict[Any, Plan] = {}
        self._ranks_of = ranks_of
        self._is_listed = is_listed

    def find(self, match_id: str, tensor: Any, op: Any, group: Any) -> Plan:
        """The plan of this match_id; a new one for its first call.

        keep() stores a new plan, after the backend has accepted the call.

        Raises ValueError with the difference if the call differs from the first one. Raises
        TypeError if match_id is not a string, or is empty.
        """
        plan = self.known.get(match_id) if isinstance(match_id, str) else None
        if plan is not None and plan.fits(tensor, op, group):
            return plan
        if not isinstance(match_id, str) or not match_id:
            raise TypeError(
                f"match_id: got {match_id!r}, expected a non-empty string, the same on all ranks"
            )
        if plan is not None and not self._has_gone(plan):
            raise ValueError(
                f"match_id: {match_id!r} stands for another call: "
                f"{self._difference(plan, tensor, op, group)}. One match_id is for one group, "
                f"shape, dtype and op; give this call another match_id"
            )
        return Plan(tensor, op, group, self._is_listed(group))

    def keep(self, match_id: str, plan: Plan) -> None:
        self.known[match_id] = plan

    def _difference(self, plan: Plan, tensor: Any, op: Any, group: Any) -> str:
        if plan.group() is not group:
            was, now = self._ranks(plan.group()), self._ranks(group)
            return f"another group, with ranks {was} before, {now} now"
        if plan.shape != tensor.shape:
            return f"shape {tuple(plan.shape)} before, {tuple(tensor.shape)} now"
        if plan.dtype is not tensor.dtype:
            return f"dtype {plan.dtype} before, {tensor.dtype} now"
        return f"op {plan.op} before, {op} now"

    def _has_gone(self, plan: Plan) -> bool:
        """Whether the plan's group has been destroyed; the program may still hold the object."""
        group = plan.group()
        if group is None:
            return True
        if plan.is_listed:
            return not self._is_listed(group) or self._ranks(group) is None
        return False

    def _ranks(self, group: Any) -> list[int] | None:
        try:
            return None if group is None else list(self._ranks_of(group))
        except (ValueError, RuntimeError):  # torch does not know the group
            return None
