"""Groups that cannot be formed: all ranks get an error in time, whatever happens to the store."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.cases.rank_processes import Job, World

TIMEOUT_S = 3.0
KEEPER = 2  # keeps the store; in no group


def _form_after_a_death(world: World) -> None:
    world.init()
    dist.barrier()
    world.say("ready")
    world.hear()
    began_s = time.monotonic()
    try:
        dist.new_group(timeout=timedelta(minutes=30))
    except RuntimeError as error:
        world.say("told", text=str(error), took_s=time.monotonic() - began_s)


def test_new_group_after_a_known_death_names_the_dead_rank() -> None:
    with Job(3, _form_after_a_death) as job:
        job.wait_for("ready")
        job.kill(2)
        job.finish([2])
        job.tell("go", [0, 1])
        for event in job.wait_for("told", [0, 1]):
            text = event.facts["text"]
            assert "forming group" in text, text
            assert "rank 2 (pid" in text and "died or exited" in text, text
            assert event.facts["took_s"] < 30, event


def _form_without_a_store(world: World) -> tuple[str, float]:
    store = world.tcp_store(KEEPER)
    if world.rank == KEEPER:
        world.say("ready")
        world.hear()
        return "", 0.0
    world.size = 2
    world.init(store=store)
    dist.barrier()
    world.say("ready")
    world.hear()
    text, began_s = "", time.monotonic()
    try:
        dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    except RuntimeError as error:
        text = str(error)
    took_s = time.monotonic() - began_s
    # Calls that need no store go on.
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
    world.say("told")
    return text, took_s


def test_new_group_with_a_stopped_store_times_out() -> None:
    with Job(KEEPER + 1, _form_without_a_store) as job:
        job.wait_for("ready")
        job.kill(KEEPER, signal.SIGSTOP)
        job.tell("go", [0, 1])
        job.wait_for("told", [0, 1])
        job.kill(KEEPER, signal.SIGCONT)
        job.tell("go", [KEEPER])
        for text, took_s in job.results()[:KEEPER]:
            assert "forming group" in text, text
            assert re.search("timed out after .*: the store .* did not answer", text), text
            assert TIMEOUT_S <= took_s < 3 * TIMEOUT_S, (text, took_s)


def test_new_group_after_the_stores_death_names_its_address_and_rank_0() -> None:
    with Job(KEEPER + 1, _form_without_a_store) as job:
        job.wait_for("ready")
        job.kill(KEEPER)
        job.finish([KEEPER])
        job.tell("go", [0, 1])
        job.wait_for("told", [0, 1])
        job.finish()
        for rank in (0, 1):
            returned = job.first(rank, "returned")
            assert returned is not None, job.report()
            text, took_s = returned.facts["value"]
            # torch without a launcher takes rank 0 for the keeper.
            assert "which the job's rank 0 keeps at 127.0.0.1:" in text, text
            assert took_s < TIMEOUT_S, (text, took_s)
