"""What init_distributed() finds in the environment, and what it says when that is not enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deepspeed_comm import environment, utils
from deepspeed_comm.environment import REQUIRED, discover

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[07-09]",
    "SLURM_NNODES": "2",
}
OURS = ("OMPI_", "PMI", "SLURM_", "AZ", "SM_", "DLTS_", "MPI_", "HYDRA_", "NCCL_", "TORCHELASTIC")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name in REQUIRED or name.startswith(OURS):
            monkeypatch.delenv(name)
    # Set and taken back, so that what discover() sets goes with the test.
    for name in (*REQUIRED, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def given(patch: pytest.MonkeyPatch, *variables: dict[str, str]) -> None:
    for some in variables:
        for name, value in some.items():
            patch.setenv(name, value)


def found() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in REQUIRED}


def place(
    rank: str, size: str, address: str | None, port: str, local: str
) -> dict[str, str | None]:
    return dict(zip(REQUIRED, (rank, size, address, port, local), strict=True))


def test_complete_torchrun_variables_are_kept(bare: pytest.MonkeyPatch) -> None:
    said = {name: "7" for name in REQUIRED}
    given(bare, said, OPEN_MPI)
    assert discover() is None
    assert found() == said


def test_open_mpi_variables_give_rank_and_address(bare: pytest.MonkeyPatch) -> None:
    given(bare, OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5000"})
    assert discover(1234) is None
    assert found() == place("2", "4", "10.0.0.1", "1234", "0")


def test_open_mpi_with_several_addresses_uses_mpi_url(bare: pytest.MonkeyPatch) -> None:
    """One may be a bridge's that leads nowhere: the rendezvous tries them."""
    given(bare, OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1,172.17.0.1:5000"})
    assert discover() == "mpi://"
    assert found() == place("2", "4", None, "29500", "0")


def test_slurm_variables_give_rank_and_address(bare: pytest.MonkeyPatch) -> None:
    given(bare, SLURM)
    assert discover() is None
    assert found() == place("3", "4", "node07", "29500", "1")


def test_slurm_batch_script_is_world_of_one(bare: pytest.MonkeyPatch) -> None:
    """Though it is told a place: srun has not started it."""
    script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"}
    given(bare, script, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"})
    assert discover() is None
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


def test_pmi_rank_inside_slurm_overrides_slurm_rank(bare: pytest.MonkeyPatch) -> None:
    """srun starts one process a host for it, whose numbers the ranks inherit."""
    inherited = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    given(bare, inherited, {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"})
    discover()
    assert found() == place("5", "8", "node07", "29500", "1")


def test_rank_arguments_need_master_addr_beyond_one_rank(bare: pytest.MonkeyPatch) -> None:
    assert discover(rank=0, world_size=1) is None
    assert found()["MASTER_ADDR"] == "127.0.0.1"
    for name in REQUIRED:
        bare.delenv(name)
    with pytest.raises(RuntimeError, match=r"not set: MASTER_ADDR \(set: RANK, WORLD_SIZE\)"):
        discover(rank=1, world_size=2)


def test_variables_set_by_user_override_slurm(bare: pytest.MonkeyPatch) -> None:
    given(bare, SLURM, {"MASTER_ADDR": "other", "MASTER_PORT": "99", "LOCAL_RANK": "5"})
    discover(1234)
    assert found() == place("3", "4", "other", "99", "5")


AZURE = {
    **OPEN_MPI,
    "AZUREML_EXPERIMENT_ID": "x",
    "AZ_BATCHAI_MPI_MASTER_NODE": "one",
    "AZ_BATCH_MASTER_NODE": "many:6000",
}


def test_azure_ml_on_several_nodes_uses_batch_master_node(bare: pytest.MonkeyPatch) -> None:
    given(bare, AZURE)
    discover()
    assert found() == place("2", "4", "many", "6105", "0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"


def test_azure_ml_on_one_node_uses_batchai_master_node(bare: pytest.MonkeyPatch) -> None:
    given(bare, AZURE, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "NCCL_SOCKET_IFNAME": "eth7"})
    discover()
    assert found() == place("2", "4", "one", "54965", "0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_sagemaker_takes_rank_from_open_mpi(bare: pytest.MonkeyPatch) -> None:
    given(bare, OPEN_MPI, {"SM_TRAINING_ENV": "{}", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"})
    discover()
    assert found() == place("2", "4", "algo-1", "7777", "0")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AZUREML_EXPERIMENT_ID": "x"}, "Azure ML should have set OMPI_COMM_WORLD_SIZE, OMPI_C"),
        ({"SM_TRAINING_ENV": "{}"}, "SageMaker should have set OMPI_COMM_WORLD_RANK, OMPI_COMM"),
        ({**OPEN_MPI, "SM_TRAINING_ENV": "{}"}, "should have set MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, r"not set: MASTER_ADDR \(set: RANK, WORLD_SIZE\)"),
        ({"WORLD_SIZE": "2"}, "not set: RANK, MASTER_ADDR"),
    ],
)
def test_missing_variables_are_named(
    bare: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    given(bare, variables)
    with pytest.raises(RuntimeError, match=message):
        discover()


def test_pmi_without_mpi4py_asks_for_master_addr(bare: pytest.MonkeyPatch) -> None:
    given(bare, {"PMI_RANK": "1", "PMI_SIZE": "2"})
    bare.setitem(sys.modules, "mpi4py", None)  # not installed
    with pytest.raises(RuntimeError, match="set MASTER_ADDR to the host of rank 0.*mpi4py"):
        environment.mpi_discovery()


def test_mpi_settings_without_launcher_give_world_of_one(bare: pytest.MonkeyPatch) -> None:
    given(bare, {"OMPI_MCA_btl_tcp_if_include": "eth0", "PMIX_MCA_gds": "hash"})
    given(bare, {"HYDRA_FULL_ERROR": "1"})  # of another Hydra
    discover()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


def test_launcher_utilities_prefer_torchrun_variables(bare: pytest.MonkeyPatch) -> None:
    numbers = (
        utils.get_world_rank_from_launcher,
        utils.get_world_size_from_launcher,
        utils.get_local_rank_from_launcher,
    )
    assert [number() for number in numbers] == [0, 1, 0]
    given(bare, OPEN_MPI)
    assert [number() for number in numbers] == [2, 4, 0]
    given(bare, {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1"})
    assert [number() for number in numbers] == [5, 6, 1]


ALONE = """
import json, os, torch, deepspeed_comm as dist
dist.init_distributed()
tensor = torch.ones(3)
dist.all_reduce(tensor)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
print(json.dumps([tensor.tolist(), dist.get_backend(), [os.environ[name] for name in names]]))
dist.destroy_process_group()
"""


def test_program_without_launcher_is_world_of_one(bare: pytest.MonkeyPatch) -> None:
    """The original needs mpi4py for that."""
    result = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=90
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer == [[1.0, 1.0, 1.0], "dscomm", ["0", "1", "0", "127.0.0.1"]]
    # One line says what was found where.
    assert result.stderr.count("Discovered single-rank (no launcher) settings") == 1
