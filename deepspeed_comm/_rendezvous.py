"""The rendezvous "mpi://": ranks of mpirun or srun meet without torch's environment variables.

    torch.distributed.init_process_group("dscomm", init_method="mpi://")

Rank and size come from the launcher. Rank 0's host and port come from the URL (mpi://host:port),
else from MASTER_ADDR and MASTER_PORT, else from the launcher.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from deepspeed_comm import _launcher_variables
from deepspeed_comm._launcher_variables import whole_number

# The range of the default port, which _port_of() chooses; below Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 10000, 20000
_RETRY_S = 0.05
_CONNECT_S = 2.0


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """torch's handler of "mpi://": yields (store, rank, size) once.

    Raises ValueError if a rank, size or port is not a number, and RuntimeError if the launcher or
    rank 0's host is unknown, or if rank 0 cannot be reached within the timeout.
    """
    from torch.distributed import TCPStore

    parts = urlparse(url)
    given = {
        name: whole_number(f"mpi://: {name} in the URL", values[-1])
        for name, values in parse_qs(parts.query).items()
    }
    place = _launcher_variables.find_place(os.environ)
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
    said = os.environ.get("MASTER_PORT")
    port = parts.port or (whole_number("MASTER_PORT", said) if said else _port_of(place.job))
    if rank == 0:
        # The store listens on all addresses of the host.
        try:
            store = TCPStore(addresses[0], port, size, True, timeout)
        except Exception as error:
            raise RuntimeError(
                f"mpi://: rank 0 of {size} could not meet the others on port {port} ({error}). "
                "If the port is in use, set another on all ranks: MASTER_PORT, or that of the URL."
            ) from error
    else:
        began = time.monotonic()
        address = _reachable(addresses, port, timeout, rank)
        left = timeout - timedelta(seconds=time.monotonic() - began)
        store = TCPStore(address, port, size, False, max(left, timedelta(seconds=1)))
    yield store, rank, size
    raise RuntimeError("mpi:// connects the ranks only once; use torchrun for elastic jobs.")


def _port_of(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _reachable(addresses: tuple[str, ...], port: int, timeout: timedelta, rank: int) -> str:
    """The first address at which rank 0 answers within the timeout."""
    if len(addresses) == 1:
        return addresses[0]  # the store retries by itself
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
