"""Small helpers: what the launcher says of this rank, and how much data a call moves."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_comm import _launcher

# The parameters that hold the data of a call, in the order in which they are looked for.
_DATA_PARAMETERS = (
    "tensor",
    "tensors",
    "input_list",
    "input_tensor_list",
    "p2p_op_list",
)


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK, else OMPI_COMM_WORLD_LOCAL_RANK, else 0."""
    return _launcher.local_rank(os.environ)


def get_world_rank_from_launcher() -> int:
    """RANK, else OMPI_COMM_WORLD_RANK, else 0."""
    return _launcher.world_rank(os.environ)


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE, else OMPI_COMM_WORLD_SIZE, else 1."""
    return _launcher.world_size(os.environ)


def get_caller_func(frame: int = 3) -> str:
    """The name of the function so many frames up."""
    return sys._getframe(frame).f_code.co_name


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that have defaults, with these."""
    parameters = inspect.signature(func).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """Where in the signature the data of a collective is, or -1."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _DATA_PARAMETERS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """The data of a collective, where it is given by name; None where it is not."""
    known = {**get_default_args(func), **kwargs}
    return next((known[name] for name in _DATA_PARAMETERS if name in known), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes of the data that a call of a collective was given; of a list, those of all tensors.

    0 where there is no data, as in a barrier.
    """
    position = get_tensor_position(func)
    return _bytes_of(
        args[position] if 0 <= position < len(args) else get_tensor_kwarg(func, kwargs)
    )


def get_msg_size(given: Mapping[str, Any]) -> int:
    """The same of all arguments by name, with the defaults. Looks at no signature: that is slow."""
    return _bytes_of(next((given[name] for name in _DATA_PARAMETERS if name in given), None))


def get_dtype(given: Mapping[str, Any]) -> str:
    """The dtype of the same data, as in "float32"; of several, with commas; "" of none."""
    data = next((given[name] for name in _DATA_PARAMETERS if name in given), None)
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in _tensors_of(data))
    return ", ".join(dict.fromkeys(names))


def _bytes_of(data: Any) -> int:
    return sum(tensor.element_size() * tensor.nelement() for tensor in _tensors_of(data))


def _tensors_of(data: Any) -> list[Any]:
    if data is None:
        return []
    parts = data if isinstance(data, (list, tuple)) else [data]
    return [getattr(part, "tensor", part) for part in parts]  # a P2POp holds a tensor


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """The name that a call is logged under; with `debug` it says who called."""
    name = str(func_args["log_name"])
    caller = func_args.get("debug") or get_caller_func()
    return f"{name} | [Caller Func: {caller}]" if debug else name
