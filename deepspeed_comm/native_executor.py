"""The native executor: dscomm's own calls, past the layers of torch.distributed.

A call of torch.distributed goes through its Python checks, its logging and torch's dispatcher
before it gets to the backend. What programs call most and shortest goes there at once, where the
group's backend is dscomm; find_backend() says so.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

# By the id of a group, which is checked: the group and its backend. Torch keeps the groups; an
# entry goes with its group.
_backends: dict[int, tuple[weakref.ref[Any], Any]] = {}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def find_backend(group: Any, tensor: Any) -> Any:
    """The dscomm backend that the group uses for the tensor; None where it uses another one, where
    something (torch's debug mode) stands before it, or where the tensor is none of plain memory."""
    if type(tensor) not in _PLAIN_TENSORS or not tensor.is_cpu:
        return None
    if group is None:
        group = dist.group.WORLD
    known = _backends.get(id(group))
    if known is not None and known[0]() is group:
        return known[1]
    return _look_up(group)


def _look_up(group: Any) -> Any:
    native = sys.modules.get("deepspeed_comm._C")
    if native is None:  # no group of dscomm has been made
        return None
    if isinstance(group, native.DscommBackend):  # torch 1.13's groups are their backends
        return group
    find = getattr(group, "_get_backend", None)
    if find is None:  # this rank is not in the group
        return None
    try:
        backend = find(torch.device("cpu"))
    except RuntimeError:  # the group has none for CPU tensors
        return None
    if not isinstance(backend, native.DscommBackend):
        return None
    key = id(group)
    _backends[key] = (weakref.ref(group, lambda _: _backends.pop(key, None)), backend)
    return backend
