"""Faults between hosts: every rank gets the error in time, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.cases.mismatch import KINDS, RANKS
from tests.cluster.faults import (
    EARLY_S,
    EXIT_S,
    HELPERS,
    LATE_S,
    LONG_S,
    NAMES,
    SOON_S,
    TIMEOUT_S,
    assert_ended_cleanly,
)
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import BACKEND, start_ranks, torchrun

TWO_AND_TWO = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("dead", "workload"),
    [
        ([3], "small_all_reduce"),
        pytest.param([2], "chunked_all_reduce", marks=pytest.mark.drill),
        ([0], "ring"),
        ([2, 3], "mixed"),
    ],
)
def test_kill_raises_on_survivors_of_all_hosts(
    make_hosts: Callable[[int], Hosts], dead: list[int], workload: str
) -> None:
    """Kills the first rank of a host, another one, the first of all, or all of a host."""
    arguments = ["until_raised.py", workload, str(LONG_S)]
    if NAMES:
        arguments.append("new_group")
    with start_ranks(make_hosts(2), TWO_AND_TWO, *arguments, store_apart=True) as job:
        job.wait_for("working")
        time.sleep(0.3)
        at_s = [job.kill(rank) for rank in dead][-1]
        survivors = [rank for rank in range(job.size) if rank not in dead]
        for event in job.wait_for("raised", survivors, limit_s=20.0):
            assert event.at_s - at_s < SOON_S, job.report()
            if NAMES:
                assert event.facts["is_fault"], job.report()
                assert any(job.name(rank) in event.facts["text"] for rank in dead), job.report()
        if NAMES:  # nor do they wait to make a group with the dead
            for event in job.wait_for("no group", survivors, limit_s=20.0):
                assert any(job.name(rank) in event.facts["text"] for rank in dead), job.report()
        assert_ended_cleanly(job, survivors)
        assert [[*job.exit_codes().values()][rank] for rank in dead] == [-9] * len(dead)


@pytest.mark.parametrize("first", [0, pytest.param(2, marks=pytest.mark.drill)])
def test_member_death_is_noticed_after_death_outside_the_group(
    make_hosts: Callable[[int], Hosts], first: int
) -> None:
    """A group notices deaths of its members after an earlier death outside of it."""
    members = [rank for rank in range(4) if rank != first]
    with start_ranks(
        make_hosts(2), TWO_AND_TWO, "subgroup.py", *map(str, members), store_apart=True
    ) as job:
        job.wait_for("working")
        job.kill(first)
        time.sleep(0.5)
        assert not any(job.first(rank, "raised") for rank in members), job.report()
        at_s = job.kill(3)
        for event in job.wait_for("raised", members[:2], limit_s=20.0):
            assert event.at_s - at_s < SOON_S, job.report()
            place = job.name(3).partition("(")[2]  # its rank differs within the group
            assert not NAMES or place in event.facts["text"], job.report()
        assert_ended_cleanly(job, members[:2])


@pytest.mark.parametrize(
    "workload", ["chunked_all_reduce", pytest.param("mixed", marks=pytest.mark.drill)]
)
def test_second_death_is_noticed_after_death_of_rank_zero(
    make_hosts: Callable[[int], Hosts], workload: str
) -> None:
    """Rank 1 waits for rank 3 of the other host, which is stopped and dies after rank 0."""
    arguments = ("until_raised.py", workload, str(LONG_S))
    with start_ranks(make_hosts(2), TWO_AND_TWO, *arguments, store_apart=True) as job:
        job.wait_for("working")
        time.sleep(0.3)
        job.kill(3, signal.SIGSTOP)
        time.sleep(0.3)
        job.kill(0)
        time.sleep(0.1)
        at_s = job.kill(3)
        for event in job.wait_for("raised", [1, 2], limit_s=20.0):
            assert event.at_s - at_s < SOON_S, job.report()
            named = any(job.name(rank) in event.facts["text"] for rank in (0, 3))
            assert named or not NAMES, job.report()
        assert_ended_cleanly(job, [1, 2])


@pytest.mark.parametrize(
    "workload", ["chunked_all_reduce", pytest.param("ring", marks=pytest.mark.drill)]
)
def test_kill_with_messages_in_transit_raises_on_survivors(
    make_hosts: Callable[[int], Hosts], workload: str
) -> None:
    """Messages to a rank wait for room in its connection when the kernel resets the connection.

    Open MPI then ends the sending process. The rank is stopped first, so that it reads no more, and
    the connections have little buffer memory, so that they fill up.
    """
    dead = 2
    short = dict.fromkeys(("OMPI_MCA_btl_tcp_sndbuf", "OMPI_MCA_btl_tcp_rcvbuf"), "8192")
    arguments = ("until_raised.py", workload, str(LONG_S))
    with start_ranks(make_hosts(2), TWO_AND_TWO, *arguments, env=short, store_apart=True) as job:
        job.wait_for("working")
        time.sleep(0.3)
        job.kill(dead, signal.SIGSTOP)
        time.sleep(0.3)
        at_s = job.kill(dead)
        survivors = [rank for rank in range(job.size) if rank != dead]
        for event in job.wait_for("raised", survivors, limit_s=20.0):
            assert event.at_s - at_s < SOON_S, job.report()
            assert job.name(dead) in event.facts["text"], job.report()
        assert_ended_cleanly(job, survivors)


@pytest.mark.parametrize(
    ("what", "workload"),
    [
        pytest.param("link_down", "small_all_reduce", marks=pytest.mark.drill),
        ("link_down", "chunked_all_reduce"),
        ("drop_packets", "small_all_reduce"),
    ],
)
def test_host_cut_off_from_the_network_times_out_and_is_named(
    make_hosts: Callable[[int], Hosts], what: str, workload: str
) -> None:
    hosts = make_hosts(2)
    arguments = ("until_raised.py", workload, str(TIMEOUT_S))
    with start_ranks(hosts, TWO_AND_TWO, *arguments) as job:
        job.wait_for("working")
        time.sleep(0.3)
        at_s = time.monotonic()
        getattr(hosts, what)(1)
        events = job.wait_for("raised", limit_s=15.0)
        for event in events:
            assert -EARLY_S < event.at_s - at_s - TIMEOUT_S < LATE_S, job.report()
        if NAMES:
            texts = [event.facts["text"] for event in events]
            assert all("timed out" in text for text in texts), job.report()
            assert any(job.name(rank) in text for rank in (2, 3) for text in texts[:2]), texts
            assert any(job.name(rank) in text for rank in (0, 1) for text in texts[2:]), texts
        assert_ended_cleanly(job, list(range(job.size)))


@pytest.mark.skipif(not NAMES, reason="gloo does not say how a process ended")
@pytest.mark.parametrize(
    ("ending", "waits_in"),
    [
        ("raises", "all_reduce"),
        ("raises", "recv"),
        ("raises", "exit"),
        ("forgets", "recv"),
        pytest.param("forgets", "all_reduce", marks=pytest.mark.drill),
    ],
)
def test_end_of_a_process_is_reported_to_other_hosts(
    make_hosts: Callable[[int], Hosts], ending: str, waits_in: str
) -> None:
    """Also for ranks that learn it through the first rank, and before a rank that waits at the end
    of its process gives up."""
    with start_ranks(make_hosts(3), [0, 1, 2], "departs.py", ending, waits_in) as job:
        for event in job.wait_for("told", [0] if waits_in == "exit" else [0, 1], limit_s=30.0):
            name = re.escape(job.name(2))
            how = {
                "raises": r"was ended by an unhandled ValueError before .*; see its output for the",
                "forgets": r"ended without destroy_process_group\(\) before .*; see its output for",
            }[ending]
            assert re.search(f"{name} {how}", event.facts["text"]), job.report()
        job.finish(EXIT_S)
        assert [*job.exit_codes().values()] == [0, 0, 1 if ending == "raises" else 0], job.report()


@pytest.mark.parametrize(
    ("receiver", "dead"), [(0, 1), (1, 0), pytest.param(2, 1, marks=pytest.mark.drill)]
)
def test_any_source_receive_continues_while_a_sender_lives(
    make_hosts: Callable[[int], Hosts], receiver: int, dead: int
) -> None:
    sender = 3 - receiver - dead
    arguments = ("any_source.py", str(receiver), str(sender))
    with start_ranks(make_hosts(3), [0, 1, 2], *arguments, store_apart=True) as job:
        job.wait_for("working")
        time.sleep(0.3)
        job.kill(dead)
        time.sleep(0.7)  # the others have noticed by now
        (job.folder / "go").touch()
        received = job.wait_for("received", [receiver, sender], limit_s=20.0)
        assert received[0].facts == {"source": sender, "number": 7.0}, job.report()
        assert received[1].facts == {"number": 8.0}, job.report()
        assert_ended_cleanly(job, [receiver, sender])


@pytest.mark.parametrize("leavers", [[3], pytest.param([0, 1], marks=pytest.mark.drill)])
def test_rank_that_leaves_after_group_creation_is_not_reported_dead(
    make_hosts: Callable[[int], Hosts], leavers: list[int]
) -> None:
    """The other ranks may still be making the group's Teams between hosts."""
    arguments = ["leaves_at_once.py", *map(str, leavers)]
    with start_ranks(make_hosts(2), TWO_AND_TWO, *arguments, store_apart=True) as job:
        job.wait_for("done", limit_s=30.0)
        assert_ended_cleanly(job, list(range(job.size)))


@pytest.mark.parametrize("waits_in", ["all_reduce", "recv"])
def test_exec_is_reported_as_death(make_hosts: Callable[[int], Hosts], waits_in: str) -> None:
    with start_ranks(make_hosts(3), [0, 1, 2], "departs.py", "execs", waits_in) as job:
        at_s = job.wait_for("leaving", [2])[0].at_s
        for event in job.wait_for("told", [0, 1], limit_s=30.0):
            assert event.at_s - at_s < SOON_S, job.report()
            if NAMES:
                assert f"{job.name(2)} died or exited" in event.facts["text"], job.report()


@pytest.mark.skipif(not NAMES, reason="gloo is not MPI")
def test_reset_connection_ends_calls_but_no_process(make_hosts: Callable[[int], Hosts]) -> None:
    """MPI may end the process, or hang in a call."""
    with start_ranks(make_hosts(2), [0, 1], "breaks_connection.py", str(TIMEOUT_S)) as job:
        for event in job.wait_for("took", limit_s=60.0):
            assert event.facts["seconds"] < TIMEOUT_S + 2 * LATE_S, job.report()
        for event in job.wait_for("raised"):
            assert event.facts["is_fault"], job.report()
        assert_ended_cleanly(job, list(range(job.size)))


def test_stopped_rank_is_named_at_the_timeout(make_hosts: Callable[[int], Hosts]) -> None:
    stopped = 3
    arguments = ("until_raised.py", "small_all_reduce", str(TIMEOUT_S))
    with start_ranks(make_hosts(2), TWO_AND_TWO, *arguments) as job:
        job.wait_for("working")
        time.sleep(0.3)
        at_s = job.kill(stopped, signal.SIGSTOP)
        for event in job.wait_for("raised", [0, 1, 2], limit_s=20.0):
            assert -EARLY_S < event.at_s - at_s - TIMEOUT_S < LATE_S, job.report()
            if NAMES:
                assert "timed out" in event.facts["text"], job.report()
                assert job.name(stopped) in event.facts["text"], job.report()
        # The stopped rank also gets the error, once it runs again.
        job.kill(stopped, signal.SIGCONT)
        job.wait_for("raised", [stopped], limit_s=TIMEOUT_S + 20.0)
        assert_ended_cleanly(job, list(range(job.size)))


@pytest.mark.parametrize("killed", [[1], pytest.param([0, 1], marks=pytest.mark.drill)])
def test_ranks_continue_after_their_pmix_server_is_killed(
    make_hosts: Callable[[int], Hosts], killed: list[int]
) -> None:
    """A host's dscomm-pmix is killed: its ranks work on, and leave nothing behind."""
    hosts = make_hosts(2)
    with start_ranks(hosts, TWO_AND_TWO, "works_on.py") as job:
        job.wait_for("working")
        for number in killed:
            processes = hosts[number].processes()
            helpers = [pid for pid, words in processes.items() if words == "dscomm-pmix"]
            assert len(helpers) == HELPERS, processes
            for helper in helpers:
                os.kill(helper, signal.SIGKILL)
        time.sleep(0.3)
        (job.folder / "go").touch()
        job.wait_for("done", limit_s=20.0)
        assert_ended_cleanly(job, list(range(job.size)))
        assert "has ended before them" in job.report() or HELPERS == 0, job.report()


@pytest.mark.parametrize("rendezvous", [pytest.param("static", marks=pytest.mark.drill), "c10d"])
def test_torchrun_restart_after_kill_works(
    make_hosts: Callable[[int], Hosts], rendezvous: str
) -> None:
    """torchrun restarts all ranks after one was killed, and they work."""
    env = {}
    if BACKEND == "gloo":
        # torch keeps one store for all attempts, and gloo would use keys of the first attempt.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if rendezvous == "static":
            pytest.skip("static rendezvous cannot do without the shared store")
    options = {"max_restarts": 1, "rendezvous": rendezvous}
    with torchrun(make_hosts(2), 2, "restarted.py", env=env, **options) as job:
        job.wait_for("working")
        time.sleep(0.3)
        job.kill(3)
        assert len(job.results(attempt=1)) == job.size
        if rendezvous == "static":
            # The other host's launcher does not notice: its ranks raise by themselves.
            for event in job.wait_for("raised", [0, 1]):
                assert not NAMES or job.name(3) in event.facts["text"], job.report()
        left = job.hosts.leftovers(limit_s=5.0)
        assert left == {}, f"{left}\n{job.report()}"


@pytest.mark.skipif(not NAMES, reason="gloo does not notice that ranks disagree")
@pytest.mark.parametrize(
    ("count", "odd_rank", "placement"),
    [
        pytest.param(6, 0, [0, 1, 1], marks=pytest.mark.drill),
        (3000, 2, [0, 0, 1]),
        pytest.param(300_000, 2, [0, 1, 2], marks=pytest.mark.drill),
    ],
)
def test_mismatched_calls_raise_on_every_host(
    make_hosts: Callable[[int], Hosts], count: int, odd_rank: int, placement: list[int]
) -> None:
    """Every kind of disagreement of the tests of one host is reported on every rank."""
    arguments = ("mismatch.py", str(count), str(odd_rank))
    with start_ranks(make_hosts(max(placement) + 1), placement, *arguments) as job:
        answers = [result["answers"] for result in job.results()]
        names = [job.name(rank) for rank in range(job.size)]
    counts = {"n": count, "n_more": count + 1, "n_less": count - 1}
    counts |= {"part": count // RANKS, "part_more": count // RANKS + 1}
    problems = []
    for number, kind in enumerate(KINDS):
        sides = list(kind.sides)
        for name, value in counts.items():
            sides = [side.replace("{" + name + "}", str(value)) for side in sides]
        for rank in range(job.size):
            text, took_s, lasting = answers[rank][number]
            where = f"{kind.calls.__name__}, rank {rank}: {text!r}"
            for side in sides:
                if not re.search(side, text):
                    problems.append(f"does not show {side}: {where}")
            if names[odd_rank] not in text or sum(name in text for name in names) < 2:
                problems.append(f"does not name both ranks: {where}")
            if not lasting:
                problems.append(f"the next call does not repeat it, or wrote: {where}")
            if took_s > SOON_S:
                problems.append(f"took {took_s:.2f} s: {where}")
    assert not problems, "\n".join(problems)
