"""Jobs start where networks and launchers are not as simple as elsewhere here."""

from __future__ import annotations

from collections.abc import Callable

from hosts import Hosts
from jobs import start_ranks


def test_bridge_of_the_same_address_on_every_host(make_hosts: Callable[[int], Hosts]) -> None:
    """An interface that all hosts have, as of a container engine, leads from none to another."""
    hosts = make_hosts(2)
    hosts.add_same_bridge()
    with start_ranks(hosts, [0, 0, 1, 1], "checks.py", "few", limit_s=60.0) as job:
        assert all(sum(result["counts"].values()) > 300 for result in job.results())
