"""The protocol that starts MPICH. Needs pmi_session_tests, which the CMake presets build."""

from __future__ import annotations

from built_programs import run_alone


def test_pmi_session_tests_pass() -> None:
    output = run_alone("pmi_session_tests")
    assert "[  PASSED  ] 7 tests." in output, output
