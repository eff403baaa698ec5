"""Memory shortage: a small or missing /dev/shm, cgroups, and ulimits."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_comm
from deepspeed_comm._plugin import load_extension
from tests.cases.rank_processes import Job, World

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and cgroups need root")


SCRIPT = """
import torch
torch.set_num_threads(1)
from tests.cases.rank_processes import Job
from tests.cases.workloads import every_size
with Job(3, every_size) as job:
    job.results()
print("passed")
"""

MOUNTS = {
    "64 MB": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    # A tmpfs of size=0 has no limit; the minimum is one page, which is then filled.
    "0": "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}


@needs_root
@pytest.mark.parametrize("what", MOUNTS)
def test_group_works_with_small_or_read_only_dev_shm(what: str) -> None:
    finished = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            MOUNTS[what] + ' && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            SCRIPT,
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout


# --- memory cgroups

# Room for the ranks' private memory, which counts too, but not for staging.
ROOM = 64 << 20


def _cgroup_root() -> tuple[Path, str] | None:
    """A folder for new memory cgroups, and the name of their limit file; None if there is none."""
    unified = Path("/sys/fs/cgroup")
    if (unified / "cgroup.controllers").exists():
        if "memory" in (unified / "cgroup.subtree_control").read_text().split():
            return unified, "memory.max"
        return None
    if (unified / "memory" / "memory.limit_in_bytes").exists():
        return unified / "memory", "memory.limit_in_bytes"
    return None


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit of ROOM, as its folder."""
    found = _cgroup_root()
    if found is None:
        pytest.skip("no memory controller to make a cgroup of")
    root, limit = found
    folder = root / f"dscomm-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        (folder / limit).write_text(str(ROOM))
        yield folder
    finally:
        folder.rmdir()


def _enter_and_init(world: World, folder: str, chunk_bytes: int) -> str:
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["DSCOMM_STAGING_CHUNK_BYTES"] = str(chunk_bytes)
    try:
        world.init()
    except RuntimeError as error:
        return str(error)
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))
    dist.destroy_process_group()
    return ""


@needs_root
def test_cgroup_too_small_for_staging_raises_with_both_numbers(cgroup: Path) -> None:
    """Refused when the group is made, with both numbers; never a SIGBUS or the OOM killer."""
    chunk_bytes = 32 << 20
    with Job(2, _enter_and_init, str(cgroup), chunk_bytes) as job:
        texts = job.results()
    for text in texts:
        match = re.search(r"2 ranks on this host need (\d+) bytes .* leaves (\d+)", text)
        assert match is not None and cgroup.name in text, texts
        # Four chunks of staging and a page of mailboxes for each rank.
        assert int(match.group(1)) == 2 * (4 * chunk_bytes + 4096), texts
        assert 0 <= int(match.group(2)) <= ROOM, texts


@needs_root
def test_cgroup_large_enough_for_staging_works(cgroup: Path) -> None:
    with Job(2, _enter_and_init, str(cgroup), 256 << 10) as job:
        assert job.results() == ["", ""]


def _exhaust(world: World, folder: str) -> str:
    """Makes groups, each with its own staging, until the limit is reached, which is an error."""
    world.init()
    dist.barrier()
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    groups = []
    try:
        for _ in range(400):
            groups.append(dist.new_group())
            dist.all_reduce(torch.ones(1_000_000), group=groups[-1])
            work = dist.isend(torch.ones(2), 1 - world.rank, group=groups[-1])
            dist.recv(torch.ones(2), 1 - world.rank, group=groups[-1])
            work.wait()
    except RuntimeError as error:
        return str(error)
    return ""


@needs_root
def test_cgroup_filled_by_groups_raises_with_numbers(cgroup: Path) -> None:
    """Groups made in turn: each works, or raises with numbers; no process is killed."""
    with Job(2, _exhaust, str(cgroup)) as job:
        texts = job.results()
    assert all(text == "" or "leaves" in text for text in texts), texts


# --- several processes that reserve memory at once

POOLED = 192 << 20  # per rank


def _take_at_once(world: World, folder: str) -> str:
    world.init()
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    world.say("ready")
    time.sleep(max(0.0, world.hear() - time.monotonic()))
    tensor = deepspeed_comm.empty(POOLED, dtype=torch.uint8)
    kind = "pool" if load_extension().is_in_pool(tensor) else "ordinary"
    dist.all_reduce(tensor[:1000])
    dist.destroy_process_group()
    return kind


def _results_at_once(cgroup: Path, function: Callable[[World, str], str]) -> list[str]:
    """Results of four ranks that start at the same time, with room for two of them."""
    found = _cgroup_root()
    assert found is not None
    (cgroup / found[1]).write_text(str(ROOM + 2 * POOLED + POOLED // 2))
    with Job(4, function, str(cgroup)) as job:
        job.wait_for("ready")
        job.tell(time.monotonic() + 0.2)
        return job.results()


@needs_root
def test_concurrent_pool_tensors_beyond_the_limit_become_ordinary(cgroup: Path) -> None:
    """Two of four fit: no rank is killed, and no more than two use the pool."""
    kinds = _results_at_once(cgroup, _take_at_once)
    assert sorted(kinds) == ["ordinary", "ordinary", "pool", "pool"], kinds


def _stage_at_once(world: World, folder: str) -> str:
    os.environ["DSCOMM_STAGING_CHUNK_BYTES"] = str(POOLED // 4)
    world.init()
    dist.barrier()
    tensor = torch.ones(POOLED // 4)
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    world.say("ready")
    time.sleep(max(0.0, world.hear() - time.monotonic()))
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        return str(error)
    return ""


@needs_root
def test_concurrent_first_large_calls_beyond_the_limit_raise(cgroup: Path) -> None:
    """Staging of two of four ranks fits: no rank is killed, and all get an error with numbers."""
    texts = _results_at_once(cgroup, _stage_at_once)
    assert all("leaves" in text and cgroup.name in text for text in texts), texts


# --- ulimit

LIMITS = {
    "file size 512 KiB": (resource.RLIMIT_FSIZE, 512 << 10),
    "file size 2 MiB": (resource.RLIMIT_FSIZE, 2 << 20),
    "file size 32 MiB": (resource.RLIMIT_FSIZE, 32 << 20),
    "address space 8 MiB": (resource.RLIMIT_AS, 8 << 20),
    "address space 64 MiB": (resource.RLIMIT_AS, 64 << 20),
    "address space 3 GiB": (resource.RLIMIT_AS, 3 << 30),
}


def _try(world: World, name: str, store: dist.Store | None) -> str:
    try:
        world.init(name=name, timeout_s=3, store=store)
        for count in (5, 4000, 300_000):
            tensor = torch.ones(count)
            dist.all_reduce(tensor)
            assert tensor.eq(world.size).all()
        dist.send(torch.ones(3), 1) if world.rank == 0 else dist.recv(torch.ones(3), 0)
    except RuntimeError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def _init_under_limit(world: World, which: int, value: int) -> str:
    store = world.tcp_store()
    load_extension()  # the limit applies only to making a group
    if which == resource.RLIMIT_AS:
        # Beyond what is mapped already.
        value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        return _try(world, "world", store)
    finally:
        resource.setrlimit(which, (hard, hard))
        # The first rank keeps the store until all are done.
        world.say("tried")
        world.hear()


@pytest.mark.parametrize("what", LIMITS)
def test_group_under_low_memory_ulimit_works_or_names_it(what: str) -> None:
    """Works, or raises an error that names the limit; never a signal."""
    which, value = LIMITS[what]
    with Job(2, _init_under_limit, which, value) as job:
        job.wait_for("tried")
        job.tell("go")
        texts = job.results()
    words = {
        resource.RLIMIT_FSIZE: ("ulimit -f", "is full; raise DSCOMM_ARENA_BYTES"),
        resource.RLIMIT_AS: ("ulimit -v", "Cannot allocate memory"),
    }[which]
    print(what, texts)
    for text in texts:
        assert text == "" or any(word in text for word in words), texts
    assert len({bool(text) for text in texts}) == 1, texts
    if what in ("file size 32 MiB", "address space 3 GiB"):
        assert texts == ["", ""]
    if what in ("file size 512 KiB", "address space 8 MiB"):
        assert "" not in texts


# A system-call filter in classic BPF, like a container's seccomp profile: loads the number of the
# call; memfd_create fails, anything else is allowed.
_MEMFD_CREATE = {"x86_64": 319}.get(platform.machine(), 279)  # 279: aarch64 and newer
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def _forbid_memfd_create() -> None:
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, 0),
            (_JUMP_IF_EQUAL, 0, 1, _MEMFD_CREATE),
            (_RETURN, 0, 0, _ERROR | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0, (
        os.strerror(ctypes.get_errno())
    )


def _init_without_memfd(world: World) -> str:
    store = world.tcp_store()
    if world.rank == 1:
        _forbid_memfd_create()
    try:
        return _try(world, "world", store)
    finally:
        world.say("tried")
        world.hear()


def test_memfd_create_forbidden_by_seccomp_names_the_remedy() -> None:
    with Job(2, _init_without_memfd) as job:
        job.wait_for("tried")
        job.tell("go")
        texts = job.results()
    for text in texts:
        assert "rank 1" in text and "memfd_create failed: Operation not permitted" in text, texts
        assert "allow it in the seccomp profile of the container" in text, texts


def _queue_without_threads(world: World) -> list[str]:
    """Rank 0 queues calls in many groups, which need a thread each, when no thread can start."""
    world.init()
    groups = [dist.new_group() for _ in range(16)]
    dist.barrier()
    if world.rank == 1:
        world.hear()
        return [_text_of(lambda group=group: dist.barrier(group=group)) for group in groups]
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The C library reuses the stacks of some ended threads, so a few may still start.
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 20), hard))
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    world.say("queued")
    return [_text_of(work.wait) for work in works]


def _text_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def test_call_queue_that_cannot_start_thread_raises_on_every_rank() -> None:
    """The group ends on every rank and names the limit; no call that cannot run is waited for."""
    with Job(2, _queue_without_threads) as job:
        job.wait_for("queued", ranks=[0])
        job.tell("go")
        starter, other = job.results()
    without = [text for text in starter if "could not start its thread" in text]
    assert without, starter
    for text, answer in zip(starter, other, strict=True):
        if text in without:
            assert "could not start its thread" in answer and "ulimit -v" in answer, answer


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one of them lists the others


def _one_descriptor_more(world: World) -> list[str]:
    """Tries with no free descriptor, with one, two and so on, in one process, until it works."""
    store = world.tcp_store()
    # Opens torch's own descriptors first, which are not under test.
    world.init(name="first", store=store, backend="gloo")
    dist.barrier()
    dist.destroy_process_group()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _open_descriptors()
    texts = []
    for more in range(40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, hard))
        texts.append(_try(world, f"with {more}", store))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if not texts[-1]:
            break
    # The process's own: arena, listening socket, doorbell, and one to stop the listener.
    assert _open_descriptors() <= before + 8
    return texts


@pytest.mark.timeout(200)
def test_group_under_low_descriptor_ulimit_works_or_raises_on_every_rank() -> None:
    with Job(2, _one_descriptor_more, limit_s=150) as job:
        answers = job.results()
    print(answers)
    for texts in answers:
        assert texts[-1] == "" and len(texts) > 3, answers
        for text in texts[:-1]:
            # A rank whose peer could not even start gets no error from it.
            assert any(
                part in text
                for part in ("Too many open files", "ulimit -n", "waiting for rank", "timed out")
            ), answers
