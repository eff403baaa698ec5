"""Nothing is left behind or open to other users, and jobs of one host do not affect each other."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_comm._plugin import load_extension
from tests.cases.rank_processes import (
    TORCH_2,
    Job,
    ProcessResources,
    World,
    memory_mappings,
    process_state,
    processes_of_session,
    sockets_of,
)

RANKS = 3
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def _works_forever(world: World) -> None:
    world.init()
    world.say("working")
    while True:
        dist.all_reduce(torch.ones(100_000))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        work = dist.isend(torch.ones(20), right)
        dist.recv(torch.empty(20), left)
        work.wait()


@pytest.mark.parametrize(
    "attempt", [n if n in (1, 6) else pytest.param(n, marks=pytest.mark.drill) for n in range(8)]
)
def test_kill_of_all_ranks_leaves_nothing(attempt: int) -> None:
    """Kills at any time of a job, even before the first socket is made."""
    with Job(RANKS, _works_forever) as job:
        if attempt >= 4:
            job.wait_for("working")
        time.sleep(random.Random(attempt).uniform(0.0, 0.1))
        resources = ProcessResources(job.pids)
        for rank in range(RANKS):
            job.kill(rank)
        job.finish()
        if attempt >= 4:
            assert len(resources.memory) == 2 * RANKS  # an arena and a pool each
            assert len(resources.sockets) == 2 * RANKS  # a listening socket and a doorbell each
        assert resources.left_behind() == ""


TORCHRUN_SCRIPT = """
import os
import torch, torch.distributed as dist
import deepspeed_comm
dist.init_process_group("dscomm")
dist.barrier()
os.write(1, b"working\\n")
while True:
    dist.all_reduce(torch.ones(20000))
"""


@pytest.mark.parametrize("whom", ["torchrun and ranks", "torchrun alone"])
def test_kill_of_torchrun_leaves_nothing(whom: str, tmp_path: Path) -> None:
    """If only torchrun is killed, its ranks work on; once one is killed too, the other one ends."""
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    if not TORCH_2:
        # torch 1.13 with Python 3.11 rejects its own default, which redirects nothing.
        command += ["--redirects=1", "--tee=1"]
    agent = subprocess.Popen(
        [*command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    ranks: list[int] = []
    try:
        assert agent.stdout is not None
        for _ in range(2):
            assert agent.stdout.readline().rstrip().endswith("working")
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if sockets_of(int(pid))]
        assert len(ranks) == 2, children
        resources = ProcessResources([agent.pid, *ranks])
        assert len(resources.memory) == 4
        agent.kill()
        agent.wait(10)
        if whom == "torchrun and ranks":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        else:
            # They run in other sessions or process groups, so they work on without the agent. The
            # survivor of a kill ends by itself with an error.
            time.sleep(0.3)
            os.kill(ranks[0], signal.SIGKILL)
        assert resources.left_behind(limit_s=15) == ""
    finally:
        agent.kill()
        agent.wait(10)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.stdout and agent.stdout.close()


# --- other users and jobs


def _waits(world: World) -> float:
    """A job that waits for a message from the test, then works."""
    world.init()
    dist.barrier()
    world.say("ready")
    world.hear()
    total = torch.full((50_000,), 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total[0].item()


def _memory_paths(pid: int) -> list[str]:
    """The paths of a process's arena and pool."""
    paths = {os.readlink(entry): str(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return [paths[f"/memfd:dscomm-{name} (deleted)"] for name in ("arena", "pool")]


def _as_nobody(paths: list[str], names: list[str]) -> dict[str, str]:
    """Runs in a separate child: the results of another user's attempts."""
    os.setgid(65534)
    os.setuid(65534)
    got = {}
    for path in paths:
        for flags in (os.O_RDONLY, os.O_RDWR):
            try:
                os.close(os.open(path, flags))
                got[path] = "opened"
            except OSError as error:
                got.setdefault(path, error.strerror)
    for name in names:
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind) as endpoint:
                endpoint.settimeout(2)
                try:
                    endpoint.connect("\0" + name[1:])
                except OSError as error:
                    got.setdefault(name, error.strerror)
                    continue
                if kind == socket.SOCK_DGRAM:
                    # The doorbell accepts a byte from any sender: a false alarm, nothing else.
                    got[name] = "doorbell"
                    endpoint.send(b"x")
                    continue
                try:
                    endpoint.send(b"x" * 32)
                    message, descriptors, _, _ = socket.recv_fds(endpoint, 100, 4)
                    got[name] = f"got {len(message)} bytes and {len(descriptors)} descriptors"
                except OSError as error:
                    got[name] = error.strerror
    return got


def _tries_as_nobody(world: World, paths: list[str], names: list[str]) -> dict[str, str]:
    return _as_nobody(paths, names)


@needs_root
def test_another_user_cannot_read_memory_or_disturb_ranks() -> None:
    with Job(RANKS, _waits) as job:
        job.wait_for("ready")
        paths = [path for pid in job.pids for path in _memory_paths(pid)]
        names = [name for pid in job.pids for name in sockets_of(pid)]
        with Job(1, _tries_as_nobody, paths, names) as stranger:
            got = stranger.results()[0]
        assert [got[path] for path in paths] == ["Permission denied"] * 2 * RANKS, got
        listeners = [name for name in names if got[name] != "doorbell"]
        assert len(listeners) == RANKS, got
        for name in listeners:
            assert got[name] in (
                "got 0 bytes and 0 descriptors",
                "Connection reset by peer",
                "Broken pipe",
            ), got
        job.tell("go")
        assert job.results() == [float(RANKS)] * RANKS


def _joins(world: World, folder: str) -> str:
    """The last rank becomes another user before it makes its group."""
    world.folder = folder
    # Loaded before, because that user may not be able to read the checkout.
    load_extension()
    if world.rank == world.size - 1:
        os.setgid(65534)
        os.setuid(65534)
    try:
        world.init(timeout_s=5)
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return ""


@needs_root
def test_rank_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="dscomm-test-") as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / "world").touch()
        os.chmod(Path(folder) / "world", 0o666)
        with Job(RANKS, _joins, folder) as job:
            texts = job.results()
    for text in texts:
        assert "it runs as another user" in text, texts


def test_deaths_in_one_job_do_not_affect_other_jobs() -> None:
    """Concurrent jobs with the same group names: deaths in one do not affect the other."""
    with Job(2, _waits) as first, Job(RANKS, _works_forever) as second, Job(2, _waits) as third:
        for job, word in ((first, "ready"), (second, "working"), (third, "ready")):
            job.wait_for(word)
        names = [
            name for job in (first, second, third) for pid in job.pids for name in sockets_of(pid)
        ]
        assert len(set(names)) == len(names) == 2 * (2 + RANKS + 2)
        for rank in range(RANKS):
            second.kill(rank)
        second.finish()
        for job in (first, third):
            job.tell("go")
            assert job.results() == [2.0, 2.0]


F_ADD_SEALS, F_GET_SEALS = 1033, 1034


def test_shared_memory_is_sealed() -> None:
    """A process of the same user that opens the memory can neither shrink nor write it."""
    with Job(2, _waits) as job:
        job.wait_for("ready")
        for path in (path for pid in job.pids for path in _memory_paths(pid)):
            descriptor = os.open(path, os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                for length in (0, size // 2, size + 4096):
                    with pytest.raises(PermissionError):
                        os.ftruncate(descriptor, length)
                with pytest.raises(PermissionError):
                    os.pwrite(descriptor, b"x", 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(PermissionError):
                    fcntl.fcntl(descriptor, F_ADD_SEALS, 0x8)
                with mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as page:
                    assert len(page[:64]) == 64
            finally:
                os.close(descriptor)
        for pid in job.pids:
            # A rank cannot write its mappings of its peers; it can write its own arena and pool.
            writable = [
                line
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if "/memfd:dscomm-" in line and re.search(r" rw", line)
            ]
            assert len({line.split()[4] for line in writable}) == 2
            assert len(memory_mappings(pid)) == 4
        job.tell("go")
        assert job.results() == [2.0, 2.0]


def test_search_for_leftovers_finds_existing_resources() -> None:
    """The search for leftovers finds existing resources."""
    with Job(1, _waits_alone) as job:
        job.wait_for("ready")
        resources = ProcessResources(job.pids)
        assert f"process {job.pids[0]}" in resources.left_behind(limit_s=0)
        assert process_state(job.pids[0]) in "RSD"
        assert processes_of_session(job.pids[0]) == job.pids
        file = Path("/dev/shm/dscomm-left-behind")
        file.touch()
        assert str(file) in resources.left_behind(limit_s=0)
        file.unlink()


def _waits_alone(world: World) -> None:
    world.say("ready")
    world.hear()
