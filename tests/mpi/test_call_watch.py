"""MPI calls that do not return: runs each test of call_watch_tests in a separate process.

MPI has given up in a process once a call was left. Needs call_watch_tests, which the CMake presets
build.
"""

from __future__ import annotations

import pytest
from test_mpi_team import run_alone


@pytest.mark.parametrize(
    "test",
    [
        "SleepingCallIsInterrupted",
        "LoopingCallIsInterrupted",
        "CallLoopingThroughLibcIsInterruptedOutsideIt",
        "CallOfThreadThatBlocksSignalsIsInterrupted",
        "ReturningAndBlockingCallsAreNotInterrupted",
        "SlowCallBeforeItsDeadlineIsNotInterrupted",
        "CallAfterItsDeadlineIsInterrupted",
        "CallThatSleepsAfterComputingIsInterrupted",
        "CallIsInterruptedAfterMpiFailedInAnotherThread",
        "CallWithoutDeadlineIsInterruptedAfterFiveSeconds",
    ],
)
def test_call_watch_tests_pass(test: str) -> None:
    output = run_alone("call_watch_tests", f"CallWatch.{test}")
    assert "[  PASSED  ] 1 test." in output, output
