"""Where a rank stands in its job, as the launcher that started it says, and the rendezvous "mpi://".

mpirun and srun start a program with a rank of its own, but tell torch nothing. With

    torch.distributed.init_process_group("dscomm", init_method="mpi://")

rank and size come from the launcher's variables. The ranks meet at rank 0's host: it is named in
the URL (mpi://host:port), by MASTER_ADDR and MASTER_PORT, or by the launcher, in this order.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

# Below the ports that Linux gives to whoever asks for any.
_FIRST_PORT, _PORTS = 10000, 20000
_RETRY_S = 0.05
_CONNECT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Of one rank. `addresses` are those at which rank 0's host may be reached, best first; none
    where the launcher does not say."""

    launcher: str
    rank: int
    size: int
    addresses: tuple[str, ...]
    job: str  # names the job among those of a host


def find_place(environment: Mapping[str, str]) -> Place | None:
    """What the launcher has told this process, or None where no launcher is known by its variables.

    Under mpirun in a Slurm job it is mpirun that counts: srun starts one process on each host then,
    whose numbers the ranks inherit. (srun itself may set PMI's numbers, the same as its own.)
    """
    slurm, pmi = _of_slurm(environment), _of_pmi(environment)
    if pmi is not None and slurm is not None:
        if (pmi.rank, pmi.size) == (slurm.rank, slurm.size):
            pmi = None
        else:
            pmi = dataclasses.replace(pmi, addresses=pmi.addresses or slurm.addresses)
    return _of_open_mpi(environment) or pmi or slurm


def _numbers(environment: Mapping[str, str], *names: str) -> list[int] | None:
    values = [environment.get(name, "") for name in names]
    return [int(value) for value in values] if all(v.isdigit() for v in values) else None


def _of_open_mpi(environment: Mapping[str, str]) -> Place | None:
    found = _numbers(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if found is None:
        return None
    # "1234.0;tcp://10.0.0.1,192.168.0.1:5000;tcp6://...": of mpirun, on whose host rank 0 is unless
    # the user has said otherwise.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    listed = re.search(r"tcp://([0-9.,]+):", uri)
    addresses = tuple(listed.group(1).split(",")) if listed else ()
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(found[1]):
        addresses = ("127.0.0.1",)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    return Place("mpirun", found[0], found[1], addresses, job)


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    found = _numbers(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    found = found or _numbers(environment, "SLURM_PROCID", "SLURM_NTASKS")
    if found is None:
        return None
    # Task 0 is on the first node in every distribution but "arbitrary".
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = first_node(nodes)
    count = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    addresses = (first,) if first else ()
    if count == "1":
        addresses = ("127.0.0.1",)
    job = ".".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place("Slurm", found[0], found[1], addresses, job)


def _of_pmi(environment: Mapping[str, str]) -> Place | None:
    """MPICH's and Intel's mpirun, which say no address."""
    found = _numbers(environment, "PMI_RANK", "PMI_SIZE")
    if found is None:
        return None
    on_one_host = environment.get("MPI_LOCALNRANKS") == str(found[1])
    addresses = ("127.0.0.1",) if on_one_host else ()
    return Place("PMI", found[0], found[1], addresses, environment.get("PMI_JOBID", ""))


def first_node(nodes: str) -> str:
    """The first host of a list as Slurm writes it: "n[01-04,7],m2" gives "n01"."""
    first = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """torch's handler of "mpi://": yields the store, the rank and the size, once.

    A RuntimeError says what is missing, or who could not be reached within the timeout.
    """
    from torch.distributed import TCPStore

    parts = urlparse(url)
    given = {name: int(values[-1]) for name, values in parse_qs(parts.query).items()}
    place = find_place(os.environ)
    if place is None:
        raise RuntimeError(
            "mpi:// found no launcher: none of OMPI_COMM_WORLD_RANK, SLURM_PROCID and PMI_RANK is "
            "set with its size. Start the program with mpirun or srun, or use env:// with torchrun."
        )
    rank, size = given.get("rank", place.rank), given.get("world_size", place.size)
    named = parts.hostname or os.environ.get("MASTER_ADDR")
    addresses = (named,) if named else place.addresses
    if not addresses:
        raise RuntimeError(
            f"mpi:// does not know the host of rank 0, which {place.launcher} does not say: set "
            "MASTER_ADDR, or name it in the URL, mpi://host:port."
        )
    port = parts.port or int(os.environ.get("MASTER_PORT") or _port_of(place.job))
    if rank == 0:
        # On all of its addresses.
        try:
            store = TCPStore(addresses[0], port, size, True, timeout)
        except Exception as error:
            raise RuntimeError(
                f"mpi://: rank 0 of {size} could not meet the others on port {port} ({error}). "
                "Set MASTER_PORT on all ranks if the port is in use."
            ) from error
    else:
        began = time.monotonic()
        address = _reachable(addresses, port, timeout, rank)
        left = timeout - timedelta(seconds=time.monotonic() - began)
        store = TCPStore(address, port, size, False, max(left, timedelta(seconds=1)))
    yield store, rank, size
    raise RuntimeError("mpi:// brings ranks together once; a job that changes needs torchrun.")


def _port_of(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _reachable(addresses: tuple[str, ...], port: int, timeout: timedelta, rank: int) -> str:
    """The first address where rank 0 answers, which may take it a while."""
    if len(addresses) == 1:
        return addresses[0]  # the store itself tries again
    deadline = time.monotonic() + timeout.total_seconds()
    reason = ""
    while time.monotonic() < deadline:
        for address in addresses:
            try:
                socket.create_connection((address, port), _CONNECT_S).close()
                return address
            except OSError as error:
                reason = f"{address}: {error}"
        time.sleep(_RETRY_S)
    raise RuntimeError(
        f"mpi://: rank {rank} timed out after {timeout.total_seconds():g} s: it could not connect "
        f"to rank 0 at {', '.join(addresses)}, port {port} ({reason}). If rank 0 is not on the "
        "launcher's host, set MASTER_ADDR to its host."
    )
