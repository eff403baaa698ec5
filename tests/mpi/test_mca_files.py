"""Files of Open MPI's parameters. Needs mca_files_tests, which the CMake presets build."""

from __future__ import annotations

from built_programs import run_alone


def test_mca_files_tests_pass() -> None:
    output = run_alone("mca_files_tests")
    assert "[  PASSED  ] 4 tests." in output, output
