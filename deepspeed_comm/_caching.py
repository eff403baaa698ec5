"""The plans of all_reduce_caching(): what a program promises to repeat under each match_id."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_comm._direct import not_implemented
from deepspeed_comm.reduce_op import torch_reduce_op


class Plan:
    """The first call of a match_id, and `repeat`, which makes it again, or returns NotImplemented
    where it is another call, or where dscomm does not carry it."""

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
    """By match_id, in `known`. A match_id is free again once its group has been destroyed.

    ranks_of gives the ranks of a group, for messages. is_listed says whether torch keeps a list of
    the group's ranks. torch drops the list when the group is destroyed; if it never had one, a
    match_id is free once the program has dropped the group.
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
        """The plan of a call that repeats what its match_id stands for, or is its first; that of a
        first call is kept once the backend has accepted it, by keep().

        Raises ValueError, which says what differs, for another call than the first one, and
        TypeError for a match_id that is not a string of at least one letter.
        """
        plan = self.known.get(match_id) if isinstance(match_id, str) else None
        if plan is not None and plan.fits(tensor, op, group):
            return plan
        if not isinstance(match_id, str) or not match_id:
            raise TypeError(
                f"match_id: expected a string that names this call, the same on all ranks, "
                f"got {match_id!r}"
            )
        if plan is not None and not self._has_gone(plan):
            raise ValueError(
                f"match_id: {match_id!r} stands for another call: "
                f"{self._difference(plan, tensor, op, group)}. One match_id is for one group, "
                f"shape, dtype and op; give this call a match_id of its own"
            )
        return Plan(tensor, op, group, self._is_listed(group))

    def keep(self, match_id: str, plan: Plan) -> None:
        self.known[match_id] = plan

    def _difference(self, plan: Plan, tensor: Any, op: Any, group: Any) -> str:
        if plan.group() is not group:
            was, now = self._ranks(plan.group()), self._ranks(group)
            return f"the group of ranks {was} before, of ranks {now} now"
        if plan.shape != tensor.shape:
            return f"shape {tuple(plan.shape)} before, {tuple(tensor.shape)} now"
        if plan.dtype is not tensor.dtype:
            return f"dtype {plan.dtype} before, {tensor.dtype} now"
        return f"op {plan.op} before, {op} now"

    def _has_gone(self, plan: Plan) -> bool:
        """Whether its group has been destroyed; the program may hold on to it all the same."""
        group = plan.group()
        if group is None:
            return True
        if plan.is_listed:
            return not self._is_listed(group) or self._ranks(group) is None
        return False

    def _ranks(self, group: Any) -> list[int] | None:
        try:
            return None if group is None else list(self._ranks_of(group))
        except (ValueError, RuntimeError):  # as torch says that it does not know them
            return None
