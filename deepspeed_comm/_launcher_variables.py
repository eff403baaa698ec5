"""The launcher's variables: the rank, the size and the host of a process in its job.

This module interprets them: torchrun's RANK, WORLD_SIZE and LOCAL_*; Open MPI's OMPI_COMM_WORLD_*;
Slurm's SLURM_*; PMI_* and MPI_LOCAL* of MPICH and Intel MPI. environment.py sets missing ones of
torchrun from the others. In C++, csrc/core/base/settings.cc reads torchrun's, and
csrc/mpi/open_mpi/start.cc those by which Open MPI reaches its launcher.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

# The variables of torch's rendezvous env://, and the local rank.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
# Rank, size and local rank under Open MPI; Azure ML and SageMaker start ranks with it.
OPEN_MPI_RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
OPEN_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# OMPI_MCA_* and PMIX_MCA_* are missing here: they are settings, which users also set by hand.
_SIGNS_OF_MPI = ("OMPI_COMM_WORLD_", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of one rank in its job. None and empty values are unknown."""

    launcher: str  # "mpirun", "Slurm" or "PMI"
    rank: int
    size: int
    addresses: tuple[str, ...]  # of rank 0's host, best first
    job: str  # distinguishes the jobs of a host
    local_rank: int | None = None


def number(environment: Mapping[str, str], name: str) -> int | None:
    """The value of a variable, or None if it is not a whole number."""
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def whole_number(name: str, text: str) -> int:
    """The number in `text`, the value of `name`. Raises ValueError with both if there is none."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}") from None


def first_set(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """The value of the first variable set, else `default`. Raises ValueError if it is no number."""
    return next(
        (whole_number(name, environment[name]) for name in names if name in environment), default
    )


def local_world_size(environment: Mapping[str, str], default: int) -> int:
    """LOCAL_WORLD_SIZE, else `default`. Raises ValueError if it is not a number."""
    return first_set(environment, ("LOCAL_WORLD_SIZE",), default)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place given by mpirun, srun or PMI's launchers; None without one of them.

    In a Slurm job mpirun takes precedence: it starts one process per host by srun, and the ranks
    inherit that process's SLURM_* variables.
    """
    slurm, pmi = _slurm_place(environment), _pmi_place(environment)
    if pmi is not None and slurm is not None:
        if (pmi.rank, pmi.size) == (slurm.rank, slurm.size):
            pmi = None  # srun itself sets PMI's variables, too
        else:
            pmi = dataclasses.replace(pmi, addresses=pmi.addresses or slurm.addresses)
    return _open_mpi_place(environment) or pmi or slurm


def find_started_place(environment: Mapping[str, str]) -> Place | None:
    """find_place(), except for a Slurm batch script: it has SLURM_PROCID, but is not a rank."""
    place = find_place(environment)
    is_script = place is not None and place.launcher == "Slurm" and not _is_slurm_step(environment)
    return None if is_script else place


def find_rank(environment: Mapping[str, str]) -> tuple[int, int | None]:
    """(rank, size) from torchrun's variables, else from another launcher's; (0, None) without one.

    The size is None if RANK is set without a number in WORLD_SIZE.
    """
    rank = number(environment, "RANK")
    if rank is not None:
        return rank, number(environment, "WORLD_SIZE")
    place = find_place(environment)
    return (place.rank, place.size) if place else (0, None)


def ranks_of_host(environment: Mapping[str, str]) -> int | None:
    """The number of ranks that the launcher starts on this host; None if it does not say."""
    found = (number(environment, name) for name in _RANKS_OF_HOST)
    return next((value for value in found if value is not None), None)


def spans_hosts(environment: Mapping[str, str]) -> bool:
    """Whether the job has several nodes, or more ranks than the launcher starts on this host."""
    nodes = environment.get("SLURM_STEP_NUM_NODES", "") or environment.get("SLURM_NNODES", "")
    if nodes.isdigit() and int(nodes) > 1:
        return True
    sizes = (environment.get(name, "") for name in ("WORLD_SIZE", OPEN_MPI_SIZES[0], "PMI_SIZE"))
    size, here = next(filter(None, sizes), ""), ranks_of_host(environment)
    return here is not None and size.isdigit() and int(size) > here


def has_signs_of_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI launcher has set any of its variables."""
    return any(name.startswith(_SIGNS_OF_MPI) for name in environment)


def _numbers(environment: Mapping[str, str], *names: str) -> list[int] | None:
    values = [number(environment, name) for name in names]
    found = [value for value in values if value is not None]
    return found if len(found) == len(names) else None


def _open_mpi_place(environment: Mapping[str, str]) -> Place | None:
    found = _numbers(environment, *OPEN_MPI_RANKS[:2])
    if found is None:
        return None
    # "1234.0;tcp://10.0.0.1,192.168.0.1:5000;tcp6://[...]:5000" is mpirun's contact. Rank 0 is on
    # mpirun's host unless the user maps ranks otherwise.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    listed = re.search(r"tcp://([0-9.,]+):", uri)
    addresses = tuple(listed.group(1).split(",")) if listed else ()
    if environment.get(OPEN_MPI_SIZES[1]) == str(found[1]):
        addresses = ("127.0.0.1",)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    return Place(
        "mpirun", found[0], found[1], addresses, job, number(environment, OPEN_MPI_RANKS[2])
    )


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    return "SLURM_STEP_NUM_TASKS" in environment


def _slurm_place(environment: Mapping[str, str]) -> Place | None:
    found = _numbers(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    found = found or _numbers(environment, "SLURM_PROCID", "SLURM_NTASKS")
    if found is None:
        return None
    # Every distribution but "arbitrary" puts task 0 on the first node.
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = first_node(nodes)
    count = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    addresses = (first,) if first else ()
    if count == "1":
        addresses = ("127.0.0.1",)
    job = ".".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place("Slurm", found[0], found[1], addresses, job, number(environment, "SLURM_LOCALID"))


def _pmi_place(environment: Mapping[str, str]) -> Place | None:
    """The place under mpirun of MPICH or Intel MPI, which sets no address."""
    found = _numbers(environment, "PMI_RANK", "PMI_SIZE")
    if found is None:
        return None
    on_one_host = environment.get("MPI_LOCALNRANKS") == str(found[1])
    addresses = ("127.0.0.1",) if on_one_host else ()
    job = environment.get("PMI_JOBID", "")
    return Place("PMI", found[0], found[1], addresses, job, number(environment, "MPI_LOCALRANKID"))


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: "n[01-04,7],m2" gives "n01"."""
    first = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""
