"""The state that checks share: the time limit, and the answer of the extension's probe."""

from __future__ import annotations

import dataclasses
import functools
import os

from deepspeed_comm.doctor import child

# The values of DSCOMM_MPI, in the order in which DSCOMM_MPI=auto tries them.
_SETTINGS = ("openmpi", "mpich")


@dataclasses.dataclass(frozen=True)
class MpiLibrary:
    """An MPI library for groups of several hosts, described as csrc/core/transport/load.h says."""

    setting: str  # its value of DSCOMM_MPI
    name: str
    to_build: str  # what to install before deepspeed_comm is built
    to_run: str  # the commands that install it

    @property
    def module(self) -> str:
        """The name of the transport module that is built with this library."""
        return f"libdscomm_{self.setting}.so"

    @property
    def version_key(self) -> str:
        """The key of the library's version in the build record."""
        return self.name.lower().replace(" ", "_") + "_version"


class Examination:
    """One run of the doctor. limit_s: the time limit of each child."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s

    @functools.cached_property
    def extension(self) -> child.Answer:
        """The answer of probe_extension.py."""
        return child.run(
            child.program("probe_extension"), self.limit_s, child.program_environment()
        )

    @functools.cached_property
    def libraries(self) -> list[MpiLibrary]:
        return [self._described(setting) for setting in _SETTINGS]

    @property
    def mpi(self) -> MpiLibrary:
        """The MPI library that groups of several hosts would use."""
        wanted = os.environ.get("DSCOMM_MPI", "auto")
        for library in self.libraries:
            if wanted == library.setting or (wanted == "auto" and self._built(library.module)):
                return library
        return self.libraries[0]

    @property
    def transport_file(self) -> str:
        """The path of the transport module for MPI, or "" if the build has none."""
        return self._built(self.mpi.module)

    @property
    def helper_file(self) -> str:
        """The path of dscomm-pmix, or "" if the build has none."""
        return self._built("dscomm-pmix")

    def _described(self, setting: str) -> MpiLibrary:
        facts = {}
        if path := self._built(f"libdscomm_{setting}.txt"):
            with open(path) as text:
                facts = dict(line.strip().split(": ", 1) for line in text)
        texts = [facts.get(key, setting) for key in ("title", "to_build", "to_run")]
        return MpiLibrary(setting, *texts)

    def _built(self, name: str) -> str:
        folder = self.extension.facts.get("folder", "")
        # Beside the extension or, in a wheel for several torches, in the folder above.
        paths = [os.path.join(each, name) for each in (folder, os.path.dirname(folder)) if each]
        return next((path for path in paths if os.path.exists(path)), "")


def setting(name: str, default: int) -> int:
    """A setting's value; `default` if it is not set or invalid."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
