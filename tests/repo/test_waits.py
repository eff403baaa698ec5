"""Nothing in csrc waits outside the one wait, but for the places listed here, each with its reason.

A wait that does not look at deadlines, aborts and deaths is where a job hangs. Whoever adds one
answers here who ends it, and what happens if they die.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from source_tree import ROOT, name_of, native_sources, without_comments

# What a thread can wait with.
PRIMITIVES = {
    "futex": r"\b(futex_sleep|FUTEX_WAIT\w*|FUTEX_LOCK_PI\w*)\b",
    "poll": r"\b(poll|ppoll|epoll_p?wait|select|pselect)\s*\(",
    # Methods of ours and of c10d are called recv, accept and sleep too.
    "socket": r"\b(accept4|recvfrom|recvmsg)\s*\(|(?<![\w.>:])(::)?(recv|connect)\s*\((?!std::)",
    "sleep": r"\b(sleep_for|sleep_until|usleep|(clock_)?nanosleep|nap)\s*\(|(?<!\w)::sleep\s*\(",
    "spin": r"\b(sched_yield|pause_core|_mm_pause|__builtin_ia32_pause)\s*\(|this_thread::yield",
    "condition": r"(\.|->)\s*(wait|wait_for|wait_until)\s*\(|\bpthread_cond_\w*wait\s*\(",
    "semaphore": r"\b(sem_wait|sem_timedwait)\s*\(|\bstd::(latch|barrier|counting_semaphore)\b",
    "thread": r"(\.|->)\s*join\s*\(|\bpthread_join\s*\(|\b(waitpid|waitid)\s*\(",
}

ALLOWED = {
    ("csrc/core/base/deadline.h", "sleep"): "a slice of the caller's wait",
    ("csrc/core/base/memory_reservation.cc", "sleep"): "others reserve or take memory: the kernel "
    "unlocks for the dead; 50 ms at most for a turn, then ten seconds, one where nothing changes",
    (
        "csrc/core/store/bounded_store.cc",
        "condition",
    ): "calls of a store, in slices, until a second "
    "after the deadline; their thread waits for the next one, until told to end",
    ("csrc/core/store/store_exchange.cc", "sleep"): "pauses between questions to the store; "
    "deadline, or a second where another rank is about to say why it failed",
    ("csrc/core/formation/modex.cc", "sleep"): "pauses between questions to the store; deadline",
    ("csrc/core/formation/tcp_relay.cc", "poll"): "leaders pass the member table on; slices, a "
    "reason to give up, a limit of seconds",
    ("csrc/core/formation/local_exchange.cc", "poll"): "ranks of a host meet; slices, deadline",
    ("csrc/core/formation/local_exchange.cc", "sleep"): "no leader yet: for a second at most",
    ("csrc/core/formation/local_exchange.cc", "socket"): "sockets that never block",
    ("csrc/core/store/bounded_store.cc", "thread"): "a thread between calls, told to end",
    ("csrc/core/base/futex.h", "futex"): "the system call that the one wait sleeps with",
    ("csrc/core/shm/mailbox/wait.h", "spin"): "the one wait: its first stage",
    ("csrc/core/shm/mailbox/wait.cc", "spin"): "the one wait: it yields before it sleeps",
    ("csrc/core/shm/mailbox/wait.cc", "futex"): "the one wait: it sleeps, in slices",
    ("csrc/core/messages/doorbell.cc", "poll"): "waits for several peers at once; slices",
    ("csrc/core/messages/doorbell.cc", "socket"): "empties its socket, which never blocks",
    (
        "csrc/core/shm/mailbox/diagnosis.cc",
        "sleep",
    ): "readers of any group bring memory back; the deadline, "
    "deaths and aborts of the call's group end it",
    (
        "csrc/core/shm/memory/peer_liveness.cc",
        "poll",
    ): "asks a pidfd whether its process lives; timeout 0",
    (
        "csrc/core/shm/memory/socket_directory.cc",
        "poll",
    ): "arenas meet, under the deadline of the formation; "
    "the service thread serves until the process ends",
    ("csrc/core/shm/memory/socket_directory.cc", "socket"): "the sockets through which arenas meet",
    (
        "csrc/core/shm/memory/socket_directory.cc",
        "sleep",
    ): "before it asks again, under the deadline",
    ("csrc/core/shm/memory/socket_directory.cc", "condition"): "the service thread has started",
    ("csrc/core/shm/memory/socket_directory.h", "semaphore"): "the service thread has started",
    ("csrc/core/shm/memory/socket_directory.cc", "thread"): "the service thread, told to end, ends",
    ("csrc/core/detector/connection.cc", "socket"): "never blocks",
    ("csrc/core/detector/connector.cc", "socket"): "sockets that never block",
    ("csrc/core/detector/listener.cc", "socket"): "sockets that never block",
    ("csrc/core/detector/rendezvous.cc", "poll"): "members connect, under the deadline",
    (
        "csrc/core/detector/tcp_failure_detector.cc",
        "poll",
    ): "the service thread listens until it is told to leave",
    (
        "csrc/core/detector/tcp_failure_detector.cc",
        "thread",
    ): "told to leave, it takes a second at most",
    (
        "csrc/core/detector/tcp_failure_detector.h",
        "socket",
    ): "no wait: it declares a function of that name",
    ("csrc/core/base/socket_sleep.cc", "poll"): "a slice of the one wait for MPI, or of a wait for "
    "messages",
    ("csrc/core/team/hierarchical_team.cc", "sleep"): "a question to all ranks, for 500 ms at most",
    ("csrc/mpi/mpi_team.cc", "sleep"): "two questions to all ranks, for 150 and 500 ms at most",
    ("csrc/mpi/call_watch.cc", "sleep"): "a thread that watches until the process ends",
    ("csrc/mpi/abandonable.cc", "sleep"): "for a reason, 0.4 s at most; deadline",
    ("csrc/mpi/abandonable.cc", "condition"): "in slices, until the deadline or a reason",
    ("csrc/mpi/abandonable.cc", "thread"): "what it ran has returned",
    ("csrc/mpi/mpi_transport.cc", "sleep"): "at exit, for a second at most: data on its way out",
    ("csrc/mpi/mpi_wait.cc", "poll"): "no wait: it asks MPI once",
    ("csrc/mpi/mpi_wait.cc", "sleep"): "the one wait for MPI: it naps, under the deadline",
    ("csrc/mpi/mpi_wait.cc", "spin"): "the one wait for MPI: it yields before it naps",
    (
        "csrc/mpi/open_mpi/pmix_helper.cc",
        "poll",
    ): "fences, until told to stop or the helper ends; slices",
    (
        "csrc/mpi/open_mpi/pmix_helper.cc",
        "condition",
    ): "the fence thread ends; for a second at most",
    (
        "csrc/mpi/open_mpi/pmix_helper.cc",
        "thread",
    ): "the fence thread told to stop, and a helper that ended",
    ("csrc/mpi/open_mpi/tcp_hooks.cc", "socket"): "sockets that never block",
    ("csrc/pmix/accept.cc", "poll"): "libpmix's thread for connections: a second at most",
    ("csrc/pmix/accept.cc", "socket"): "sockets that never block",
    ("csrc/pmix/main.cc", "sleep"): "a thread that ends a helper which PMIx keeps from ending",
    ("csrc/pmix/main.cc", "poll"): "the helper serves until the ranks of its host are gone",
    ("csrc/core/base/message_socket.cc", "socket"): "never blocks",
    ("csrc/pmix/process.cc", "poll"): "asks a pidfd whether its process lives; timeout 0",
    ("csrc/core/base/operation.cc", "condition"): "the operation's runner is under its deadline",
    ("csrc/core/engine/group.cc", "condition"): "what is queued runs under its deadlines",
    ("csrc/core/engine/group.cc", "thread"): "no wait: PointToPoint has a function of that name",
    (
        "csrc/core/engine/worker_pool.cc",
        "condition",
    ): "idle workers; tasks are under their deadlines",
    ("csrc/core/messages/point_to_point.cc", "spin"): "as the one wait, some microseconds",
    ("csrc/core/messages/point_to_point.cc", "condition"): "operations, which have deadlines",
    ("csrc/core/messages/waiting.cc", "spin"): "as the one wait, over all channels at once",
    ("csrc/core/messages/waiting.cc", "sleep"): "at exit, for a second at most: what was sent",
    ("csrc/core/messages/waiting.cc", "condition"): "one thread sleeps on the doorbell, the "
    "others until it has looked; the worker parks",
    ("csrc/core/messages/point_to_point.cc", "thread"): "the worker, told to end, ends",
    ("csrc/torch/exit.cc", "condition"): "calls under way at exit get some seconds, then an abort",
    ("csrc/torch/exit.cc", "sleep"): "once, 2 ms at exit: other backends' workers get the GIL",
    ("csrc/torch/store_adapter.cc", "sleep"): "pauses between questions to the store; deadline",
    ("csrc/torch/point_to_point.cc", "condition"): "waits for operations, which have deadlines",
    ("csrc/torch/operators.cc", "condition"): "waits for an operation, which has a deadline",
    ("csrc/torch/work.cc", "condition"): "waits for operations, which have deadlines",
}


def waits_in(text: str) -> dict[str, list[str]]:
    """The lines that use each primitive."""
    lines = without_comments(text).splitlines()
    found = {
        name: [line.strip() for line in lines if re.search(pattern, line)]
        for name, pattern in PRIMITIVES.items()
    }
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("file", native_sources(), ids=name_of)
def test_waits_are_on_the_list(file: Path) -> None:
    unknown = {
        name: lines
        for name, lines in waits_in(file.read_text()).items()
        if (name_of(file), name) not in ALLOWED
    }
    assert not unknown, "use wait_at_least(), or say in ALLOWED who ends this wait"


def test_list_of_waits_has_no_unused_entry() -> None:
    stale = [
        (name, primitive)
        for name, primitive in ALLOWED
        if not (ROOT / name).exists() or primitive not in waits_in((ROOT / name).read_text())
    ]
    assert not stale


@pytest.mark.parametrize(
    ("line", "primitive"),
    [
        ("futex_sleep(word, seen, 0);", "futex"),
        ("::poll(&entry, 1, -1);", "poll"),
        ("std::this_thread::sleep_for(1ms);", "sleep"),
        ("std::this_thread::yield();", "spin"),
        ("ready_.wait(lock);", "condition"),
        ("future->wait();", "condition"),
        ("thread_.join();", "thread"),
        ("::recvmsg(fd, &message, 0);", "socket"),
        ("std::latch started(2);", "semaphore"),
    ],
)
def test_new_wait_is_reported(line: str, primitive: str) -> None:
    assert list(waits_in(line)) == [primitive]
    assert waits_in(f"// {line}") == {}
