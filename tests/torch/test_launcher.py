"""The ranks that launchers give, and the errors of mpi:// if they give too little."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deepspeed_comm._launcher_variables import Place, find_place, first_node

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "26.0;tcp://10.0.0.1,172.17.0.1:56535;tcp6://[fd00::2]:50701",
    "PMIX_NAMESPACE": "26",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
}
PLACES = {
    "mpirun": (MPIRUN, Place("mpirun", 1, 4, ("10.0.0.1", "172.17.0.1"), "26")),
    "mpirun on one host": (
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        Place("mpirun", 1, 4, ("127.0.0.1",), "26"),
    ),
    "Slurm": (SLURM, Place("Slurm", 3, 8, ("node07",), "5.0")),
    # A step may be smaller than its job.
    "a step of Slurm": (
        {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node08"},
        Place("Slurm", 3, 4, ("node08",), "5.0"),
    ),
    "mpirun in Slurm": (
        {**SLURM, **MPIRUN},
        Place("mpirun", 1, 4, ("10.0.0.1", "172.17.0.1"), "26"),
    ),
    "PMI": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Place("PMI", 0, 2, (), "")),
    # salloc's variables, outside of srun.
    "salloc": ({"SLURM_NTASKS": "8"}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("case", PLACES)
def test_rank_is_read_from_launcher_variables(case: str) -> None:
    environment, expected = PLACES[case]
    assert find_place(environment) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-04,07],m2", "n01"),
        ("n[3]-x,m", "n3-x"),
        ("", ""),
    ],
)
def test_first_node_of_slurm_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "9"}


def init(environment: dict[str, str], url: str = "mpi://") -> subprocess.CompletedProcess[str]:
    program = (
        "import datetime, torch, deepspeed_comm, torch.distributed as dist\n"
        f"dist.init_process_group('dscomm', init_method='{url}',"
        " timeout=datetime.timedelta(seconds=2))\n"
        "x = torch.ones(3); dist.all_reduce(x); print(x.sum().item(), dist.get_world_size())"
    )
    launchers = ("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_")
    rest = {name: text for name, text in os.environ.items() if not name.startswith(launchers)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=rest | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_mpi_url_with_one_slurm_task_makes_world_of_one() -> None:
    done = init(ONE_TASK)
    assert done.stdout == "3.0 1\n", done.stderr


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "mpi:// found no launcher"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "set MASTER_ADDR"),
        (
            {**MPIRUN, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,127.0.0.2:9"},
            "timed out after 2 s: it could not connect to rank 0 at 127.0.0.1, 127.0.0.2, port ",
        ),
    ],
)
def test_mpi_url_with_incomplete_variables_names_what_is_missing(
    environment: dict[str, str], said: str
) -> None:
    failed = init(environment)
    assert failed.returncode != 0
    assert said in failed.stderr, failed.stderr


@pytest.mark.parametrize(
    ("environment", "url", "said"),
    [
        ({}, "mpi://?rank=x", "mpi://: rank in the URL must be a whole number, not 'x'"),
        ({}, "mpi://?world_size=1.5", "world_size in the URL must be a whole number, not '1.5'"),
        ({"MASTER_PORT": "12a"}, "mpi://", "MASTER_PORT must be a whole number, not '12a'"),
    ],
)
def test_mpi_url_error_names_value_that_is_no_whole_number(
    environment: dict[str, str], url: str, said: str
) -> None:
    failed = init(ONE_TASK | environment, url)
    assert failed.returncode != 0
    assert said in failed.stderr, failed.stderr
