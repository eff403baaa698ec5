"""MpiTeam under mpirun: runs mpi_tests on 2, 3 and 4 ranks, and tests of ranks that are killed.
Without the drill: on 3 ranks, with the dtypes and operators that the sanitizers' core tests have.

All ranks are on this machine but use TCP, as ranks on several hosts do. Needs mpi_tests, which the
CMake presets build, and mpirun.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from built_programs import built_program

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
# Tests that kill a rank or need gigabytes run separately, below.
TOGETHER = "-MpiTeamAlone.*"
# Open MPI's numbers; 0, its own choice, is what the other tests use.
ALL_REDUCE_ALGORITHMS = {"ring": 1, "binomial": 2, "rabenseifner": 3, "recursive_doubling": 4}


def run(
    ranks: int, *, mpi: list[str] | None = None, tests: str = TOGETHER, matrix: str = "full"
) -> tuple[int, str]:
    if shutil.which("mpirun") is None:
        pytest.fail("mpirun is not installed: apt-get install openmpi-bin")
    command = ["mpirun", "--oversubscribe", "-np", str(ranks)]
    if os.geteuid() == 0:
        command += ["--allow-run-as-root"]
    # Ranks outnumber cores, so waiting ranks must yield.
    command += ["--mca", "mpi_yield_when_idle", "1"]
    command += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    command += [*(mpi or []), str(built_program("mpi_tests")), f"--gtest_filter={tests}"]
    result = subprocess.run(
        command,
        env={**os.environ, "TEST_MATRIX": matrix},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return result.returncode, result.stdout


# Four ranks take turns on two cores, which takes minutes.
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("ranks", "matrix"),
    [
        (3, "reduced"),
        *(pytest.param(ranks, "full", marks=pytest.mark.drill) for ranks in (2, 3, 4)),
    ],
)
def test_mpi_team_tests_pass(ranks: int, matrix: str) -> None:
    status, output = run(ranks, matrix=matrix)
    assert status == 0, output
    assert output.count("[  PASSED  ]") == ranks, output


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=() if name == "rabenseifner" else pytest.mark.drill)
        for name in ALL_REDUCE_ALGORITHMS
    ],
)
def test_every_algorithm_gives_the_same_bits_on_all_ranks(algorithm: str) -> None:
    choice = str(ALL_REDUCE_ALGORITHMS[algorithm])
    status, output = run(
        4, mpi=["--mca", "coll_libnbc_iallreduce_algorithm", choice], tests="MpiTeam/SameBits.*"
    )
    assert status == 0, output
    assert "Running 2 tests" in output and output.count("[  PASSED  ]") == 4, output


@pytest.mark.parametrize("test", ["DeathWithNoticeEndsWait", "DeathWithoutNoticeEndsWaitAtTimeout"])
def test_death_of_a_rank_ends_calls_of_survivors(test: str) -> None:
    """The last of three ranks is killed; mpirun leaves the others alone."""
    _, output = run(
        3,
        mpi=["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"],
        tests=f"MpiTeamAlone.{test}",
    )
    assert "rank 0 survived" in output, output
    assert "rank 1 survived" in output, output


@pytest.mark.drill
@pytest.mark.timeout(LIMIT_S + 60)
def test_calls_of_more_than_int_max_elements_succeed() -> None:
    status, output = run(2, tests="MpiTeamAlone.CallsOfMoreThanIntMaxElementsSucceed")
    assert status == 0, output
    assert output.count("[  PASSED  ]") == 2, output
