"""Keeps torch.compile from tracing functions, without importing Dynamo, whose import takes longer
than all of this package's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _never() -> bool:
    return False


# Whether torch.compile is tracing; never with torch 1.13. is_dynamo() only knows Dynamo, the part
# that reads Python, and takes a third of the time of is_compiling().
_compiler: Any = getattr(torch, "compiler", None)
is_compiling: Callable[[], bool] = getattr(_compiler, "is_compiling", _never)
is_dynamo: Callable[[], bool] = getattr(_compiler, "is_dynamo_compiling", is_compiling)

# skip_code() is in torch's native code, so it needs no Dynamo. It is undocumented.
_skip_code: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "skip_code", None
)


def outside_graphs(function: _Function) -> _Function:
    """Makes torch.compile end its graph before `function`, and call it without tracing.

    For functions that use methods of process groups. Dynamo does not know these methods: it would
    raise InternalTorchDynamoError instead of ending the graph. Does the same as
    torch.compiler.disable(), but does not import Dynamo.
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

    # disable() sets the same mark, which ends the graph before the call. The frame of `call` itself
    # is skipped, too: tracing sys.modules takes Dynamo a third of a second.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    if _skip_code is not None:
        _skip_code(getattr(call, "__code__"))  # noqa: B009 - mypy assumes a class without it
    return call  # type: ignore[return-value]
