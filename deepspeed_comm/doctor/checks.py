"""The list of checks, and the guard around each: none of them raises."""

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


# Groups of one host work without these.
FOR_HOSTS = ("folders", "MPI", "PMIx helper")


def examine(
    limit_s: float, checks: dict[str, Check] = CHECKS, hosts: bool = False
) -> Iterator[Finding]:
    """Runs the checks, one after the other; gives each finding as soon as it is there. `hosts`:
    groups are to span hosts, so what keeps them from it is a problem, and no warning."""
    examination = Examination(limit_s)
    for name, check in checks.items():
        finding = Finding(name)
        try:
            check(finding, examination)
        except Exception as error:
            finding.problem(
                f"the check itself failed: {type(error).__name__}: {error}",
                "look at what it names; if that is in order, report this as a defect of the doctor",
            )
        if name in FOR_HOSTS and not hosts:
            finding.soften()
        yield finding
