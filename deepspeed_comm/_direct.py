"""The native executor: dscomm's own calls, past the layers of torch.distributed.

A call of torch.distributed goes through its Python checks, its logging and torch's dispatcher
before it gets to the backend. What programs call most and shortest goes there at once, where the
group's backend is dscomm.

direct_all_reduce(tensor, op, group, async_op), by position, is the native module's of that name
once that is loaded: it makes the call where it knows the op and the group, which find_backend()
tells it of, and else returns NotImplemented. So it does if the tensor is more than CPU memory, and
if a mode (TorchDispatchMode, TorchFunctionMode), a transform of torch.func or a tracer that is
active on this thread has to see the call: it then goes through torch's dispatcher, with the same
result.

direct_send(tensor, dst, group, tag) and direct_recv(tensor, src, group, tag) are the same for
blocking messages, in groups that remember_ranks() tells the native module of.
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
    """What is not known yet."""
    return NotImplemented


direct_all_reduce: Callable[[Any, Any, Any, Any], Any] = not_implemented
direct_send: Callable[[Any, Any, Any, Any], Any] = not_implemented
direct_recv: Callable[[Any, Any, Any, Any], Any] = not_implemented


class _DefaultGroup:
    """The default group where torch does not keep it as below."""

    @property
    def _default_pg(self) -> Any:
        return dist.group.WORLD


# world._default_pg is the default group, or None; asking for dist.group.WORLD takes 0.08 us more.
world: Any = getattr(dist.distributed_c10d, "_world", None)
if not hasattr(world, "_default_pg"):
    world = _DefaultGroup()


@outside_graphs
def find_backend(group: Any, tensor: Any) -> Any:
    """The dscomm backend that a call with the tensor may go to past torch's dispatcher.

    None if the group uses another backend, if something (torch's debug mode) stands before it, if
    the tensor is more than CPU memory, or if a mode or a transform of torch is to see the call.
    """
    native = loaded_extension()
    if native is None or not native.is_plain(tensor):
        return None
    return find_group_backend(group)


@outside_graphs
def find_group_backend(group: Any) -> Any:
    """The dscomm backend that the group uses for CPU tensors, None where it uses another one."""
    if group is None:
        group = dist.group.WORLD
    native = loaded_extension()
    if native is None:  # no group of dscomm has been made
        return None
    if isinstance(group, native.DscommBackend):  # torch 1.13's groups are their backends
        backend = group
    else:
        find = getattr(group, "_get_backend", None)
        if find is None:  # this rank is not in the group
            return None
        try:
            backend = find(torch.device("cpu"))
        except RuntimeError:  # the group has none for CPU tensors
            return None
        if not isinstance(backend, native.DscommBackend):
            return None
    _remember(native, group, backend)
    return backend


@outside_graphs
def remember_ranks(group: Any) -> None:
    """Lets direct_send() and direct_recv() make the group's later calls, where it is dscomm's and
    torch knows its ranks."""
    group = world._default_pg if group is None else group
    native = loaded_extension()
    if native is None or native.knows_ranks(group) or find_group_backend(group) is None:
        return
    ranks = _ranks_of_groups().get(group)
    if ranks:
        native.remember_ranks(group, ranks)


def _ranks_of_groups() -> dict[Any, dict[int, int]]:
    """torch's table: of each group, the rank in it by global rank."""
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
        # A copy: a thread of another rank may add to it.
        for op, torch_op in list(foreign_ops.values()):
            native.remember_op(op, torch_op)
        direct_all_reduce = native.direct_all_reduce
        direct_send, direct_recv = native.direct_send, native.direct_recv
    native.remember_group(group, backend)


def repeated_all_reduce(
    tensor: Any, op: Any, group: Any, backend: Any, match_id: str
) -> Callable[[Any, Any, Any, Any], Any]:
    """all_reduce_caching() of these, of another tensor like this one: a function as
    direct_all_reduce(), which returns NotImplemented for any other call."""
    native = load_extension()
    repeat: Callable[[Any, Any, Any, Any], Any] = native.repeated_all_reduce(
        tensor, op, torch_reduce_op(op), group, backend, match_id
    )
    return repeat
