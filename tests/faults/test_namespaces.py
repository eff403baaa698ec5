"""Containers of one pod: separate PID namespaces, one network, and shared memory still works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.rank_processes import SOON_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import deepspeed_comm
torch.set_num_threads(1)
folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(os.path.join(folder, "store"), size)
dist.init_process_group("dscomm", store=store, rank=rank, world_size=size,
                        timeout=timedelta(seconds=20))
for count in (3, 4000, 500_000):
    total = torch.full((count,), float(rank))
    dist.all_reduce(total)
    assert total.eq(sum(range(size))).all()
message = torch.full((100,), float(rank))
work = dist.isend(message, (rank + 1) % size)
got = torch.zeros(100)
dist.recv(got, (rank - 1) % size)
work.wait()
assert got[0].item() == (rank - 1) % size
arenas = {line.split()[4] for line in open("/proc/self/maps") if "memfd:dscomm-arena" in line}
print("working", os.getpid(), len(arenas), flush=True)
try:
    while True:
        if sys.argv[4] == "messages":
            work = dist.isend(message, (rank + 1) % size)
            dist.recv(got, (rank - 1) % size)
            work.wait()
        else:
            dist.all_reduce(torch.ones(3000))
except RuntimeError as error:
    print("raised", time.monotonic(), error, flush=True)
"""

RANKS = 2


@contextlib.contextmanager
def _pod(kind: str, folder: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Each rank has its own PID, mount, IPC and UTS namespace, and its own /proc."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "--kill-child"]
    containers = [
        subprocess.Popen(
            [*command, sys.executable, "-c", SCRIPT, folder, str(rank), str(RANKS), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    try:
        yield containers
    finally:
        for container in containers:
            container.kill()
            container.wait(10)
            container.stdout and container.stdout.close()


def _lines_until(container: subprocess.Popen[str], word: str) -> list[str]:
    assert container.stdout is not None
    seen = []
    for line in container.stdout:
        seen.append(line)
        if line.startswith(word):
            return line.split(maxsplit=2)
    raise AssertionError(f"ended before '{word}': {''.join(seen)}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "dead"),
    [
        ("collectives", 0),
        ("messages", 1),
        pytest.param("collectives", 1, marks=pytest.mark.drill),
        pytest.param("messages", 0, marks=pytest.mark.drill),
    ],
)
def test_containers_of_one_pod_share_memory_and_notice_deaths(kind: str, dead: int) -> None:
    with tempfile.TemporaryDirectory(prefix="dscomm-test-") as folder, _pod(kind, folder) as pod:
        for container in pod:
            _, pid, arenas = _lines_until(container, "working")
            assert pid == "1"  # its own namespace
            assert arenas.strip() == str(RANKS)  # shared memory still works
        child = Path(f"/proc/{pod[dead].pid}/task/{pod[dead].pid}/children").read_text().split()
        assert len(child) == 1
        time.sleep(0.05)
        at_s = time.monotonic()
        os.kill(int(child[0]), signal.SIGKILL)
        _, raised_s, text = _lines_until(pod[1 - dead], "raised")
        assert float(raised_s) - at_s < SOON_S
        # The pid is that within the rank's own container.
        assert f"rank {dead} (pid 1 on host" in text, text
        assert pod[1 - dead].wait(20) == 0
