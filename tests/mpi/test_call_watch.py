"""MPI calls that do not return: runs each test of call_watch_tests in a separate process.

MPI has given up in a process once a call was left. Needs call_watch_tests, which the CMake presets
build.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from built_programs import run_alone

SOURCE = Path(__file__).with_name("call_watch_test.cc").read_text()
TESTS = re.findall(r"^TEST\(CallWatch, (\w+)\)", SOURCE, re.M)


@pytest.mark.parametrize("test", TESTS)
def test_call_watch_tests_pass(test: str) -> None:
    output = run_alone("call_watch_tests", f"CallWatch.{test}")
    assert "[  PASSED  ] 1 test." in output, output
