"""Time limits of faults between hosts, and the check that ranks ended in peace."""

from __future__ import annotations

from tests.cluster.jobs import BACKEND, MPI, Job

# dscomm names the faulty rank and the disagreement; gloo, as TEST_CLUSTER_BACKEND, does not.
NAMES = BACKEND == "dscomm"
# Helpers of Open MPI on each host; MPICH and gloo need none.
HELPERS = 1 if NAMES and MPI == "openmpi" else 0
# From a death to the error on every other rank of the job. (With gloo a rank notices when the
# process that noticed before it has ended.)
SOON_S = 2.0 if NAMES else 8.0
# Well above SOON_S, so that an error within SOON_S is no timeout.
LONG_S = 30.0
TIMEOUT_S = 3.0
# Tolerance for the time of an error: the wait may have begun just before the fault.
EARLY_S, LATE_S = 0.5, 2.0
# Limit for ending after an error, in any state of the network.
EXIT_S = 15.0


def assert_ended_cleanly(job: Job, ranks: list[int]) -> None:
    """These ranks ended successfully, none hangs, and no host has leftovers."""
    job.finish(EXIT_S)
    codes = [*job.exit_codes().values()]
    assert [codes[rank] for rank in ranks] == [0] * len(ranks), job.report()
    left = job.hosts.leftovers(limit_s=5.0)
    assert left == {}, f"{left}\n{job.report()}"
