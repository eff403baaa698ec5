"""The runner itself: tests that end badly are noticed, cost only themselves, and leave nothing."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the suite is loaded from torch 2.13 only"
)


def test_every_kind_of_failure_is_distinguished() -> None:
    command = [sys.executable, "-m", "tests.torch_suite.misbehave"]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True
    )
    outcomes = json.loads(finished.stdout.splitlines()[-1])

    expected = {
        "test_passes": ("passed", r"^$"),
        "test_skips": ("skipped", r"^for a reason$"),
        "test_one_rank_raises": ("failed", r"ValueError: rank 1 is unhappy"),
        "test_one_rank_is_killed": ("failed", r"rank 1: failed: died, killed by SIGKILL"),
        "test_one_rank_leaves": ("failed", r"rank 1: failed: left with exit status 3"),
        "test_one_rank_dies_after_its_report": (
            "failed",
            r"rank 0: passed\nrank 1: failed: died after it had passed, killed by SIGABRT",
        ),
        # The stack shows where.
        "test_hangs": ("failed", r"rank 1: failed: not finished after 4 s[^|]*in test_hangs"),
        "test_hangs_as_one_rank_skips": ("failed", r"rank 1: skipped: for a reason"),
    }
    assert outcomes.keys() == expected.keys()
    for name, (outcome, detail) in expected.items():
        assert outcomes[name]["outcome"] == outcome, f"{name}: {outcomes[name]}"
        assert re.search(detail, outcomes[name]["detail"]), f"{name}: {outcomes[name]}"

    children = re.findall(r"child (\d+)", outcomes["test_hangs"]["detail"])
    assert len(children) == 2
    for pid in children:
        assert not _is_sleeping(int(pid)), f"process {pid}, started by a rank that hung, lives on"


def _is_sleeping(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "sleep" in status and "Z (zombie)" not in status
