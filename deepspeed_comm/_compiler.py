"""What torch.compile is told, without importing it: that takes longer than all of this package."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _never() -> bool:
    return False


# Whether torch.compile traces this; torch 1.13 has none. The second is of Dynamo alone, which reads
# Python, and takes a third of the time.
_compiler: Any = getattr(torch, "compiler", None)
is_compiling: Callable[[], bool] = getattr(_compiler, "is_compiling", _never)
is_dynamo: Callable[[], bool] = getattr(_compiler, "is_dynamo_compiling", is_compiling)

# Of torch's native code, which is there without Dynamo; not of its documented API.
_skip_code: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "skip_code", None
)


def outside_graphs(function: _Function) -> _Function:
    """function, which torch.compile calls and does not trace: a graph ends before it.

    For what asks a process group for more than torch has registered with Dynamo, which then raises
    InternalTorchDynamoError instead of ending the graph. torch.compiler.disable() is the same, and
    imports Dynamo.
    """
    if _compiler is None:
        return function
    apart: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal apart
        if apart is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            apart = _compiler.disable(function)
        return apart(*args, **kwargs)

    # What disable() leaves there: a graph ends before the call. Nor shall the frame of the call
    # become a graph: tracing sys.modules alone takes Dynamo a third of a second.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    if _skip_code is not None:
        _skip_code(getattr(call, "__code__"))  # noqa: B009 - mypy takes it for another class
    return call  # type: ignore[return-value]
