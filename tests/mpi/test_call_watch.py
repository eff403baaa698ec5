"""Calls of MPI that do not return: each test of call_watch_tests in a process of its own.

MPI has given up in a process after the first call that was left. Needs call_watch_tests, which the
CMake presets build.
"""

from __future__ import annotations

import subprocess

import pytest
from test_mpi_team import built_program


@pytest.mark.parametrize(
    "test",
    [
        "ACallThatSleepsIsLeft",
        "ACallThatGoesRoundInCirclesIsLeft",
        "ACallThatGoesRoundInTheCLibraryIsLeftOutsideOfIt",
        "ACallOfAnyThreadIsLeft",
        "CallsThatReturnAndCallsThatMayBlockAreNotLeft",
        "BeforeADeathNoCallIsLeft",
    ],
)
def test_call_watch(test: str) -> None:
    program = built_program("call_watch_tests")
    result = subprocess.run(
        [program, f"--gtest_filter=CallWatch.{test}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120.0,
    )
    assert result.returncode == 0, result.stdout
    assert "[  PASSED  ] 1 test." in result.stdout, result.stdout
