"""Direct calls: all-reduces, sends and receives that bypass torch.distributed's Python layers.

A call of torch.distributed passes its Python checks, its logging and torch's dispatcher before the
backend. The most frequent small calls go directly to the backend if the group uses dscomm.

direct_all_reduce(tensor, op, group, async_op), with positional arguments only, is the native
module's function once the module is loaded. It returns NotImplemented, and its caller then takes
a slower path with the same result, if
- it does not know the op or the group; find_backend() registers them,
- the tensor is not a plain CPU tensor,
- a mode (TorchDispatchMode, TorchFunctionMode), a torch.func transform or a tracer is active on
  this thread and must see the call.

direct_send(tensor, dst, group, tag) and direct_recv(tensor, src, group, tag) do the same for
blocking messages; remember_ranks() registers their groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from deepspeed_comm._compiler import outside_graphs
from deepspeed_comm._plugin import load_extension, loaded_extension
from deepspeed_comm.reduce_op import ReduceOp, foreign_ops, torch_reduce_op


def not_implemented(tensor: Any, op: Any, group: Any, async_op: Any) -> Any:
    """A direct call before the native module is loaded."""
    return NotImplemented


direct_all_reduce: Callable[[Any, Any, Any, Any], Any] = not_implemented
direct_send: Callable[[Any, Any, Any, Any], Any] = not_implemented
direct_recv: Callable[[Any, Any, Any, Any], Any] = not_implemented


class _DefaultGroup:
    """The default group, for a torch without _world._default_pg."""

    @property
    def _default_pg(self) -> Any:
        return dist.group.WORLD


# world._default_pg is the default group, or None. dist.group.WORLD would take 0.08 us more.
world: Any = getattr(dist.distributed_c10d, "_world", None)
if not hasattr(world, "_default_pg"):
    world = _DefaultGroup()


@outside_graphs
def find_backend(group: Any, tensor: Any) -> Any:
    """The dscomm backend for a call that bypasses torch's dispatcher, or None.

    None if the group uses another backend, if torch's debug mode wraps the backend, if the tensor
    is not a plain CPU tensor, or if a mode or a transform of torch must see the call.
    """
    native = loaded_extension()
    if native is None or not native.is_plain(tensor):
        return None
    return find_group_backend(group)


@outside_graphs
def find_group_backend(group: Any) -> Any:
    """The dscomm backend that the group (None: the default) uses for CPU tensors, or None."""
    if group is None:
        group = dist.group.WORLD
    native = loaded_extension()
    if native is None:  # no group uses dscomm yet
        return None
    if isinstance(group, native.DscommBackend):  # in torch 1.13 a group is its backend
        backend = group
    else:
        find = getattr(group, "_get_backend", None)
        if find is None:  # this rank is not in the group
            return None
        try:
            backend = find(torch.device("cpu"))
        except RuntimeError:  # the group has no backend for CPU tensors
            return None
        if not isinstance(backend, native.DscommBackend):
            return None
    _remember(native, group, backend)
    return backend


@outside_graphs
def remember_ranks(group: Any) -> None:
    """Registers the group for direct_send() and direct_recv(), if it uses dscomm and torch knows
    its ranks."""
    group = world._default_pg if group is None else group
    native = loaded_extension()
    if native is None or native.knows_ranks(group) or find_group_backend(group) is None:
        return
    ranks = _ranks_of_groups().get(group)
    if ranks:
        native.remember_ranks(group, ranks)


def _ranks_of_groups() -> dict[Any, dict[int, int]]:
    """torch's table of groups: for each group, the rank in the group by global rank."""
    of_world: Any = getattr(world, "pg_group_ranks", None)
    if of_world is None:  # torch 1.13
        of_world = getattr(dist.distributed_c10d, "_pg_group_ranks", {})
    return cast("dict[Any, dict[int, int]]", of_world)


def _remember(native: Any, group: Any, backend: Any) -> None:
    global direct_all_reduce, direct_send, direct_recv
    if direct_all_reduce is not_implemented:
        for op in ReduceOp:
            if op is not ReduceOp.UNUSED:
                native.remember_op(op, op.torch_op)
                native.remember_op(op.torch_op, op.torch_op)
        # A copy, because a thread of another rank may add an op.
        for op, torch_op in list(foreign_ops.values()):
            native.remember_op(op, torch_op)
        direct_all_reduce = native.direct_all_reduce
        direct_send, direct_recv = native.direct_send, native.direct_recv
    native.remember_group(group, backend)


def repeated_all_reduce(
    tensor: Any, op: Any, group: Any, backend: Any, match_id: str
) -> Callable[[Any, Any, Any, Any], Any]:
    """A function like direct_all_reduce() that repeats all_reduce_caching() with these arguments
    and a tensor like this one. It returns NotImplemented for any other call."""
    native = load_extension()
    repeat: Callable[[Any, Any, Any, Any], Any] = native.repeated_all_reduce(
        tensor, op, torch_reduce_op(op), group, backend, match_id
    )
    return repeat
