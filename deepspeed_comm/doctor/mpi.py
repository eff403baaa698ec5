"""Checks of the transport between hosts: the MPI library, and dscomm-pmix, the helper that starts
Open MPI for ranks of torchrun."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping

from deepspeed_comm.doctor import child, probe_mpi
from deepspeed_comm.doctor.examination import Examination, MpiLibrary
from deepspeed_comm.doctor.job import fast_adapters
from deepspeed_comm.doctor.report import Finding

_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED",
           "MPI_THREAD_MULTIPLE")  # fmt: skip
# dscomm-pmix exits with this status if it gets no arguments.
_HELPER_USAGE_STATUS = 2


def check_mpi(finding: Finding, examination: Examination) -> None:
    """Loads the MPI library of groups of several hosts, and initialises it in a single process."""
    build = examination.extension.facts.get("build", {})
    path, library = examination.transport_file, examination.mpi
    version = build.get(library.version_key) or None
    finding.facts.update(mpi=library.name, built_with=version, module=path or None)
    if not path:
        _say_none(finding, examination)
        return
    finding.say(f"built with {library.name} {version}")
    with tempfile.TemporaryDirectory(prefix="dscomm-doctor-") as folder:
        # Open MPI leaves files in TMPDIR.
        environment = environment_for_mpi(os.environ) | {"TMPDIR": folder}
        command = [sys.executable, "-I", "-X", "faulthandler", probe_mpi.__file__, path]
        answer = child.run(command, examination.limit_s, environment)
    _judge(finding, answer, library)


def _say_none(finding: Finding, examination: Examination) -> None:
    if "extension" not in examination.extension.facts:
        finding.warn("not checked, because the native module does not load", "see extension")
        return
    finding.say("none: groups cannot span hosts")
    finding.problem(
        f"groups that span hosts need an MPI, and this build has no {examination.mpi.name}",
        f"install {' or '.join(each.to_build for each in examination.libraries)}, then install "
        "deepspeed_comm again",
    )


def _judge(finding: Finding, answer: child.Answer, library: MpiLibrary) -> None:
    facts = answer.facts
    name = library.name
    advice = f"install it ({library.to_run}), or remove other libraries from LD_LIBRARY_PATH"
    finding.facts.update(facts)
    if "library" not in facts:
        finding.problem(f"{name} cannot be loaded ({answer.reason})", advice)
        return
    finding.say(f"loaded: {facts['library'] or 'a library with another name than libmpi'}")
    if "version" in facts:
        finding.say(facts["version"].partition("\n")[0].partition(", package")[0])
        if not facts["version"].startswith(name):
            finding.problem(f"this is not {name}, which dscomm was built with", advice)
            return
    if "thread_level" not in facts:
        does = "does not return" if answer.ended == child.TOO_LATE else "ends its process"
        finding.problem(
            f"MPI_Init_thread {does} ({answer.reason})",
            "try a small MPI program with mpirun; the check used your MPI settings",
        )
        return
    level = facts["thread_level"]
    finding.say(f"thread level: {_LEVELS[level] if 0 <= level < len(_LEVELS) else level}")
    if facts["init_code"] != 0:
        finding.problem(
            f"MPI_Init_thread fails with code {facts['init_code']} ({answer.reason})",
            "try a small MPI program with mpirun",
        )
    elif level < probe_mpi.THREAD_MULTIPLE:
        finding.problem(
            "dscomm calls MPI from several threads, which needs MPI_THREAD_MULTIPLE",
            f"use an installation of {name} that was built with it",
        )
    elif answer.ended:
        finding.warn(
            f"MPI_Finalize fails ({answer.reason}), so programs may end with an error",
            "try a small MPI program with mpirun",
        )


def environment_for_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process alone in MPI's world: without the launcher's variables, but
    with the user's settings of MPI. Open MPI's: as in csrc/mpi/open_mpi/start.cc."""
    kept = {name: text for name, text in environment.items() if not _is_of_launcher(name)}
    kept.setdefault("OMPI_MCA_ess_singleton_isolated", "1")  # starts no daemon
    if not fast_adapters():
        # Searching for missing networks takes time.
        kept.setdefault("OMPI_MCA_mtl", "^ofi,psm,psm2")
        kept.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
        kept.setdefault("FI_PROVIDER", "tcp")
    return kept


def _is_of_launcher(name: str) -> bool:
    if name.startswith("OMPI_MCA_"):
        rest = name[len("OMPI_MCA_") :]
        prefixes = ("orte_", "ess", "initial_wdir", "mpi_oversubscribe", "shmem_RUNTIME_QUERY_hint")
        return rest.startswith(prefixes) or rest == "pmix"
    if name.startswith("PMIX_MCA_"):
        return False
    return name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_"))


def check_helper(finding: Finding, examination: Examination) -> None:
    """Starts dscomm-pmix without arguments: it prints its usage if its libraries load."""
    path = examination.helper_file
    finding.facts.update(path=path or None)
    if examination.mpi.setting == "mpich":
        finding.say("not needed: ranks start MPICH by themselves")
        return
    if not path:
        _say_none(finding, examination)
        return
    finding.say(path)
    try:
        answer = child.run([path], examination.limit_s)
    except OSError as error:
        finding.problem(
            f"it cannot be started: {error.strerror}",
            "ranks of torchrun need it to reach other hosts: make it executable, on a file system "
            "that is not mounted noexec, or start the ranks with mpirun or srun --mpi=pmix",
        )
        return
    if answer.ended != f"ended with status {_HELPER_USAGE_STATUS}":
        finding.problem(
            f"it does not run ({answer.reason or 'it ended without a message'})",
            "install PMIx (apt-get install libpmix2), or start the ranks with mpirun",
        )
    else:
        finding.say("it runs, and finds PMIx")
