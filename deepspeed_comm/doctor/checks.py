"""The list of checks, and a guard that turns their exceptions into problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deepspeed_comm.doctor import host, installation, job, mpi, self_test
from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import Finding

Check = Callable[[Finding, Examination], None]

CHECKS: dict[str, Check] = {
    "versions": installation.check_versions,
    "extension": installation.check_extension,
    "settings": installation.check_settings,
    "instruction set": installation.check_instruction_set,
    "processors": host.check_processors,
    "memory": host.check_memory,
    "descriptors": host.check_descriptors,
    "folders": host.check_folders,
    "sharing": host.check_sharing,
    "launcher": job.check_launcher,
    "networks": job.check_networks,
    "MPI": mpi.check_mpi,
    "PMIx helper": mpi.check_helper,
    "two ranks": self_test.check_two_ranks,
}


# Checks that only matter to groups of several hosts.
FOR_HOSTS = ("folders", "MPI", "PMIx helper")


def examine(
    limit_s: float, checks: dict[str, Check] = CHECKS, hosts: bool = False
) -> Iterator[Finding]:
    """Runs the checks, and yields each finding when it is ready.

    limit_s: the time limit of each child process. hosts: whether groups span hosts; if not, the
    problems of FOR_HOSTS become warnings.
    """
    examination = Examination(limit_s)
    for name, check in checks.items():
        finding = Finding(name)
        try:
            check(finding, examination)
        except Exception as error:
            finding.problem(
                f"the check itself failed: {type(error).__name__}: {error}",
                "check the named cause; if it is in order, report this as a bug of the doctor",
            )
        if name in FOR_HOSTS and not hosts:
            finding.soften()
        yield finding
