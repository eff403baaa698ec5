"""Programs started as a user starts them: by torchrun, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT


def torchrun_command(*arguments: str, ranks: int) -> list[str]:
    """`torchrun --standalone --nproc-per-node=RANKS arguments...`"""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
        *arguments,
    ]  # fmt: skip


def torchrun(
    *arguments: str, ranks: int = 2, folder: Path = ROOT, timeout_s: int = 300
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, away from a terminal."""
    return subprocess.run(
        torchrun_command(*arguments, ranks=ranks),
        cwd=folder,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def torchrun_on_a_terminal(*arguments: str, ranks: int = 2) -> tuple[int, str]:
    """Exit status, and what a terminal of its own was sent."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        torchrun_command(*arguments, ranks=ranks),
        cwd=ROOT,
        env=dict(os.environ, OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="100"),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    try:
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while chunk := os.read(ours, 65536):
                output += chunk
        return process.wait(timeout=60), output.decode(errors="replace")
    finally:
        process.kill()
        os.close(ours)
