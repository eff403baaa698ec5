"""After an error: it persists, nothing is written, other groups go on, a new start works."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_comm
from tests.cases.rank_processes import SOON_S, Job, World, names_rank
from tests.cases.workloads import cause, is_of_later_call

RANKS = 4
CANARY = 41.0

needs_abort = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "_get_backend"), reason="torch 1.13 has no abort"
)


def _raises(call: Any) -> str:
    began_s = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        assert time.monotonic() - began_s < SOON_S
        return cause(str(error))
    raise AssertionError("nothing raised")


def _every_call_after(world: World) -> list[str]:
    """One rank dies; every later call of the others raises at once and names the first cause."""
    world.init()
    group = dist.new_group()
    pair = dist.new_group([0, 1])
    dist.barrier()
    if world.rank == 3:
        os._exit(1)
    canary = torch.full((world.size * 1000,), CANARY)
    parts = [torch.full((1000,), CANARY) for _ in range(world.size)]
    peer = (world.rank + 1) % 3
    calls = [
        lambda: dist.all_reduce(canary, group=group),
        lambda: dist.all_reduce(canary, group=group),
        lambda: dist.all_reduce(canary, group=group, async_op=True).wait(),
        lambda: dist.broadcast(canary, 1, group=group),
        lambda: dist.reduce(canary, 1, group=group),
        lambda: dist.all_gather(parts, torch.ones(1000), group=group),
        lambda: dist.all_to_all_single(canary, torch.ones_like(canary), group=group),
        lambda: dist.reduce_scatter(parts[0], [torch.ones(1000)] * world.size, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.send(canary, peer, group=group),
        lambda: dist.recv(canary, peer, group=group),
        lambda: dist.isend(canary, peer, group=group).wait(),
        lambda: dist.irecv(canary, peer, group=group).wait(),
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        lambda: deepspeed_comm.all_reduce(canary, group=group),
        lambda: deepspeed_comm.all_reduce(canary, group=group, async_op=True).wait(),
        lambda: deepspeed_comm.all_reduce_caching(canary, match_id="a", group=group),
        lambda: deepspeed_comm.send(canary, peer, group=group),
        lambda: deepspeed_comm.recv(canary, peer, group=group),
        lambda: deepspeed_comm.inference_all_reduce(canary, group=group),
    ]
    texts = [_raises(call) for call in calls]
    assert all(is_of_later_call(text, texts[0]) for text in texts[1:]), texts
    assert canary.eq(CANARY).all() and all(part.eq(CANARY).all() for part in parts)
    # A group without the dead rank is not affected.
    if world.rank < 2:
        total = torch.ones(5000)
        dist.all_reduce(total, group=pair)
        assert total.eq(2).all()
    return texts


def test_call_after_the_end_of_the_group_names_the_first_cause() -> None:
    with Job(RANKS, _every_call_after) as job:
        job.finish()
        for rank in range(3):
            event = job.first(rank, "returned")
            assert event is not None, job.report()
            assert names_rank(event.facts["value"][0], 3, job.pids[3]), job.report()


def _overlapping(world: World) -> dict[str, str]:
    """Three queued calls and a message in flight when rank 1 dies, and one that follows."""
    world.init()
    dist.barrier()
    if world.rank == 1:
        world.say("here")
        world.hear()
        os._exit(1)
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    works.append(dist.irecv(torch.ones(3), 1))
    world.say("queued")
    texts = {f"call {number}": _raises(work.wait) for number, work in enumerate(works)}
    texts["later"] = _raises(lambda: dist.all_reduce(torch.ones(3), async_op=True))
    texts["wait again"] = _raises(works[0].wait)
    return texts


def test_call_queued_before_end_of_group_raises_the_first_error() -> None:
    with Job(2, _overlapping) as job:
        job.wait_for("queued", [0])
        job.tell("go", [1])
        job.finish([0])
        event = job.first(0, "returned")
        assert event is not None, job.report()
        texts = event.facts["value"]
        first = texts["call 0"]
        assert is_of_later_call(texts.pop("later"), first), job.report()
        assert names_rank(first, 1, job.pids[1]) and set(texts.values()) == {first}, texts


def _writes_late(world: World, asynchronous: bool) -> float:
    """Rank 1 stops during large calls; afterwards the others' tensors must not change."""
    world.init(timeout_s=1.5)
    source = torch.ones(3_000_000)
    dist.barrier()
    world.say("working")
    number = 0
    while True:
        tensor = source.clone()
        try:
            if asynchronous:
                dist.all_reduce(tensor, async_op=True).wait()
            else:
                dist.all_reduce(tensor)
        except RuntimeError as error:
            # From here on the tensor belongs to the user.
            tensor.fill_(CANARY)
            world.say_raised(error)
            world.hear()
            time.sleep(0.5)
            assert tensor.eq(CANARY).all()
            return CANARY
        assert tensor.eq(world.size).all(), number
        number += 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_are_not_written_after_the_error(asynchronous: bool) -> None:
    with Job(RANKS, _writes_late, asynchronous) as job:
        job.wait_for("working")
        time.sleep(0.03)
        job.kill(1, signal.SIGSTOP)
        job.wait_for("raised", [0, 2, 3])
        # Rank 1 continues, and gets the error.
        job.kill(1, signal.SIGCONT)
        job.wait_for("raised", [1])
        job.tell("look")
        assert job.results() == [CANARY] * RANKS


def _starts_again(world: World, rounds: int) -> int:
    """An error (a mismatch, a member that leaves) ends each round; the next round starts anew."""
    for number in range(rounds):
        world.init(name=f"world{number}")
        total = torch.ones(70_000)
        dist.all_reduce(total)
        assert total.eq(world.size).all()
        # The error also ends calls that are still in progress.
        world.say(f"done {number}")
        world.hear()
        odd = world.rank == number % world.size
        _raises(lambda odd=odd: [dist.all_reduce(torch.ones(6 if odd else 5)) for _ in range(2)])
        dist.destroy_process_group()
    return rounds


def test_new_world_in_the_same_processes_works() -> None:
    with Job(RANKS, _starts_again, 10) as job:
        for number in range(10):
            job.wait_for(f"done {number}")
            job.tell("go")
        assert job.results() == [10] * RANKS


def _goes_on_without(world: World) -> float:
    """The survivors of a death make a smaller world in the same processes."""
    world.init()
    world.say("ready")
    world.hear()
    if world.rank == 2:
        os._exit(1)
    _raises(lambda: dist.all_reduce(torch.ones(3)))
    dist.destroy_process_group()
    survivors = [0, 1, 3]
    world.rank, world.size = survivors.index(world.rank), 3
    world.init(name="smaller")
    total = torch.ones(70_000)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total[-1].item()


def test_survivors_of_a_death_make_a_smaller_world() -> None:
    with Job(RANKS, _goes_on_without) as job:
        job.wait_for("ready")
        job.tell("go")
        job.finish()
        for rank in (0, 1, 3):
            event = job.first(rank, "returned")
            assert event is not None and event.facts["value"] == 3.0, job.report()


def _abort(world: World) -> str:
    world.init()
    world.say("ready")
    world.hear()
    if world.rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.abort()
        return _raises(lambda: dist.all_reduce(torch.ones(3)))
    return _raises(lambda: dist.all_reduce(torch.ones(3)))


@needs_abort
def test_abort_raises_on_all_ranks_and_names_the_aborter() -> None:
    with Job(RANKS, _abort) as job:
        job.wait_for("ready")
        job.tell("go")
        texts = job.results()
    assert "aborted by rank 0" in texts[1], texts
    # The rank that aborted has known of the end before its call.
    assert is_of_later_call(texts[0], texts[1]) and len(set(texts[1:])) == 1, texts


def _aborts_once_done(world: World, tries: int, composed: bool) -> list[str]:
    """Rank 0 aborts as soon as its own call has returned: returns the errors of each rank's same
    call, and whether the next call raises."""
    if composed:
        world.compose()
    world.init()
    raised = []
    for number in range(tries):
        group = dist.new_group()
        total = torch.ones((3, 5000)[number % 2])
        try:
            dist.all_reduce(total, group=group)
            assert total.eq(world.size).all()
        except RuntimeError as error:
            raised.append(str(error))
        if world.rank == 0:
            group._get_backend(torch.device("cpu")).abort()
        text = _raises(lambda group=group: dist.all_reduce(torch.ones(3), group=group))
        assert "aborted by rank 0" in text
    return raised


@needs_abort
@pytest.mark.parametrize("composed", [False, True], ids=["flat", "composed"])
def test_call_completed_by_aborting_rank_completes_on_all_ranks(composed: bool) -> None:
    """A call that has completed on the aborting rank completes on all ranks."""
    with Job(RANKS, _aborts_once_done, 30, composed) as job:
        assert job.results() == [[]] * RANKS


def _calls_after_an_abort(world: World, asynchronous: bool, composed: bool) -> list[float]:
    """Rank 0 completes a broadcast and aborts before the others make the call."""
    if composed:
        world.compose()
    world.init()
    values = []
    for number in range(6):
        group = dist.new_group()
        tensor = torch.full(((3, 5000)[number % 2],), float(number) if world.rank == 0 else -1.0)
        if world.rank == 0:
            dist.broadcast(tensor, 0, group=group)
            group._get_backend(torch.device("cpu")).abort()
        world.say(f"aborted {number}")
        world.hear()
        if world.rank != 0:
            work = dist.broadcast(tensor, 0, group=group, async_op=asynchronous)
            if work is not None:
                work.wait()
            values.append(tensor[-1].item())
        text = _raises(lambda group=group: dist.all_reduce(torch.ones(3), group=group))
        assert "aborted by rank 0" in text
    return values


@needs_abort
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("composed", [False, True], ids=["flat", "composed"])
def test_late_broadcast_gets_data_that_root_sent_before_abort(
    asynchronous: bool, composed: bool
) -> None:
    with Job(RANKS, _calls_after_an_abort, asynchronous, composed) as job:
        for number in range(6):
            job.wait_for(f"aborted {number}", [0])
            job.tell("go")
        expected = [float(number) for number in range(6)]
        assert job.results() == [[], expected, expected, expected]


def _waits_in_vain(world: World) -> str:
    world.init()
    if world.rank == 1:
        world.hear()
        return ""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    return _raises(lambda: work.wait(timedelta(seconds=0.2)))


def test_wait_past_its_limit_says_timed_out() -> None:
    with Job(2, _waits_in_vain) as job:
        event = job.wait_for("returned", [0])[0]
        job.tell("go", [1])
        job.finish()
        assert "timed out" in event.facts["value"], job.report()
