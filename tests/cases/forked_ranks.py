"""Ranks forked from a process that has imported torch: see rank_starter.py."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Well above what a loaded machine needs.
_STARTS_WITHIN_S = 120.0
_ENDS_WITHIN_S = 60.0


class ForkedRank:
    """A rank that runs or has ended; has what tests/cluster uses of a HostProcess."""

    def __init__(self, output: Path) -> None:
        self.output_path = output

    @functools.cached_property
    def pid(self) -> int:
        """As this process sees it, also of a rank in a host."""
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while (pid := self._said("pid")) is None:
            if self.exit_code() is not None or time.monotonic() > deadline:
                raise AssertionError(f"a rank does not start\n{self.output()}")
            time.sleep(0.002)
        return pid

    def exit_code(self) -> int | None:
        """None while it runs, -9 after SIGKILL."""
        return self._said("code")

    def output(self) -> str:
        path = self.output_path
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """Ends it, if it runs, with the processes of its group."""
        if self.exit_code() is not None:
            return
        for kill in (os.killpg, os.kill):  # for a moment it has no group of its own
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while self.exit_code() is None:
            assert time.monotonic() < deadline, f"process {self.pid} does not end"
            time.sleep(0.002)

    def _said(self, what: str) -> int | None:
        path = Path(f"{self.output_path}.{what}")
        return int(path.read_text()) if path.exists() else None


class RankStarter:
    """A process that has imported torch. It ends with close(), or with this process."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_starter.py"))],
            stdin=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def fork(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        output: Path,
        folder: str = "/",
        host_pid: int | None = None,
    ) -> ForkedRank:
        """Runs a Python program. `host_pid`: process 1 of a host to run it in, instead of this."""
        for earlier in (output, Path(f"{output}.pid"), Path(f"{output}.code")):
            earlier.unlink(missing_ok=True)
        order = {"argv": [*argv], "env": env, "folder": folder, "output": str(output)}
        order["host"] = host_pid
        assert self._process.stdin is not None
        assert self._process.poll() is None, "the rank starter has ended"
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return ForkedRank(output)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
