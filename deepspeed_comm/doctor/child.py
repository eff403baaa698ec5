"""Child processes for checks that may crash or hang; each has a time limit.

A child is a program of this package. It prints its facts as lines of JSON, so that facts found
before a crash are known.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MARK = "doctor: "
TOO_LATE = "did not end in time"  # a value of Answer.ended
# The first lines of faulthandler's report: the signal, the thread, the place.
_LINES_OF_A_CRASH = 4
# The time for a killed child to end.
_KILLED_S = 5.0


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: asks the kernel to kill this process if the doctor dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tell(**facts: Any) -> None:
    """In the child: reports facts."""
    print(_MARK + json.dumps(facts), flush=True)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A child's facts, and how it ended; `ended` is "" after success."""

    facts: dict[str, Any]
    ended: str
    errors: str  # the last line of its standard error

    @property
    def reason(self) -> str:
        return ": ".join(filter(None, (self.ended, self.errors)))


class Child:
    """A running child. As a context manager, it kills the child when the block ends."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with contextlib.ExitStack() as files:
            # Files, not pipes, because a grandchild may keep a pipe open.
            self._output: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            self._errors: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                command,
                env=dict(environment) if environment is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                # A process group, so that grandchildren are killed, too.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._files = files.pop_all()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._files.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            # The child has not been waited for, so its pid is not reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A child that waits for a device or a dead file system cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_S)

    def answer(self, limit_s: float) -> Answer:
        """Waits for the child's end; kills it after limit_s seconds."""
        ended = ""
        try:
            status = self._process.wait(max(limit_s, 0))
            if status < 0:
                ended = f"was ended by {_signal_name(-status)}"
            elif status > 0:
                ended = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            self._end()
            ended = TOO_LATE
            if self._process.poll() is None:
                ended += f" and cannot be killed (pid {self._process.pid}): it waits in the kernel"
        facts: dict[str, Any] = {}
        for line in _text_of(self._output).splitlines():
            if line.startswith(_MARK):
                # A crash may leave half a line.
                with contextlib.suppress(ValueError):
                    facts.update(json.loads(line[len(_MARK) :]))
        return Answer(facts, ended, _last_words(_text_of(self._errors)))


def run(command: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Runs a child to its end, or for limit_s seconds."""
    with Child(command, environment) as child:
        return child.answer(limit_s)


def program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this folder as a child."""
    return [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.{module}", *arguments]


def file(name: str, *arguments: str) -> list[str]:
    """The command that runs a file of this folder as a child, without importing this package."""
    run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    return [sys.executable, "-X", "faulthandler", "-c", run, path, *arguments]


def program_environment() -> dict[str, str]:
    """This environment, with this package in the child's PYTHONPATH."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), _PACKAGE_PARENT]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONIOENCODING": "utf-8",
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_words(text: str, most: int = 600) -> str:
    """One line of an output's end: the last line of a traceback, or the first lines of a crash."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    crash = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if crash:
        lines = lines[crash[0] : crash[0] + _LINES_OF_A_CRASH]
    elif any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = lines[-1:]
    return " | ".join(lines)[-most:]
