"""Files of Open MPI's parameters. Needs mca_files_tests, which the CMake presets build."""

from __future__ import annotations

import subprocess

from test_mpi_team import built_program


def test_mca_files() -> None:
    result = subprocess.run(
        [built_program("mca_files_tests")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120.0,
    )
    assert result.returncode == 0, result.stdout
    assert "[  PASSED  ]" in result.stdout, result.stdout
