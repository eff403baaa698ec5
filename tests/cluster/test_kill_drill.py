"""Random kills across hosts, for the drill only."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import pytest

from tests.cases.workloads import WORKLOADS
from tests.cluster.faults import LONG_S, NAMES, SOON_S, assert_ended_cleanly
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import start_ranks

ROUNDS = 100
PLACES = [0, 0, 1, 1, 2, 2]


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_many_random_kills_raise_on_survivors(make_hosts: Callable[[int], Hosts]) -> None:
    """Kills one to three of 3x2 ranks, at any moment of any work, with the store in rank 0 or in
    another process: every survivor raises soon and names one of them, all end, and no host has
    leftovers."""
    hosts = make_hosts(3)
    dice = random.Random(5)
    times_s = []
    for number in range(ROUNDS):
        workload = dice.choice(WORKLOADS).__name__
        dead = dice.sample(range(len(PLACES)), dice.choice([1, 1, 2, 3]))
        apart = dice.random() < 0.5
        arguments = ("until_raised.py", workload, str(LONG_S))
        with start_ranks(hosts, PLACES, *arguments, store_apart=apart) as job:
            job.wait_for("working")
            time.sleep(dice.uniform(0.0, 0.5))
            at_s = [job.kill(rank) for rank in dead][-1]
            survivors = [rank for rank in range(job.size) if rank not in dead]
            where = f"round {number}, {workload}, ranks {dead} killed, store apart: {apart}\n"
            for event in job.wait_for("raised", survivors, limit_s=20.0):
                times_s.append(event.at_s - at_s)
                assert times_s[-1] < SOON_S, where + job.report()
                if NAMES:
                    named = any(job.name(rank) in event.facts["text"] for rank in dead)
                    assert event.facts["is_fault"] and named, where + job.report()
            assert_ended_cleanly(job, survivors)
    print(
        f"{ROUNDS} rounds: kill to raise median {statistics.median(times_s) * 1e3:.1f} ms, "
        f"max {max(times_s) * 1e3:.1f} ms"
    )
