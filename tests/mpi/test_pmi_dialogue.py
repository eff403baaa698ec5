"""The protocol that starts MPICH. Needs pmi_dialogue_tests, which the CMake presets build."""

from __future__ import annotations

from built_programs import run_alone


def test_pmi_dialogue_tests_pass() -> None:
    output = run_alone("pmi_dialogue_tests")
    assert "[  PASSED  ] 7 tests." in output, output
