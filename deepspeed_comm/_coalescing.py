"""Whose calls the backend coalesces: the _coalescing_manager() of torch that told it to start.

torch's manager does not tell the backend to stop when the body of its `with` raises, nor does it
forget the calls that it has collected, so that later calls of the group would be collected, too,
and never made. The backend asks here whether the manager that started it is still at work.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType, GeneratorType
from typing import Any


class Manager:
    """A manager in the midst of its `with`."""

    def __init__(self, generator: GeneratorType[Any, Any, Any], frame: FrameType) -> None:
        self._generator = weakref.ref(generator)
        calls = frame.f_locals.get("op_list")
        if calls is not None:
            weakref.finalize(generator, _forget, calls).atexit = False

    def has_ended(self) -> bool:
        generator = self._generator()
        return generator is None or inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED


def calling_manager() -> Manager | None:
    """The manager whose body begins once the caller returns; None if the caller is none."""
    # The generator runs in __enter__ of the context manager that contextlib made of it.
    frame = sys._getframe(1)
    entering = frame.f_back
    manager = entering.f_locals.get("self") if entering is not None else None
    generator = getattr(manager, "gen", None)
    if not isinstance(generator, GeneratorType) or generator.gi_frame is not frame:
        return None
    return Manager(generator, frame)


def _forget(calls: list[Any]) -> None:
    """Has torch forget the calls that a manager has collected and not made."""
    import torch.distributed as dist

    state = dist.distributed_c10d._world.pg_coalesce_state
    for group in [group for group, known in state.items() if known is calls]:
        del state[group]
