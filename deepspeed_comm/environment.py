"""Environment utilities: from what a launcher says to what torch's rendezvous "env://" wants.

torchrun and DeepSpeed's launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
Where some are missing they are found in, in this order: Azure ML (but for DLTS), SageMaker, the
variables of Open MPI, Slurm, MPICH and Intel MPI, mpi4py. Without any of these the program is a
world of one rank. A variable that is set is never changed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from deepspeed_comm import _launcher, constants
from deepspeed_comm._log import logger

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")

# By the name of the launcher.
_LOCAL_RANKS = {
    "mpirun": "OMPI_COMM_WORLD_LOCAL_RANK",
    "Slurm": "SLURM_LOCALID",
    "PMI": "MPI_LOCALRANKID",
}
# No traces of a launcher are settings such as OMPI_MCA_*, which a user may always have.
_TRACES_OF_MPI = ("OMPI_COMM_WORLD_", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")


def in_aml() -> bool:
    """Whether this is a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether this is a training job of Amazon SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether this is a job of Microsoft's DLTS."""
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Sets what is missing from Azure ML's variables, and NCCL_SOCKET_IFNAME.

    Raises RuntimeError that names the variables Azure ML should have set and has not.
    """
    size, local_size = _of("Azure ML", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if size == local_size:
        (address,) = _of("Azure ML", "AZ_BATCHAI_MPI_MASTER_NODE", unless="MASTER_ADDR")
        port = constants.DEFAULT_AML_MASTER_PORT
    else:
        (node,) = _of("Azure ML", "AZ_BATCH_MASTER_NODE", unless="MASTER_ADDR")
        address, port = node.split(":")[0], str(master_port)
    _set_ranks_of_open_mpi("Azure ML")
    _set_missing({"MASTER_ADDR": address, "MASTER_PORT": port})
    _set_missing({"NCCL_SOCKET_IFNAME": constants.DEFAULT_AML_NCCL_SOCKET_IFNAME})
    _tell("AzureML", verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Sets what is missing from SageMaker's variables, which include MASTER_ADDR and MASTER_PORT.

    Raises RuntimeError that names the variables SageMaker should have set and has not.
    """
    _set_ranks_of_open_mpi("SageMaker")
    _of("SageMaker", "MASTER_ADDR", "MASTER_PORT")
    _tell("AWS SageMaker", verbose)


def mpi_discovery(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Sets what is missing from what the MPI launcher, or Slurm, says of this rank.

    What its variables do not tell is asked of mpi4py. Raises RuntimeError when that is not there,
    or when no launcher has left a trace.
    """
    place = _find_place()
    local_rank = _local_rank(place)
    address = os.environ.get("MASTER_ADDR")
    if address is None and place is not None and len(place.addresses) == 1:
        address = place.addresses[0]
    if place is None or local_rank is None or address is None:
        return _ask_mpi4py(distributed_port, verbose)
    _set_missing(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.size),
            "LOCAL_RANK": local_rank,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(distributed_port),
        }
    )
    _tell("MPI" if place.launcher != "Slurm" else "Slurm", verbose)


def discover(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    rank: int = -1,
    world_size: int = -1,
) -> str | None:
    """Sets those of REQUIRED that are missing; see above for where they come from.

    rank and world_size are what the program says of itself, where it does. Returns the init_method
    to use, None for torch's default. Where the launcher names several addresses of rank 0's host,
    MASTER_ADDR stays unset: the rendezvous tries them.
    """
    if all(name in os.environ for name in REQUIRED):
        return None
    place = _find_place()
    if place is None and rank >= 0 and world_size > 0:
        _set_missing({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if in_aml() and not in_dlts():
        patch_aml_env_for_torch_nccl_backend(verbose=verbose)
    elif in_aws_sm():
        patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
    elif place is not None and len(place.addresses) > 1 and "MASTER_ADDR" not in os.environ:
        _set_missing({"RANK": str(place.rank), "WORLD_SIZE": str(place.size)})
        _set_missing({"LOCAL_RANK": _local_rank(place) or "0"})
        _set_missing({"MASTER_PORT": str(distributed_port)})
        _tell("MPI", verbose)
        return "mpi://"
    elif place is not None or _has_traces_of_mpi(os.environ):
        mpi_discovery(distributed_port, verbose)
    elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _complete(distributed_port, verbose)
    else:
        _set_missing({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        # Two programs on one host shall not meet.
        _set_missing({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())})
        _tell("no launcher, so a world of one:", verbose)
    return None


def _complete(distributed_port: int, verbose: bool) -> None:
    """A user has set some by hand. A world of one needs no more; others need where to meet."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if os.environ.get("WORLD_SIZE") == "1":
        missing = []
        _set_missing({"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
        _set_missing({"MASTER_PORT": str(_free_port())})
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} is not set, though "
            f"{' and '.join(n for n in REQUIRED if n in os.environ)} is; start the program with "
            "torchrun, mpirun or srun, or set all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT on every rank"
        )
    # Only who shares devices among the ranks of a host needs to know better.
    _set_missing({"LOCAL_RANK": "0", "MASTER_PORT": str(distributed_port)})
    _tell("the environment's", verbose)


def _find_place() -> _launcher.Place | None:
    place = _launcher.find_place(os.environ)
    # A batch script has a place as well, the first, though srun has started nothing.
    is_step = "SLURM_STEP_NUM_TASKS" in os.environ
    return None if place is not None and place.launcher == "Slurm" and not is_step else place


def _local_rank(place: _launcher.Place | None) -> str | None:
    return None if place is None else os.environ.get(_LOCAL_RANKS[place.launcher])


def _has_traces_of_mpi(environment: Mapping[str, str]) -> bool:
    return any(name.startswith(_TRACES_OF_MPI) for name in environment)


def _ask_mpi4py(distributed_port: int, verbose: bool) -> None:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            "the launcher's variables do not tell rank, size, local rank and rank 0's address: set "
            "MASTER_ADDR to the host of rank 0, start the program with torchrun, or install mpi4py "
            f"(pip install mpi4py; {error})"
        ) from error
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    hosts = world.allgather(MPI.Get_processor_name())
    address = world.bcast(own_address() if rank == 0 else None, root=0)
    _set_missing(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world.Get_size()),
            "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(distributed_port),
        }
    )
    _tell("MPI", verbose)


def own_address() -> str:
    """One at which other hosts reach this one, where there is a route to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: it asks which interface would be taken.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _of(place: str, *names: str, unless: str = "") -> list[str]:
    """The values of variables that `place` promises to set."""
    if unless in os.environ:
        return [os.environ[unless] for _ in names]
    if missing := [name for name in names if name not in os.environ]:
        raise RuntimeError(f"{place} should have set {', '.join(missing)}, and has not")
    return [os.environ[name] for name in names]


def _set_ranks_of_open_mpi(place: str) -> None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, size, local_rank = _of(place, *names)
    _set_missing({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank})


def _set_missing(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _tell(where: str, verbose: bool) -> None:
    if verbose:
        logger.info(
            f"Discovered {where} settings of world_rank={os.environ['RANK']}, "
            f"local_rank={os.environ['LOCAL_RANK']}, world_size={os.environ['WORLD_SIZE']}, "
            f"master_addr={os.environ.get('MASTER_ADDR', 'one of several')}, "
            f"master_port={os.environ['MASTER_PORT']}"
        )
