"""The work of ranks when a fault happens, and the checks of the survivors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import deepspeed_comm
from tests.cases.rank_processes import SOON_S, Job, World, memory_descriptors, names_rank

# More than a group's staging: a rank can be killed between two chunks.
LARGE = 600_000


Step = Callable[[World, int], None]


def small_all_reduce(world: World, number: int) -> None:
    dist.all_reduce(torch.ones(8))


def chunked_all_reduce(world: World, number: int) -> None:
    dist.all_reduce(torch.ones(LARGE))


def asynchronous(world: World, number: int) -> None:
    works = [dist.all_reduce(torch.ones(2000), async_op=True) for _ in range(6)]
    for work in works:
        work.wait()


def asynchronous_large(world: World, number: int) -> None:
    works = [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def mixed(world: World, number: int) -> None:
    size = world.size
    dist.barrier()
    dist.broadcast(torch.ones(3000), number % size)
    dist.all_gather([torch.empty(500) for _ in range(size)], torch.ones(500))
    dist.reduce(torch.ones(700), number % size)
    dist.all_to_all_single(torch.empty(40 * size), torch.ones(40 * size))


def in_place(world: World, number: int) -> None:
    """All ranks except the last pass tensors that others read in place."""
    size = world.size
    make = deepspeed_comm.empty if world.rank < size - 1 else torch.empty
    tensor = make(LARGE).fill_(1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()
    gathered = make(LARGE)
    dist.all_gather_into_tensor(gathered, tensor[: LARGE // size])
    dist.broadcast(tensor, number % size)


def ring(world: World, number: int) -> None:
    """Messages around a ring: every rank waits for a neighbour."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    count = LARGE if number % 5 == 4 else 50
    work = dist.isend(torch.ones(count), right)
    dist.recv(torch.empty(count), left)
    work.wait()


WORKLOADS: list[Step] = [
    small_all_reduce,
    chunked_all_reduce,
    asynchronous,
    asynchronous_large,
    mixed,
    in_place,
    ring,
]


def work_until_raised(world: World, step: Step) -> None:
    os.environ["DSCOMM_IN_PLACE_BYTES"] = "0"  # a low threshold, so that steps are short
    world.init()
    dist.barrier()
    world.say("working")
    world.until_raised(lambda number: step(world, number))
    # The first cause persists, and the process can destroy its group and make another.
    canary = torch.full((9,), 5.0)
    try:
        dist.all_reduce(canary)
    except RuntimeError as error:
        world.say("raised again", text=str(error))
    assert canary.tolist() == [5.0] * 9
    dist.destroy_process_group()
    # Only its own arena and pool are open: those of peers are closed once they are mapped.
    world.say("destroyed", descriptors=len(memory_descriptors()))


def checked_calls(world: World, seconds: float) -> int:
    """Checks the results of many calls of various sizes for a while."""
    world.init()
    dist.barrier()
    world.say("working")
    end_s = time.monotonic() + seconds
    number = 0
    running = torch.ones(1)
    while running.item() > 0:
        count = (3, 4000, 200_000)[number % 3]
        base = torch.arange(count, dtype=torch.float32) % 1000
        tensor = base * (world.rank + 1) + number
        dist.all_reduce(tensor)
        total = world.size * (world.size + 1) // 2
        assert torch.equal(tensor, base * total + number * world.size), number
        peer = torch.full((50,), float(number))
        dist.broadcast(peer, number % world.size)
        if world.rank == 0:
            dist.send(peer, 1)
        elif world.rank == 1:
            got = torch.zeros(50)
            dist.recv(got, 0)
            assert torch.equal(got, peer)
        number += 1
        # All ranks stop after the same call.
        running = torch.tensor([1.0 if time.monotonic() < end_s else 0.0])
        dist.all_reduce(running, dist.ReduceOp.MIN)
    dist.destroy_process_group()
    return number


def every_size(world: World) -> None:
    """Sizes below and above every threshold, messages, and several groups."""
    world.init()
    size = world.size
    for count in (5, 4000, 700_000):
        tensor = torch.full((count,), float(world.rank))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(size))).all()
        gathered = [torch.empty(count) for _ in range(size)]
        dist.all_gather(gathered, torch.full((count,), float(world.rank)))
        assert [part[-1].item() for part in gathered] == list(range(size))
        if world.rank == 0:
            dist.send(tensor, 1)
        elif world.rank == 1:
            dist.recv(tensor, 0)
    groups = [dist.new_group() for _ in range(20)]
    for group in groups:
        dist.all_reduce(torch.ones(100_000), group=group)
    dist.destroy_process_group()


@contextlib.contextmanager
def memory_turn_held() -> Iterator[None]:
    """Simulates a process of another job that is stopped while it reserves memory."""
    path = "/proc/self/ns/time" if os.path.exists("/proc/self/ns/time") else "/proc/self/ns/user"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_survivors(job: Job, dead: list[int], at_s: float, limit_s: float = SOON_S) -> list[float]:
    """Every survivor raised soon, named a dead rank, and ended in order; returns their times."""
    survivors = [rank for rank in range(job.size) if rank not in dead]
    took = []
    for event in job.wait_for("raised", survivors, limit_s=20):
        text = event.facts["text"]
        assert event.facts["is_fault"], job.report()
        assert any(names_rank(text, r, job.pids[r]) for r in dead), f"{text}\n{job.report()}"
        took.append(event.at_s - at_s)
    job.finish(survivors)
    for rank in survivors:
        assert job.exit_codes[rank] == 0, job.report()
        again = job.first(rank, "raised again")
        first = job.first(rank, "raised")
        assert again is not None and first is not None, job.report()
        destroyed = job.first(rank, "destroyed")
        assert destroyed is not None, job.report()
        assert destroyed.facts == {"descriptors": 2}, job.report()
        texts = [cause(event.facts["text"]) for event in (again, first)]
        assert is_of_later_call(*texts), job.report()
    assert max(took) < limit_s, f"{took}\n{job.report()}"
    return took


def cause(text: str) -> str:
    """A message without its prefix, which names the call that raised it."""
    return text.split(": ", 2)[-1]


def is_of_later_call(text: str, first: str) -> bool:
    """Whether `text` is the cause that a call made after the end of its group gives. `first` is the
    cause of an earlier call: the one that ended the group, or one made just after a pending message
    had ended it."""
    prefix = r"group '\w+' ended earlier: "
    return re.fullmatch(prefix + re.escape(re.sub(f"^{prefix}", "", first)), text) is not None
