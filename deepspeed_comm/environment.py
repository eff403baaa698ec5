"""Sets the variables that torch's rendezvous env:// needs, where the launcher has not.

torchrun and DeepSpeed's launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
Missing ones come from the first of these sources: Azure ML (except DLTS), SageMaker, the variables
of Open MPI, Slurm, MPICH or Intel MPI, mpi4py. Without any of them, the program is a world of one
rank. A variable that is set is never changed. _launcher_variables.py reads the variables.
"""

from __future__ import annotations

import os
import socket

from deepspeed_comm import _launcher_variables, constants
from deepspeed_comm._launcher_variables import OPEN_MPI_RANKS, OPEN_MPI_SIZES, REQUIRED
from deepspeed_comm._log import logger

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500


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
    """Sets missing variables from Azure ML's, and NCCL_SOCKET_IFNAME.

    Raises RuntimeError with the names of Azure ML's variables that are not set.
    """
    size, local_size = _values("Azure ML", *OPEN_MPI_SIZES)
    if size == local_size:
        (address,) = _values("Azure ML", "AZ_BATCHAI_MPI_MASTER_NODE", unless="MASTER_ADDR")
        port = constants.DEFAULT_AML_MASTER_PORT
    else:
        (node,) = _values("Azure ML", "AZ_BATCH_MASTER_NODE", unless="MASTER_ADDR")
        address, port = node.split(":")[0], str(master_port)
    _set_ranks_of_open_mpi("Azure ML")
    _set_missing(MASTER_ADDR=address, MASTER_PORT=port)
    _set_missing(NCCL_SOCKET_IFNAME=constants.DEFAULT_AML_NCCL_SOCKET_IFNAME)
    _tell("AzureML", verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Sets missing variables from SageMaker's, which include MASTER_ADDR and MASTER_PORT.

    Raises RuntimeError with the names of SageMaker's variables that are not set.
    """
    _set_ranks_of_open_mpi("SageMaker")
    _values("SageMaker", "MASTER_ADDR", "MASTER_PORT")
    _tell("AWS SageMaker", verbose)


def mpi_discovery(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Sets missing variables from the MPI launcher's or Slurm's, else by asking mpi4py.

    Raises RuntimeError if the launcher's variables are not enough and mpi4py is not installed.
    """
    place = _launcher_variables.find_started_place(os.environ)
    address = os.environ.get("MASTER_ADDR")
    if address is None and place is not None and len(place.addresses) == 1:
        address = place.addresses[0]
    if place is None or place.local_rank is None or address is None:
        return _ask_mpi4py(distributed_port, verbose)
    _set_missing(RANK=place.rank, WORLD_SIZE=place.size, LOCAL_RANK=place.local_rank)
    _set_missing(MASTER_ADDR=address, MASTER_PORT=distributed_port)
    _tell("MPI" if place.launcher != "Slurm" else "Slurm", verbose)


def discover(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    rank: int = -1,
    world_size: int = -1,
) -> str | None:
    """Sets the missing variables of REQUIRED; the head of this module lists their sources.

    distributed_port: MASTER_PORT, if no source has one. rank, world_size: the program's own values,
    used if no launcher gives others; -1: none.

    Returns the init_method to use, None for torch's default. If the launcher gives several
    addresses of rank 0's host, MASTER_ADDR stays unset and mpi:// tries them all.

    Raises RuntimeError with the names of the variables that could not be set.
    """
    if all(name in os.environ for name in REQUIRED):
        return None
    place = _launcher_variables.find_started_place(os.environ)
    if place is None and rank >= 0 and world_size > 0:
        _set_missing(RANK=rank, WORLD_SIZE=world_size)
    if in_aml() and not in_dlts():
        patch_aml_env_for_torch_nccl_backend(verbose=verbose)
    elif in_aws_sm():
        patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
    elif place is not None and len(place.addresses) > 1 and "MASTER_ADDR" not in os.environ:
        _set_missing(RANK=place.rank, WORLD_SIZE=place.size, LOCAL_RANK=place.local_rank or 0)
        _set_missing(MASTER_PORT=distributed_port)
        _tell("MPI", verbose)
        return "mpi://"
    elif place is not None or _launcher_variables.has_signs_of_mpi(os.environ):
        mpi_discovery(distributed_port, verbose)
    elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _complete(distributed_port, verbose)
    else:
        _set_missing(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)
        # A free port, so that two programs of one host do not meet.
        _set_missing(MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
        _tell("single-rank (no launcher)", verbose)
    return None


def _complete(distributed_port: int, verbose: bool) -> None:
    """Completes variables set by hand. Needs RANK, WORLD_SIZE and MASTER_ADDR, or WORLD_SIZE=1."""
    if os.environ.get("WORLD_SIZE") == "1":
        _set_missing(RANK=0, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"not set: {', '.join(missing)} (set: "
            f"{', '.join(n for n in REQUIRED if n in os.environ)}); start the program with "
            f"torchrun, mpirun or srun, or set all of {', '.join(REQUIRED)} on every rank"
        )
    # LOCAL_RANK only matters to programs that share devices among the ranks of a host.
    _set_missing(LOCAL_RANK=0, MASTER_PORT=distributed_port)
    _tell("the environment's", verbose)


def _ask_mpi4py(distributed_port: int, verbose: bool) -> None:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            "the launcher's variables lack one or more of rank, size, local rank and rank 0's "
            f"address, and mpi4py cannot be imported ({error}); if only the address is missing, "
            "set MASTER_ADDR to the host of rank 0, else start the program with torchrun, or "
            "install mpi4py"
        ) from error
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    hosts = world.allgather(MPI.Get_processor_name())
    address = world.bcast(own_address() if rank == 0 else None, root=0)
    local_rank = hosts[:rank].count(hosts[rank])
    _set_missing(RANK=rank, WORLD_SIZE=world.Get_size(), LOCAL_RANK=local_rank)
    _set_missing(MASTER_ADDR=address, MASTER_PORT=distributed_port)
    _tell("MPI", verbose)


def own_address() -> str:
    """An IPv4 address of the interface with the default route, else of the host's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a UDP socket sends nothing; it only selects the interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _values(place: str, *names: str, unless: str = "") -> list[str]:
    """The values of variables that `place` should set; if `unless` is set, its value for each."""
    if unless in os.environ:
        return [os.environ[unless] for _ in names]
    if missing := [name for name in names if name not in os.environ]:
        raise RuntimeError(
            f"{place} should have set {', '.join(missing)}: set them or, if it did not start this "
            f"job, unset {'SM_TRAINING_ENV' if place == 'SageMaker' else 'AZUREML_EXPERIMENT_ID'}"
        )
    return [os.environ[name] for name in names]


def _set_ranks_of_open_mpi(place: str) -> None:
    rank, size, local_rank = _values(place, *OPEN_MPI_RANKS)
    _set_missing(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local_rank)


def _set_missing(**values: object) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def _tell(where: str, verbose: bool) -> None:
    if verbose:
        logger.info(
            f"Discovered {where} settings of world_rank={os.environ['RANK']}, "
            f"local_rank={os.environ['LOCAL_RANK']}, world_size={os.environ['WORLD_SIZE']}, "
            f"master_addr={os.environ.get('MASTER_ADDR', 'one of several')}, "
            f"master_port={os.environ['MASTER_PORT']}"
        )
