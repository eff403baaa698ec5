"""Detects that a torch _coalescing_manager() has been left by an exception.

When the body of its `with` raises, torch's manager neither ends the backend's coalescing nor drops
the calls that it collected. Later calls of the group would be collected, too, and never run. So the
backend asks here whether the manager that started coalescing is still active.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType, GeneratorType
from typing import Any


class Manager:
    """A manager whose `with` block has been entered."""

    def __init__(self, generator: GeneratorType[Any, Any, Any], frame: FrameType) -> None:
        self._generator = weakref.ref(generator)
        calls = frame.f_locals.get("op_list")
        if calls is not None:
            weakref.finalize(generator, _forget, calls).atexit = False

    def has_ended(self) -> bool:
        generator = self._generator()
        return generator is None or inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED


def calling_manager() -> Manager | None:
    """The manager that calls the backend now, or None if the caller is not a manager."""
    # contextlib runs the generator in __enter__ of its context manager.
    frame = sys._getframe(1)
    entering = frame.f_back
    manager = entering.f_locals.get("self") if entering is not None else None
    generator = getattr(manager, "gen", None)
    if not isinstance(generator, GeneratorType) or generator.gi_frame is not frame:
        return None
    return Manager(generator, frame)


def _forget(calls: list[Any]) -> None:
    """Removes a manager's collected calls from torch's state."""
    import torch.distributed as dist

    state = dist.distributed_c10d._world.pg_coalesce_state
    for group in [group for group, known in state.items() if known is calls]:
        del state[group]
