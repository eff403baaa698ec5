"""Processes for what might crash or hang: each tells facts as it goes, and is ended at its limit.

A child is a program of this package. It writes its facts to standard output, a line of JSON each,
so that what it found before it crashed is known.
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
import time
from collections.abc import Mapping
from typing import IO, Any

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MARK = "doctor: "
TOO_LATE = "did not end in time"  # of Answer.ended
# Of faulthandler: the signal, the thread, where it was.
_LINES_OF_A_CRASH = 4
# For a child to be gone once it has been killed.
_KILLED_S = 5.0


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: should the doctor be killed, so is this."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tell(**facts: Any) -> None:
    """Called by the child."""
    print(_MARK + json.dumps(facts), flush=True)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a child said, and how it ended; `ended` is empty where it ended well."""

    facts: dict[str, Any]
    ended: str
    errors: str  # the end of its standard error

    @property
    def reason(self) -> str:
        return ": ".join(filter(None, (self.ended, self.errors)))


class Child:
    """A child under way. A context manager, at whose end it is ended."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Files, not pipes: what the child has started may hold a pipe open for ever.
        self._output: IO[bytes] = tempfile.TemporaryFile()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment) if environment is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                # A process group of its own, so that what it starts can be ended with it.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except BaseException:
            self._output.close()
            self._errors.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._output.close()
        self._errors.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            # It has not been waited for, so the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that waits for a device, or for a file system that is gone, does not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_S)

    def answer(self, limit_s: float) -> Answer:
        """Waits for its end, so many seconds at most; then it is ended."""
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
                ended += (
                    f", nor when it was killed (pid {self._process.pid}): it waits in the kernel"
                )
        facts: dict[str, Any] = {}
        for line in _text_of(self._output).splitlines():
            if line.startswith(_MARK):
                # One that crashed may have left half a line.
                with contextlib.suppress(ValueError):
                    facts.update(json.loads(line[len(_MARK) :]))
        return Answer(facts, ended, _last_words(_text_of(self._errors)))


def run(command: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    with Child(command, environment) as child:
        return child.answer(limit_s)


def program(module: str, *arguments: str) -> list[str]:
    """The command of a child that is a module of this folder."""
    return [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.{module}", *arguments]


def file(name: str, *arguments: str) -> list[str]:
    """The command of a child that is a file of this folder, and does not import this package."""
    run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    return [sys.executable, "-X", "faulthandler", "-c", run, path, *arguments]


def program_environment() -> dict[str, str]:
    """The environment, in which the child finds the package that asks."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), _PACKAGE_PARENT]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONIOENCODING": "utf-8",
    }


class Limit:
    """So many seconds from now on, shared by several waits."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_words(text: str, most: int = 600) -> str:
    """The end of an output as one line: the last line of a traceback, the first ones of a crash."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    crash = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if crash:
        lines = lines[crash[0] : crash[0] + _LINES_OF_A_CRASH]
    elif any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = lines[-1:]
    return " | ".join(lines)[-most:]
