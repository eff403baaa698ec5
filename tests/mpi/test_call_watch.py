"""Calls of MPI that do not return: each test of call_watch_tests in a process of its own.

MPI has given up in a process after the first call that was left. Needs call_watch_tests, which the
CMake presets build.
"""

from __future__ import annotations

import pytest
from test_mpi_team import run_alone


@pytest.mark.parametrize(
    "test",
    [
        "ACallThatSleepsIsLeft",
        "ACallThatGoesRoundInCirclesIsLeft",
        "ACallThatGoesRoundInTheCLibraryIsLeftOutsideOfIt",
        "ACallOfAnyThreadIsLeft",
        "CallsThatReturnAndCallsThatMayBlockAreNotLeft",
        "SlowCallBeforeItsDeadlineIsNotLeft",
        "CallAfterItsDeadlineIsLeft",
        "CallThatSleepsAfterComputingIsLeft",
        "CallIsLeftOnceMpiHasGivenUpInAnotherThread",
        "CallWithoutDeadlineIsLeftAfterFiveSeconds",
    ],
)
def test_call_watch(test: str) -> None:
    output = run_alone("call_watch_tests", f"CallWatch.{test}")
    assert "[  PASSED  ] 1 test." in output, output
