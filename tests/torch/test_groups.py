"""Groups: subgroups, orders, threads, lifetimes."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases.groups import (
    mesh_case,
    orders_case,
    split_case,
    subgroups_case,
    threads_case,
    total,
)
from tests.cases.harness import TORCH_2, RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2


def test_collectives_in_subgroups(ranks: RankSets) -> None:
    ranks(4).run(subgroups_case)


def test_calls_in_opposite_order_in_two_groups_complete(ranks: RankSets) -> None:
    ranks(2).run(orders_case)


def test_threads_with_separate_groups_run_concurrently(ranks: RankSets) -> None:
    ranks(3).run(threads_case)


def _loads_meanwhile_case(world: World) -> None:
    """Another thread that loads the native module, while one still runs its code, waits for it."""
    from importlib.machinery import ExtensionFileLoader

    from deepspeed_comm import _direct, _plugin

    # Set once sys.modules has the module, whose code has not run yet.
    begun = threading.Event()
    run_code = ExtensionFileLoader.exec_module

    def exec_module(self: ExtensionFileLoader, module: Any) -> None:
        if module.__name__ == "deepspeed_comm._C":
            begun.set()
            time.sleep(0.3)
        run_code(self, module)

    ExtensionFileLoader.exec_module = exec_module  # type: ignore[method-assign]
    assert "deepspeed_comm._C" not in sys.modules
    first = threading.Thread(target=_plugin.load_extension)
    first.start()
    assert begun.wait(30)
    assert "deepspeed_comm._C" in sys.modules
    assert _direct.find_backend(None, torch.ones(1)) is None
    assert callable(_plugin.load_extension().create_backend)
    first.join()


def test_thread_waits_while_another_thread_loads_native_code() -> None:
    run_fresh(1, _loads_meanwhile_case)


def _other_thread_runs_case() -> None:
    """A call that waits for its peers does not hold the GIL."""
    rank = dist.get_rank()
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 0:
        time.sleep(0.3)
    else:
        before = ticks
        dist.barrier()
        assert ticks > before + 20
    if rank == 0:
        dist.barrier()
    stop.set()
    thread.join()


def test_waiting_call_releases_the_gil(ranks: RankSets) -> None:
    ranks(2).run(_other_thread_runs_case)


def _many_groups_case(count: int, kept: int) -> None:
    size = dist.get_world_size()
    groups = []
    for i in range(count):
        group = dist.new_group()
        assert total(group, float(i)) == i * size
        groups.append(group)
        if len(groups) > kept:
            dist.destroy_process_group(groups.pop(0))
    for i, group in enumerate(groups):
        assert total(group, float(i)) == i * size
        dist.destroy_process_group(group)


def test_many_groups_leave_no_open_files(ranks: RankSets) -> None:
    before = ranks(2).run(_open_files)
    ranks(2).run(_many_groups_case, 300, 40)
    after = ranks(2).run(_open_files)
    assert all(b - a <= 2 for a, b in zip(before, after, strict=True)), (before, after)


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.drill
def test_thousands_of_groups(ranks: RankSets) -> None:
    ranks(2).run(_many_groups_case, 5000, 1000, limit_s=550.0)


def _reinit_case(world: World) -> None:
    for generation in range(5):
        world.init(name=f"generation{generation}")
        assert total() == sum(range(world.size))
        if generation % 2:
            dist.new_group()  # for destroy_process_group() to destroy
        dist.destroy_process_group()
    if not TORCH_2:
        return  # torch 1.13's own barrier cannot run twice in one store
    # Uses the same store again, as torchrun's store outlives a destroyed group.
    store = dist.FileStore(os.path.join(world.folder, "shared"), world.size)
    for _ in range(3):
        dist.init_process_group(
            "dscomm",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=20),
        )
        assert total() == sum(range(world.size))
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_init_after_destroy(size: int) -> None:
    run_fresh(size, _reinit_case)


def _stores_case(world: World, kind: str, port: int) -> None:
    if kind == "tcp":
        store: Any = dist.TCPStore(
            "127.0.0.1", port, world.size, world.rank == 0, timedelta(seconds=20)
        )
    else:
        store = dist.HashStore()
    dist.init_process_group("dscomm", store=store, rank=world.rank, world_size=world.size)
    assert total() == sum(range(world.size))
    if world.rank == 0:
        dist.barrier()
        time.sleep(0.5)  # keeps the store's server up while the others leave
    else:
        dist.barrier()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_tcp_store() -> None:
    run_fresh(2, _stores_case, "tcp", _free_port())


def test_hash_store() -> None:
    run_fresh(1, _stores_case, "hash", 0)


def _by_device_case(world: World, backends: str) -> None:
    world.init(backends)
    assert total() == sum(range(world.size))
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "dscomm"
    assert total(dist.new_group()) == sum(range(world.size))


@needs_torch_2
@pytest.mark.parametrize("backends", ["cpu:dscomm", "cpu:dscomm,cuda:gloo"])
def test_backend_named_by_device(backends: str) -> None:
    run_fresh(2, _by_device_case, backends)


def _beside_gloo_case(world: World) -> None:
    world.init("gloo")
    group = dist.new_group(backend="dscomm")
    assert total(group) == total() == sum(range(world.size))
    both = torch.zeros(5) + world.rank
    works = [dist.all_reduce(both.clone(), group=g, async_op=True) for g in (group, None)]
    for work in works:
        work.wait()


def test_dscomm_group_in_gloo_world() -> None:
    run_fresh(3, _beside_gloo_case)


@needs_torch_2
def test_split_and_merge(ranks: RankSets) -> None:
    ranks(4).run(split_case)


@needs_torch_2
def test_device_mesh_and_dtensor(ranks: RankSets) -> None:
    ranks(4).run(mesh_case)


def _detail_case(world: World) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if TORCH_2:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    else:
        dist.set_debug_level_from_env()
    world.init()
    assert total() == sum(range(world.size))
    outputs = [torch.zeros(3) for _ in range(world.size)]
    dist.all_gather(outputs, torch.full((3,), float(world.rank)), async_op=True).wait()
    assert [output[0].item() for output in outputs] == list(range(world.size))
    group = dist.new_group()
    assert total(group) == sum(range(world.size))
    # A view with a negative bit passes through this mode's wrapper too.
    view = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    dist.all_reduce(view)
    assert view.tolist() == [-float(world.size)] * 3
    dist.barrier()
    with pytest.raises(RuntimeError):
        # torch itself detects this, from the sequence numbers and shapes of its wrapper.
        dist.all_reduce(torch.ones(3 + world.rank))


def test_detail_debug_mode() -> None:
    run_fresh(2, _detail_case)


def _fork_case() -> None:
    """A child forked by a rank, as by DataLoader, cannot use the group; the rank still can."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            dist.all_reduce(torch.ones(1))
            os.write(writing, b"no error")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert "Error" in said and "fork" in said, said
    assert total() == sum(range(size)), rank


def test_call_in_forked_child_raises_and_parent_continues(ranks: RankSets) -> None:
    ranks(2).run(_fork_case)


# One process imports torch, the main cost here, and forks all ranks. Each rank then ends as a
# program does, including the interpreter's own end.
_EXIT_PROGRAM = """
import atexit, os, signal, sys, threading, time
at_end = []  # after all that dscomm does at exit, as it is registered before torch is imported
atexit.register(lambda: [call() for call in at_end])
import torch, torch.distributed as dist
import deepspeed_comm

folder, size = sys.argv[1], 2
torch.set_num_threads(1)
children = []
for how in ["waited", "unwaited", "unmet", "daemon", "raises", "destroyed"]:
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            break
        children.append((how, rank, pid))
    else:
        continue
    break
else:
    for how, rank, pid in children:
        print(how, rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit()

errors = os.open(f"{folder}/{how}{rank}.txt", os.O_CREAT | os.O_WRONLY)
os.dup2(errors, 2)
ended = f"{folder}/ended-{how}"
if rank == 0:
    at_end.append(lambda: open(ended, "w").close())
core = {min(os.sched_getaffinity(0))}
if how == "daemon" and rank == 0:
    # They leave the daemon thread little of its core, so that its call returns late.
    for _ in range(16):
        busy = os.fork()
        if busy == 0:
            os.sched_setaffinity(0, core)
            signal.alarm(60)
            while True:
                pass
        at_end.append(lambda busy=busy: os.kill(busy, signal.SIGKILL))
store = dist.FileStore(f"{folder}/store-{how}", size)
dist.init_process_group("dscomm", store=store, rank=rank, world_size=size)
group = dist.new_group()
tensor = torch.ones(4)
dist.all_reduce(tensor)
work = dist.all_reduce(tensor, group=group, async_op=True)
if how == "unwaited":
    dist.all_reduce(torch.ones(100000), async_op=True)
    dist.isend(torch.ones(100), 1 - rank)
elif how == "unmet" and rank == 0:
    dist.all_reduce(torch.ones(100), async_op=True)
elif how == "daemon":
    # Rank 1 lives until rank 0 has ended, and never makes the call.
    if rank == 0:
        def call():
            os.sched_setaffinity(0, core)
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, 10)
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            dist.barrier(group=group)

        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.2)
    else:
        until = time.monotonic() + 30
        while not os.path.exists(ended) and time.monotonic() < until:
            time.sleep(0.02)
        if not os.path.exists(ended):
            os._exit(3)
elif how == "raises":
    work.wait()
    raise SystemExit(7)
else:
    work.wait()
if how == "destroyed":
    dist.destroy_process_group()
"""


def test_exit_without_destroy_ends_cleanly(tmp_path: Any) -> None:
    """A program may end without destroy_process_group(), with calls in progress, or by raising."""
    done = subprocess.run(
        [sys.executable, "-c", _EXIT_PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12, done.stdout
    for line in lines:
        how, rank, code = line.split()
        errors = (tmp_path / f"{how}{rank}.txt").read_text()
        assert int(code) == (7 if how == "raises" else 0), (line, errors)
        assert "terminate called" not in errors, (line, errors)
        assert "Traceback" not in errors or (how, rank) == ("daemon", "0"), (line, errors)


def _monitored_case(world: World, absent: list[int]) -> None:
    world.init()
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu")) if TORCH_2 else group
    if world.rank in absent:
        time.sleep(2.5)
        return
    if not absent:
        for _ in range(3):
            backend.monitored_barrier(timedelta(seconds=20))
        return
    with pytest.raises(RuntimeError) as caught:
        backend.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    text = str(caught.value)
    assert "ended earlier" not in text
    with pytest.raises(RuntimeError, match=r"group '\w+' ended earlier: .*monitored"):
        backend.monitored_barrier(timedelta(seconds=1))
    heard = re.search("heard nothing from these ranks: ([^;]*); see in their output", text)
    assert heard is not None, text
    assert heard[1] == ", ".join(map(str, absent)), text
    assert "raise the timeout of monitored_barrier()" in text


@pytest.mark.parametrize("absent", [[], [1], [1, 3]])
def test_monitored_barrier_names_absent_ranks(absent: list[int]) -> None:
    run_fresh(4, _monitored_case, absent)


def _errors_case(world: World) -> None:
    """get_error() of the backend, for groups that end in different ways."""
    from torch._C._distributed_c10d import ErrorType

    world.init()
    rank = world.rank
    limits = {"timeout": timedelta(seconds=0.3)}
    groups = {name: dist.new_group(timeout=limits.get(name)) for name in _ERRORS}

    def error_of(name: str) -> Any:
        return groups[name]._get_backend(torch.device("cpu")).get_error()

    tensor = torch.ones(4)
    for name, group in groups.items():
        dist.all_reduce(tensor, group=group)
        assert error_of(name) == ErrorType.SUCCESS
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(groups["left"])
        groups["abort"]._get_backend(torch.device("cpu")).abort()
    dist.barrier()
    calls: dict[str, Callable[[], object]] = {
        "timeout": lambda: rank == 1 or dist.all_reduce(tensor, group=groups["timeout"]),
        "left": lambda: rank == 1 or dist.all_reduce(tensor, group=groups["left"]),
        "mismatch": lambda: dist.all_reduce(tensor[rank:], group=groups["mismatch"]),
        "abort": lambda: dist.all_reduce(tensor, group=groups["abort"]),
    }
    for name, call in calls.items():
        if rank == 1 and name in ("timeout", "left"):
            continue
        with pytest.raises(RuntimeError):
            call()
        assert error_of(name) == getattr(ErrorType, _ERRORS[name]), name
    dist.barrier()
    if rank == 1:  # rank 0 gave up, and rank 1 learns it when it comes
        with pytest.raises(RuntimeError):
            dist.all_reduce(tensor, group=groups["timeout"])
        assert error_of("timeout") == ErrorType.TIMEOUT
    dist.barrier()


_ERRORS = {
    "timeout": "TIMEOUT",
    "left": "REMOTE_ERROR",
    "mismatch": "COMM_ERROR",
    "abort": "COMM_ERROR",
}


@needs_torch_2
def test_get_error_tells_how_a_group_ended() -> None:
    run_fresh(2, _errors_case)


def _timing_and_timeout_case(world: World) -> None:
    """Methods that programs call on the groups of torch's own backends."""
    world.init()
    dist.group.WORLD._enable_collectives_timing()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    assert work._get_duration() >= 0
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=17))
    assert backend.options._timeout == timedelta(seconds=17)
    with pytest.raises(ValueError, match="timeout"):
        backend._set_default_timeout(timedelta(0))
    dist.barrier()


@needs_torch_2
def test_collectives_timing_and_default_timeout() -> None:
    run_fresh(2, _timing_and_timeout_case)
