"""The launcher's ranks, and the arguments of logged calls.

Mirrors deepspeed.comm.utils: same names.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_comm import _launcher_variables
from deepspeed_comm._launcher_variables import OPEN_MPI_RANKS

# The parameters that may hold a call's data; the first one present counts.
_DATA_PARAMETERS = (
    "tensor",
    "tensors",
    "input_list",
    "input_tensor_list",
    "p2p_op_list",
)


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK, else OMPI_COMM_WORLD_LOCAL_RANK, else 0."""
    return _launcher_variables.first_set(os.environ, ("LOCAL_RANK", OPEN_MPI_RANKS[2]), 0)


def get_world_rank_from_launcher() -> int:
    """RANK, else OMPI_COMM_WORLD_RANK, else 0."""
    return _launcher_variables.first_set(os.environ, ("RANK", OPEN_MPI_RANKS[0]), 0)


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE, else OMPI_COMM_WORLD_SIZE, else 1."""
    return _launcher_variables.first_set(os.environ, ("WORLD_SIZE", OPEN_MPI_RANKS[1]), 1)


def get_caller_func(frame: int = 3) -> str:
    """The name of the function `frame` stack frames up."""
    return sys._getframe(frame).f_code.co_name


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The default values of the parameters that have one, by name."""
    parameters = inspect.signature(func).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """The position of a collective's data among its parameters, or -1."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _DATA_PARAMETERS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """A collective's data passed by keyword, or None."""
    known = {**get_default_args(func), **kwargs}
    return next((known[name] for name in _DATA_PARAMETERS if name in known), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The bytes of a call's data, summed over a list of tensors; 0 without data (a barrier)."""
    position = get_tensor_position(func)
    return _bytes_of(
        args[position] if 0 <= position < len(args) else get_tensor_kwarg(func, kwargs)
    )


def get_msg_size(given: Mapping[str, Any]) -> int:
    """get_msg_size_from_args() of all arguments by name, without inspecting a signature."""
    return _bytes_of(next((given[name] for name in _DATA_PARAMETERS if name in given), None))


def get_dtype(given: Mapping[str, Any]) -> str:
    """The dtypes of a call's data, such as "float32" or "float32, int64"; "" without data."""
    data = next((given[name] for name in _DATA_PARAMETERS if name in given), None)
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in _tensors_of(data))
    return ", ".join(dict.fromkeys(names))


def _bytes_of(data: Any) -> int:
    return sum(tensor.element_size() * tensor.nelement() for tensor in _tensors_of(data))


def _tensors_of(data: Any) -> list[Any]:
    if data is None:
        return []
    parts = data if isinstance(data, (list, tuple)) else [data]
    return [getattr(part, "tensor", part) for part in parts]  # a P2POp has a tensor


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """The name of a call in the log; with `debug`, it includes the caller's name."""
    name = str(func_args["log_name"])
    caller = func_args.get("debug") or get_caller_func()
    return f"{name} | [Caller Func: {caller}]" if debug else name
