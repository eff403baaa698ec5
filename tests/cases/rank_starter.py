"""Forks ranks from one process that has imported torch, which takes seconds.

Each input line is a rank to start, as JSON: the program with its arguments, its environment, its
folder, a path for its output, and the pid of process 1 of its host, or null for this one. The
rank's pid and finally its exit code go to files beside the output. Otherwise a rank is an ordinary
process, and ends as a program does. The starter ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401 - ranks find it imported.

_NAMESPACES = ("mnt", "uts", "ipc", "net", "pid")
_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Enters all namespaces of a process; the PID namespace applies to the next child."""
    # Opens all before it enters the first, which may hide /proc.
    descriptors = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for descriptor in descriptors:
        if _libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def tell(path: str, value: int) -> None:
    """Writes a file that appears complete or not at all."""
    Path(f"{path}.new").write_text(str(value))
    Path(f"{path}.new").rename(path)


def attend(order: dict[str, Any]) -> bool:
    """Runs in a fork. Returns True in the rank itself; the parent, outside of its host, waits for
    it."""
    output = order["output"]
    try:
        if order["host"] is not None:
            enter(order["host"])
        if (rank := os.fork()) == 0:
            return True
        tell(f"{output}.pid", rank)
        _, status = os.waitpid(rank, 0)
        tell(f"{output}.code", os.waitstatus_to_exitcode(status))
    except BaseException:
        Path(output).write_text(traceback.format_exc())
        tell(f"{output}.code", 70)
    os._exit(0)


def next_rank() -> dict[str, Any]:
    """Returns in a process that becomes a rank; ends this process when there is no more input."""
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        order = json.loads(line)
        if os.fork() == 0 and attend(order):
            return order
    raise SystemExit


def main() -> None:
    order = next_rank()
    os.setsid()
    os.chdir(order["folder"])
    source = os.open(os.devnull, os.O_RDONLY)
    target = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((source, 0), (target, 1), (target, 2)):
        os.dup2(old, new)
    os.environ.clear()
    os.environ.update(order["env"])
    program, *_ = sys.argv = order["argv"]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
