"""Stopped ranks: named with their state at the timeout, and no error before it."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.cases.rank_processes import Job, World, names_rank
from tests.cases.workloads import checked_calls

RANKS = 3
TIMEOUT_S = 2.0


def _works(world: World, kind: str, with_messages: bool) -> None:
    world.init(timeout_s=TIMEOUT_S)
    dist.barrier()
    world.say("working")

    def step(number: int) -> None:
        if with_messages:
            # All wait for rank 1 directly: in a ring some would wait for waiting ranks.
            peers = [0, 2] if world.rank == 1 else [1]
            works = [dist.isend(torch.ones(20), peer) for peer in peers]
            for peer in peers:
                dist.recv(torch.empty(20), peer)
            for work in works:
                work.wait()
        elif kind == "asynchronous":
            dist.all_reduce(torch.ones(1000), async_op=True).wait()
        else:
            dist.all_reduce(torch.ones(1000))

    world.until_raised(step)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "messages"])
def test_rank_stopped_past_the_timeout_is_named(kind: str) -> None:
    stopped = 1
    with Job(RANKS, _works, kind, kind == "messages") as job:
        job.wait_for("working")
        time.sleep(0.05)
        at_s = job.kill(stopped, signal.SIGSTOP)
        for event in job.wait_for("raised", [0, 2]):
            text = event.facts["text"]
            assert names_rank(text, stopped, job.pids[stopped]), job.report()
            assert "which is stopped (state T)" in text, job.report()
            assert f"continue the stopped process: kill -CONT {job.pids[stopped]} on host" in text
            assert "timed out after 2 s" in text, job.report()
            # The wait may have begun just before the stop.
            assert TIMEOUT_S - 0.5 < event.at_s - at_s < TIMEOUT_S + 1.0, job.report()
        job.finish([0, 2])
        # The stopped rank gets the same error once it runs again.
        job.kill(stopped, signal.SIGCONT)
        event = job.wait_for("raised", [stopped])[0]
        assert "timed out" in event.facts["text"], job.report()
        assert f"rank {stopped} (pid {job.pids[stopped]} " in event.facts["text"], job.report()
        assert "), this rank, which is stopped" in event.facts["text"], job.report()
        job.finish()
        assert list(job.exit_codes.values()) == [0] * RANKS, job.report()


def test_rank_stopped_briefly_raises_nothing() -> None:
    with Job(RANKS, checked_calls, 3.0) as job:
        job.wait_for("working")
        for round_number in range(20):
            rank = round_number % RANKS
            job.kill(rank, signal.SIGSTOP)
            time.sleep(0.05)
            job.kill(rank, signal.SIGCONT)
            time.sleep(0.03)
        counts = job.results()
        assert len(set(counts)) == 1 and counts[0] > 0


STOP_S = 2.0  # longer than the timeouts below


def _waits_through_a_stop(world: World, kind: str) -> float:
    """Rank 0 computes while the others wait for it, and all are stopped meanwhile. With messages it
    is rank 1: rank 2 waits for its message, and rank 0 for both in a monitored barrier."""
    if kind == "composed":
        world.compose()
    world.init(timeout_s=1.5)
    total = torch.ones(1000)
    dist.all_reduce(total)
    world.say("waiting")
    if world.rank == (1 if kind == "messages" else 0):
        end_s = time.monotonic() + 0.7 + STOP_S
        while time.monotonic() < end_s:  # the time of the stop counts here
            time.sleep(0.01)
    # Expires during the stop; the timeout of the group does not.
    limit = timedelta(seconds=1.2)
    if kind == "messages":
        if world.rank == 1:
            dist.send(torch.ones(5), 2)
        elif world.rank == 2:
            receive = dist.irecv(torch.empty(5), 1)
            assert receive is not None
            receive.wait(limit)
        dist.distributed_c10d._get_default_group().monitored_barrier(limit)
        dist.all_reduce(total)
    elif kind == "limit":
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait(limit)
    elif kind == "asynchronous":
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
    else:
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total[-1].item()


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "limit", "messages", "composed"])
def test_job_stopped_as_a_whole_continues(kind: str) -> None:
    """Time in which a process did not run does not count towards its deadlines."""
    ranks = 4 if kind == "composed" else RANKS
    with Job(ranks, _waits_through_a_stop, kind) as job:
        job.wait_for("waiting")
        time.sleep(0.3)
        for rank in range(ranks):
            job.kill(rank, signal.SIGSTOP)
        time.sleep(STOP_S)
        # Waiting ranks continue first, one after another.
        for rank in reversed(range(ranks)):
            job.kill(rank, signal.SIGCONT)
            time.sleep(0.05)
        assert job.results() == [float(ranks * ranks)] * ranks
