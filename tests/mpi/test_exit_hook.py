"""Libraries that end the process: runs each test of exit_hook_tests in a separate process.

MPI has given up in a process once an exit was prevented. Needs exit_hook_tests, which the CMake
presets build.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from built_programs import run_alone

SOURCE = Path(__file__).with_name("exit_hook_test.cc").read_text()
TESTS = re.findall(r"^TEST\(ExitHook, (\w+)\)", SOURCE, re.M)


@pytest.mark.parametrize("test", TESTS)
def test_exit_hook_tests_pass(test: str) -> None:
    output = run_alone("exit_hook_tests", f"ExitHook.{test}")
    assert "[  PASSED  ] 1 test." in output, output
