"""The test programs that CMake builds for MPI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def built_program(name: str) -> Path:
    wish = os.environ.get("MPI_TEST_BUILD")
    folders = [Path(wish)] if wish else sorted((ROOT / "build").glob("*"))
    built = [folder / name for folder in folders if (folder / name).exists()]
    if not built:
        pytest.fail(f"{name} is not built: cmake --preset release; cmake --build ...")
    return max(built, key=lambda path: path.stat().st_mtime)


def run_alone(name: str, tests: str = "*") -> str:
    """Runs tests of a built program without MPI and returns its output. They must pass."""
    result = subprocess.run(
        [built_program(name), f"--gtest_filter={tests}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120.0,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
