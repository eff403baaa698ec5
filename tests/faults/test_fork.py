"""Processes forked after the group was made: their calls raise, and the parent is unaffected."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import deepspeed_comm
from tests.cases.rank_processes import (
    SOON_S,
    Job,
    World,
    memory_descriptors,
    memory_mappings,
    names_rank,
    sockets_of,
)

RANKS = 3


def _in_child(function: object) -> str:
    """The output of a forked child, which must end by itself within 20 s."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            text = str(function())  # type: ignore[operator]
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    text = ""
    while part := os.read(reading, 65536):
        text += part.decode()
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (status, text)
    return text


def _calls_in_child(world: World) -> list[str]:
    world.init()
    group = dist.new_group()
    dist.all_reduce(torch.ones(100_000))
    calls = [
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(300_000), async_op=True).wait(),
        lambda: dist.barrier(group=group),
        lambda: dist.send(torch.ones(3), (world.rank + 1) % world.size),
        lambda: dist.recv(torch.ones(3), (world.rank + 1) % world.size),
    ]
    said = [_in_child(call) for call in calls]
    # Garbage collection and destruction in the child do not affect the parent.
    said.append(_in_child(lambda: dist.destroy_process_group()))
    # During a call of the parent; the child also waits for the parent's pending calls.
    work = dist.all_reduce(torch.ones(500_000), async_op=True)
    said.append(_in_child(calls[0]))
    work.wait()
    received = torch.zeros(3)
    message = dist.irecv(received, (world.rank + 1) % world.size)
    said.append(_in_child(message.wait))
    dist.barrier()  # no rank sends before all have run their children
    dist.send(torch.ones(3), (world.rank - 1) % world.size)
    message.wait()
    assert received.tolist() == [1.0] * 3
    for number in range(20):
        total = torch.full((20_000,), float(number))
        dist.all_reduce(total)
        assert total[0].item() == number * world.size
    dist.destroy_process_group()
    return said


def test_call_in_forked_child_raises() -> None:
    with Job(RANKS, _calls_in_child) as job:
        for rank, said in enumerate(job.results()):
            *calls, destroyed, amid, waited = said
            for text in [*calls, amid, waited]:
                assert f"was forked from pid {job.pids[rank]} after the group was made" in text, (
                    said
                )
            assert destroyed == "None", said


def _reads_in_child(world: World) -> list[str]:
    """A child's view of tensors that peers of its parent read."""
    world.init()
    tensor = deepspeed_comm.empty(50_000).fill_(1)

    def child() -> str:
        before = tensor.sum().item()
        tensor.fill_(7)  # the child's own copy
        other = deepspeed_comm.empty(50_000).fill_(7)
        sums = (before, tensor.sum().item(), other.sum().item())
        del other
        return str(sums)

    said = [_in_child(child)]
    dist.all_reduce(tensor)
    said.append(str(tensor.sum().item()))
    again = deepspeed_comm.empty(50_000)
    assert again.data_ptr() != tensor.data_ptr()
    dist.destroy_process_group()
    return said


def test_forked_child_reads_pool_tensors() -> None:
    with Job(RANKS, _reads_in_child) as job:
        sums = "(50000.0, 350000.0, 350000.0)"
        assert job.results() == [[sums, str(50000.0 * RANKS)]] * RANKS


def _makes_its_own(world: World) -> list[str]:
    """Children of all ranks make a new group, in which everything works."""
    world.init()
    dist.barrier()

    def child() -> float:
        dist.distributed_c10d._world.pg_map.clear() if hasattr(
            dist.distributed_c10d, "_world"
        ) else None
        dist.distributed_c10d.GroupMember.WORLD = None
        world.init(name="children")
        total = torch.ones(100_000)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total[0].item()

    said = [_in_child(child)]
    total = torch.ones(3)
    dist.all_reduce(total)
    said.append(str(total[0].item()))
    dist.destroy_process_group()
    return said


def test_forked_children_can_form_a_group() -> None:
    with Job(RANKS, _makes_its_own) as job:
        assert job.results() == [["3.0", "3.0"]] * RANKS


class _Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((10,), float(index))


def _loads_data(world: World) -> float:
    world.init()
    dist.all_reduce(torch.ones(100_000))
    total = 0.0
    for _ in range(2):
        for batch in DataLoader(_Numbers(), batch_size=8, num_workers=2):
            work = dist.all_reduce(batch, async_op=True)
            work.wait()
            total += batch[:, 0].sum().item()
    dist.destroy_process_group()
    return total


def test_data_loader_workers_do_not_disturb_training() -> None:
    with Job(2, _loads_data) as job:
        assert job.results() == [2.0 * 2 * sum(range(64))] * 2


def _has_a_child(world: World, exit_early: bool) -> None:
    world.init()
    dist.barrier()
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            if exit_early:
                os._exit(0)
            time.sleep(30)  # longer than the case; the job kills it
            os._exit(0)
        if exit_early:
            os.waitpid(child, 0)
            # The child's end must not look like its parent's.
            for _ in range(50):
                dist.all_reduce(torch.ones(3000))
                time.sleep(0.002)
        world.say("working", child=child)
    else:
        if exit_early:
            for _ in range(50):
                dist.all_reduce(torch.ones(3000))
                time.sleep(0.002)
        world.say("working")
    world.until_raised(lambda number: dist.all_reduce(torch.ones(3000)))
    dist.destroy_process_group()


@pytest.mark.parametrize("exit_early", [False, True])
def test_death_of_parent_is_noticed_while_its_child_lives(exit_early: bool) -> None:
    """The child inherited the parent's descriptors; the parent's death must still be noticed."""
    with Job(RANKS, _has_a_child, exit_early) as job:
        child = job.wait_for("working")[1].facts["child"]
        time.sleep(0.05)
        at_s = job.kill(1)
        for event in job.wait_for("raised", [0, 2]):
            assert names_rank(event.facts["text"], 1, job.pids[1]), job.report()
            assert event.at_s - at_s < SOON_S, job.report()
        job.finish([0, 2])
        assert Path(f"/proc/{child}").exists() == (not exit_early)
        if not exit_early:
            # It must hold neither the parent's memory nor its sockets.
            assert memory_descriptors(child) == memory_mappings(child) == sockets_of(child) == []
            os.kill(child, signal.SIGKILL)
