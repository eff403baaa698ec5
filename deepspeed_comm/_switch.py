"""Compiles a wrapper that calls one of two functions, with the parameters of the first.

A wrapper with *args and **kwargs would add 92 ns to a call with positional arguments and 194 ns to
one with two keywords; a compiled one adds 43 ns to either (benchmarks/log_cost.py). For comparison,
inference_all_reduce() takes 560 ns (benchmarks/call_cost.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The names that the source below uses, so a parameter must not have them.
_RESERVED = {"_func", "_other", "_defaults"}


def switch(
    func: _Function, other: Callable[..., Any], condition: str, names: dict[str, Any]
) -> _Function:
    """A function with func's name and parameters that calls `other` while `condition` is true.

    condition: an expression, evaluated in `names` (the globals of a module) at each call. `other`
    gets all of func's parameters by position, or only the caller's arguments if func has parameters
    that are not positional.
    """
    parameters = inspect.signature(func).parameters
    taken = given = "*args, **kwargs"
    used = _RESERVED | set(compile(condition, "<condition>", "eval").co_names)
    if all(p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in used for p in parameters.values()):
        given = ", ".join(parameters)
        taken = ", ".join(
            p.name if p.default is p.empty else f"{p.name}=_defaults[{p.name!r}]"
            for p in parameters.values()
        )
    source = f"""
def make(_func, _other, _defaults):
    def wrapper({taken}):
        if {condition}:
            return _other({given})
        return _func({given})
    return wrapper
"""
    made: dict[str, Any] = {}
    exec(compile(source, f"<switch of {func.__name__}>", "exec"), names, made)
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    wrapper = made["make"](func, other, defaults)
    return functools.wraps(func)(wrapper)  # type: ignore[return-value]
