"""Libraries that end the process: each test of exit_hook_tests in a process of its own.

MPI has given up in a process after the first exit that was left. Needs exit_hook_tests, which the
CMake presets build.
"""

from __future__ import annotations

import pytest
from test_mpi_team import run_alone


@pytest.mark.parametrize(
    "test",
    [
        "ExitInACallThroughALazyTableIsLeft",
        "ExitInACallThroughAReadOnlyTableIsLeft",
        "ExitInABlockingCallIsLeft",
        "ExitOutsideOfCallsEndsTheProcess",
        "LibraryWithoutExitIsNotHooked",
        "NoLibraryIsNotHooked",
    ],
)
def test_exit_hook(test: str) -> None:
    output = run_alone("exit_hook_tests", f"ExitHook.{test}")
    assert "[  PASSED  ] 1 test." in output, output
