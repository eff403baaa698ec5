"""Jobs start where networks and launchers are not as simple as elsewhere here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hosts import Hosts
from jobs import Job, mpirun, slurm, start_ranks


def test_bridge_of_the_same_address_on_every_host(make_hosts: Callable[[int], Hosts]) -> None:
    """An interface that all hosts have, as of a container engine, leads from none to another."""
    hosts = make_hosts(2)
    hosts.add_same_bridge()
    with start_ranks(hosts, [0, 0, 1, 1], "checks.py", "few", limit_s=60.0) as job:
        assert all(sum(result["counts"].values()) > 300 for result in job.results())


@pytest.mark.parametrize("launcher", [mpirun, slurm])
def test_other_launchers(make_hosts: Callable[[int], Hosts], launcher: Callable[..., Job]) -> None:
    """Ranks that torchrun has not started, so that init_process_group() finds no RANK."""
    with launcher(make_hosts(2), 2, "checks.py", "few") as job:
        assert all(sum(result["counts"].values()) > 300 for result in job.results())
        assert job.hosts.leftovers(limit_s=5.0) == {}
