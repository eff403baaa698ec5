"""The ways in which a process ends, and the errors of its peers."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from tests.cases.rank_processes import TORCH_2

# One process imports torch, the main cost here, and forks the ranks of all cases. Each then ends as
# a program does, by the interpreter's own end, or as a child of multiprocessing.
_PROGRAM = """
import atexit, ctypes, multiprocessing, os, sys, threading, time

# A handler that is registered before torch is imported runs after all others.
handlers = {"early": None, "late": None}
atexit.register(lambda: handlers["early"] and handlers["early"]())

import torch, torch.distributed as dist, torch.multiprocessing
import deepspeed_comm

atexit.register(lambda: handlers["late"] and handlers["late"]())
folder = sys.argv[1]
torch.set_num_threads(1)


def begin(how, rank, size):
    output = os.open(f"{folder}/{how}{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    open(f"{folder}/pid-{how}{rank}", "w").write(str(os.getpid()))
    store = dist.FileStore(f"{folder}/store-{how}", size)
    dist.init_process_group("dscomm", store=store, rank=rank, world_size=size)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def one_more_call(how=""):
    try:
        if "receives" in how:
            dist.recv(torch.ones(4), 1)
        elif "sends" in how:
            time.sleep(1)  # the other has ended by then, or is about to
            while True:
                dist.send(torch.ones(4), 1)
        elif "any" in how:
            dist.recv(torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        print("told:", str(error).replace("\\n", " "), flush=True)
    else:
        print("told: nothing", flush=True)


def unmet(how, rank, size=2):
    # The last rank ends before the others' last call.
    begin(how, rank, size)
    if rank < size - 1:
        one_more_call(how)
        dist.destroy_process_group()
        if "slow" in how:
            other = open(f"{folder}/pid-{how}{size - 1}").read()
            state = open(f"/proc/{other}/stat").read().rpartition(")")[2].split()[0]
            print("state of the other:", state, flush=True)
    elif "raises" in how:
        raise ValueError("of the test")
    elif "slow" in how:
        # libc calls sleep(exit status) when Python is gone and the process is not.
        ctypes.CDLL(None).on_exit(ctypes.CDLL(None).sleep, None)
        sys.exit(3)
    elif "status" in how:
        sys.exit(3)
    elif "destroys" in how:
        dist.destroy_process_group()
    elif "thread" in how:
        threading.Thread(target=lambda: time.sleep(0.3)).start()


def composed(how, rank):
    # After fork: nothing has read the settings yet.
    os.environ["DSCOMM_TOPOLOGY"] = "numa:2 core:1 pu:1"
    unmet(how, rank, 4)


def met(how, rank):
    # All ranks make the same calls, some of which nobody waits for, and none destroys its group.
    begin(how, rank, 2)
    dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.isend(torch.ones(100), 1 - rank)
    dist.recv(torch.ones(100), 1 - rank)
    print("told: nothing", flush=True)


def differs(how, rank):
    # The last calls name two roots, so that no rank waits for another, and nobody is left to raise.
    begin(how, rank, 2)
    dist.broadcast(torch.ones(4), rank)
    print("told: nothing", flush=True)


def at_exit(how, rank):
    def calls():
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(torch.ones(100_000), async_op=True)  # and never waited for
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        dist.barrier()
        group = dist.new_group()
        dist.all_reduce(tensor, group=group)
        print("told:", tensor.tolist(), flush=True)
        if "destroy" in how:
            dist.destroy_process_group()

    begin(how, rank, 2)
    handlers[how.split("-")[0]] = calls


def forked(function, how, rank):
    pid = os.fork()
    if pid == 0:
        function(how, rank)
        return True  # ends as the program does
    children.append((how, rank, pid, None))
    return False


def of_multiprocessing(function, how, rank):
    process = multiprocessing.get_context("fork").Process(target=function, args=(how, rank))
    process.start()
    children.append((how, rank, None, process))
    return False


def for_torch(rank, function, how):
    function(how, rank)


def of_torch(function, how, rank):
    # As torch.multiprocessing.spawn() does, whose wrapper turns an exception into an exit status.
    context = torch.multiprocessing.start_processes(
        for_torch, (function, how), nprocs=2, join=False, start_method="fork"
    )
    for rank, process in enumerate(context.processes):
        children.append((how, rank, None, process))
    return False


children = []


def main():
    sizes = {composed: 4}
    for start, function, how in [
        (forked, unmet, "raises"),
        (forked, unmet, "status"),
        (forked, unmet, "forgets"),
        (forked, unmet, "slow"),
        (forked, unmet, "destroys"),
        (forked, unmet, "receives-raises"),
        (forked, unmet, "receives-status"),
        (forked, unmet, "receives-destroys"),
        (forked, unmet, "sends-raises"),
        (forked, unmet, "any-raises"),
        (forked, composed, "composed-raises"),
        (forked, met, "met"),
        (forked, differs, "differs"),
        (forked, at_exit, "early"),
        (forked, at_exit, "late-destroy"),
        (of_multiprocessing, unmet, "child-raises"),
        (of_multiprocessing, unmet, "child-status"),
        (of_multiprocessing, unmet, "child-forgets"),
        (of_multiprocessing, unmet, "child-thread"),
        (of_multiprocessing, met, "child-met"),
        (of_multiprocessing, differs, "child-differs"),
    ]:
        for rank in range(sizes.get(function, 2)):
            if start(function, how, rank):
                return
    if torch.__version__ >= "2":
        of_torch(unmet, "spawned-raises", None)
    for how, rank, pid, process in children:
        if process is None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            process.join()
            code, pid = process.exitcode, process.pid
        print(how, rank, pid, code, flush=True)


main()
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[int, int]]:
    """By case and rank: pid and exit code. The outputs are in the fixture's folder."""
    folder = tmp_path_factory.mktemp("endings")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for line in done.stdout.splitlines():
        how, rank, pid, code = line.split()
        found[how, int(rank)] = int(pid), int(code)
    _outputs.update({key: (folder / f"{key[0]}{key[1]}.txt").read_text() for key in found})
    return found


_outputs: dict[tuple[str, int], str] = {}


def _told(how: str, rank: int) -> str:
    lines = re.findall(r"^told: (.*)$", _outputs[how, rank], re.MULTILINE)
    assert len(lines) == 1, (how, rank, _outputs[how, rank])
    return str(lines[0])


_SPAWNED = pytest.param(
    "spawned-raises",
    1,
    marks=pytest.mark.skipif(not TORCH_2, reason="torch 1.13 forks no processes of its own"),
)


@pytest.mark.parametrize(
    ("how", "code"), [("raises", 1), ("composed-raises", 1), ("child-raises", 1), _SPAWNED]
)
def test_unhandled_exception_is_reported_to_peers(
    endings: dict[tuple[str, int], tuple[int, int]], how: str, code: int
) -> None:
    last = 3 if how.startswith("composed") else 1
    pid, actual = endings[how, last]
    assert actual == code, _outputs[how, last]
    for rank in range(last):
        text = _told(how, rank)
        name = f"rank {last} (pid {pid} on host {socket.gethostname()})"
        assert f"{name} was ended by an unhandled ValueError after 3 calls" in text, text
        assert "see its output" in text and "every rank must make the same calls" not in text, text
        assert endings[how, rank][1] == 0, _outputs[how, rank]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("status", 3),
        ("forgets", 0),
        ("slow", 3),
        ("child-status", 3),
        ("child-forgets", 0),
        ("child-thread", 0),
    ],
)
def test_end_without_destroy_is_reported_to_peers(
    endings: dict[tuple[str, int], tuple[int, int]], how: str, code: int
) -> None:
    pid, actual = endings[how, 1]
    assert actual == code, _outputs[how, 1]
    text = _told(how, 0)
    name = f"rank 1 (pid {pid} on host {socket.gethostname()})"
    assert f"{name} ended without destroy_process_group() after 3 calls" in text, text
    assert "see its output" in text, text


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("receives-raises", r"{} was ended by an unhandled ValueError before it sent this; see"),
        ("receives-status", r"{} ended without destroy_process_group\(\) before it sent this; see"),
        ("receives-destroys", r"{} left the group before it sent this; every send needs"),
        ("sends-raises", r"{} was ended by an unhandled ValueError before it received this; see"),
        ("any-raises", r"no other rank is left .*: {} was ended by an unhandled ValueError; see"),
    ],
)
def test_failed_send_or_recv_says_how_the_peer_ended(
    endings: dict[tuple[str, int], tuple[int, int]], how: str, said: str
) -> None:
    text = _told(how, 0)
    name = f"rank 1 (pid {endings[how, 1][0]} on host {socket.gethostname()})"
    assert re.search(said.format(re.escape(name)), text), text


def test_end_is_reported_before_the_process_is_gone(
    endings: dict[tuple[str, int], tuple[int, int]],
) -> None:
    """Work after Python's end, in destructors of libraries, keeps no peer waiting."""
    assert re.search(r"state of the other: [RSD]", _outputs["slow", 0]), _outputs["slow", 0]


def test_destroy_is_reported_as_leaving(endings: dict[tuple[str, int], tuple[int, int]]) -> None:
    assert "left the group after 3 calls" in _told("destroys", 0)
    assert "ended without" not in _told("destroys", 0)


@pytest.mark.parametrize("how", ["met", "child-met"])
def test_end_without_destroy_after_equal_calls_of_all_ranks_is_silent(
    endings: dict[tuple[str, int], tuple[int, int]], how: str
) -> None:
    for rank in range(2):
        assert endings[how, rank][1] == 0, _outputs[how, rank]
        assert _outputs[how, rank] == "told: nothing\n"


@pytest.mark.parametrize("how", ["differs", "child-differs"])
def test_end_without_destroy_after_different_calls_warns(
    endings: dict[tuple[str, int], tuple[int, int]], how: str
) -> None:
    """Of two ranks that leave, the later one can compare their calls; both may."""
    outputs = [_outputs[how, rank] for rank in range(2)]
    assert [endings[how, rank][1] for rank in range(2)] == [0, 0], outputs
    warnings = [
        line for output in outputs for line in output.splitlines() if "leaving group '0': " in line
    ]
    assert 1 <= len(warnings) <= 2, outputs
    for line in warnings:
        assert "root 0" in line and "root 1" in line, line


@pytest.mark.parametrize("how", ["late-destroy", "early"])
def test_collectives_in_exit_handlers_complete(
    endings: dict[tuple[str, int], tuple[int, int]], how: str
) -> None:
    """Exit handlers registered before the first group, and even before torch is imported."""
    for rank in range(2):
        assert endings[how, rank][1] == 0, _outputs[how, rank]
        assert _outputs[how, rank] == "told: [8.0, 8.0, 8.0, 8.0]\n", _outputs[how, rank]
