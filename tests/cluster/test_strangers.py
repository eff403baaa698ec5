"""Strangers connect to every open port: none is admitted, and no rank waits for one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import HostProcess, Hosts
from tests.cluster.jobs import MPI, Job, start_ranks

ATTACKER = str(Path(__file__).with_name("attacker.py"))
NOBODY = 65534
# Timeout of the groups: a call that waits for a stranger exceeds it.
TIMEOUT_S = 3.0
STORE_PORT = 29500
# Open MPI's first ports: for two address families and two ranks, and spares. MPICH is told to use
# them.
PORTS_OF_MPI = range(1024, 1040)
ENV = {
    "openmpi": {},
    "mpich": {"FI_TCP_PORT_LOW_RANGE": "1024", "FI_TCP_PORT_HIGH_RANGE": "1039"},
}[MPI]


@contextlib.contextmanager
def attack(hosts: Hosts, place: int, victim: int, uid: int, *ports: str) -> Iterator[HostProcess]:
    """A process on host `place` attacks the ports of host `victim`."""
    argv = [sys.executable, ATTACKER, hosts[victim].address, str(uid), str(STORE_PORT), *ports]
    attacker = hosts[place].start(argv)
    deadline = time.monotonic() + 20
    while "attacking" not in attacker.output():
        assert time.monotonic() < deadline, attacker.output()
        time.sleep(0.01)
    yield attacker


def end(attacker: HostProcess) -> dict[int, int]:
    """Ends the attacker; returns how often it was connected, by port."""
    os.kill(attacker.pid, signal.SIGTERM)
    attacker.wait(10)
    words = attacker.output().splitlines()[-1]
    return {int(port): count for port, count in json.loads(words).items()}


def start(hosts: Hosts) -> Job:
    """Two ranks on each of the first two hosts, with dscomm whatever the harness's backend."""
    env = {"TEST_CLUSTER_BACKEND": "dscomm", **ENV}
    return start_ranks(hosts, [0, 0, 1, 1], "endures.py", str(TIMEOUT_S), env=env)


def endures(job: Job) -> None:
    job.wait_for("done")
    job.finish()
    assert set(job.exit_codes().values()) == {0}, job.report()


def test_attack_from_host_outside_the_job_is_dropped(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(3)
    ports = f"{PORTS_OF_MPI[0]}-{PORTS_OF_MPI[-1]}"
    with attack(hosts, 2, 0, 0, ports) as from_the_start, start(hosts) as job:
        job.wait_for("working")
        with attack(hosts, 2, 0, 0, ports) as attacker:
            endures(job)
            # Its packets are dropped before they reach MPI.
            assert end(attacker) == {}
        # MPICH listens for some milliseconds before it has a filter.
        assert end(from_the_start) == {} or MPI == "mpich"


@pytest.mark.parametrize("uid", [NOBODY, pytest.param(0, marks=pytest.mark.drill)])
def test_attack_from_same_host_delays_no_rank(make_hosts: Callable[[int], Hosts], uid: int) -> None:
    """Attacks by another user and by the same one, on loopback ports too."""
    hosts = make_hosts(2)
    with attack(hosts, 0, 0, uid) as attacker:
        with start(hosts) as job:
            endures(job)
            connected = end(attacker)
            assert any(port in PORTS_OF_MPI for port in connected), connected
            # The port of dscomm-pmix, which MPICH does not need.
            assert MPI == "mpich" or any(port not in PORTS_OF_MPI for port in connected), connected


@pytest.mark.drill
def test_attack_from_other_host_of_the_job_delays_no_rank(
    make_hosts: Callable[[int], Hosts],
) -> None:
    hosts = make_hosts(2)
    with attack(hosts, 1, 0, NOBODY, f"{PORTS_OF_MPI[0]}-{PORTS_OF_MPI[-1]}") as attacker:
        with start(hosts) as job:
            endures(job)
            assert end(attacker) != {}
