"""The trace: what is kept, how clocks are compared, and the file of all ranks."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.profiler
from hypothesis import given, settings
from hypothesis import strategies as st

import deepspeed_comm as dist
from deepspeed_comm.comms_log.trace import (
    Call,
    Clock,
    OwnTrace,
    Ring,
    offsets,
    ranks_text,
    write_trace,
)
from tests.cases.deepspeed_groups import BACKENDS, init
from tests.cases.harness import World, run_fresh

MONTHS_NS = 7_889_238 * 10**9

# --- clocks

delays = st.integers(0, 5_000_000)  # ns


@settings(deadline=None)
@given(st.data())
def test_clock_offsets_are_within_stated_errors(data: st.DataObject) -> None:
    """Ranks come to and leave barriers with any delays, and read clocks that differ."""
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    differs = [data.draw(st.integers(-(10**15), 10**15)) for _ in range(3)]
    clocks = [Clock(f"host {host}", [], []) for host in hosts]
    now = 0
    for _ in range(data.draw(st.integers(1, 4))):
        came = [now + data.draw(delays) for _ in hosts]
        left = [max(came) + data.draw(delays) for _ in hosts]
        for clock, host, came_ns, left_ns in zip(clocks, hosts, came, left, strict=True):
            clock.came_ns.append(came_ns + differs[host])
            clock.left_ns.append(left_ns + differs[host])
        now = max(left)
    for offset, host in zip(offsets(clocks), hosts, strict=True):
        true_ns = differs[hosts[0]] - differs[host]
        assert abs(offset.ns - true_ns) <= offset.error_ns + 1
        assert host != hosts[0] or (offset.ns, offset.error_ns) == (0, 0)


def test_one_quick_barrier_bounds_clock_offset() -> None:
    """The bounds are of all barriers together."""
    first = Clock("a", [0, 1000, 5000], [900, 1020, 9000])
    other = Clock("b", [107, 1105, 5100], [1200, 1130, 9100])  # 100 ahead
    [_, offset] = offsets([first, other])
    # Of the second barrier: it came to it at 1005 of the first clock, and left at 1030.
    assert (offset.ns, offset.error_ns) == ((1000 - 1130 + 1020 - 1105) // 2, 23)


def test_clock_offset_of_host_uses_barriers_of_all_its_ranks() -> None:
    """Here the first one, of each host, by what it left, and the second one by when it came."""
    hosts = [
        [Clock("a", [0], [5000]), Clock("a", [1000], [6000])],
        [Clock("b", [0], [1200]), Clock("b", [900], [9000])],
    ]
    found = offsets([*hosts[0], *hosts[1]])
    least, most = 1000 - 1200, 5000 - 900
    assert [(offset.ns, offset.error_ns) for offset in found] == [
        *[(0, 0)] * 2,
        *[((least + most) // 2, (most - least) // 2)] * 2,
    ]


# --- what is kept


def test_ring_keeps_latest_calls() -> None:
    ring = Ring(3)
    calls = [Call("send", "send", k, k + 1, 8, "world") for k in range(5)]
    for call in calls:
        ring.add(call)
    assert ring.calls() == calls[2:] and ring.left_out() == 2 and ring.limit == 3
    assert Ring().limit == 0


def test_text_of_ranks_is_shortened_to_ranges() -> None:
    assert ranks_text([0, 1, 2, 5]) == "0-2,5"
    assert ranks_text([3]) == "3"
    assert ranks_text(list(range(1000))) == "0-999"
    assert ranks_text(list(range(0, 64, 2))) == "0,2,4,6,8,10,12,14,… (32 ranks)"


# --- the file


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def assert_is_a_trace(path: Path) -> list[dict[str, Any]]:
    """Times count from a multiple of three months, and what one thread does follows one after the
    other."""
    assert json.loads(path.read_text())["baseTimeNanoseconds"] % MONTHS_NS == 0
    events = events_of(path, "X")
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert {type(event[key]) for key in ("pid", "tid")} == {int}
    named = {(event["pid"], event["tid"]) for event in events_of(path, "M")}
    threads = {(event["pid"], event["tid"]) for event in events}
    assert threads <= named
    for thread in threads:
        own = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if (event["pid"], event["tid"]) == thread
        )
        # Numbers of this size have three decimals, so a sum may be a little above.
        assert all(a[1] <= b[0] + 1e-2 for a, b in zip(own, own[1:], strict=False))
    return events


def own(calls: list[Call], came_ns: int = 0, host: str = "a", limit: int = 10) -> OwnTrace:
    return OwnTrace(limit, calls, 0, Clock(host, [came_ns], [came_ns]), f"host-{host}", 99)


def test_trace_file_corrects_clock_offsets(tmp_path: Path) -> None:
    """The same two calls on both, of which the second rank's clock is 5000 us behind."""
    path = tmp_path / "trace.json"
    here = [Call("send", "mine", 9_000_000, 9_002_000, 64, "world")]
    there = [Call("recv", "recv", 4_000_500, 4_003_500, 64, "ranks 0-1")]
    everyones = [own(here, 9_000_000), own(there, 4_000_000, "b")]
    write_trace(everyones, path, since_1970=3 * MONTHS_NS - 9_000_000)
    assert json.loads(path.read_text())["baseTimeNanoseconds"] == 3 * MONTHS_NS
    first, second = assert_is_a_trace(path)
    assert first == {
        "ph": "X",
        "name": "mine",
        "cat": "send",
        "pid": 0,
        "tid": 1,
        "ts": 0,
        "dur": 2,
        "args": {"bytes": 64, "group": "world"},
    }
    assert (second["pid"], second["ts"], second["dur"]) == (1, 0.5, 3.0)
    ranks = json.loads(path.read_text())["otherData"]["ranks"]
    assert [rank["clock_offset_us"] for rank in ranks] == [0, 5000]
    names = {event["args"].get("name") for event in events_of(path, "M")}
    assert {"rank 0 on host-a (pid 99)", "rank 1 on host-b (pid 99)", "ranks 0-1"} <= names


def test_overlapping_calls_go_to_separate_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [(0, 100), (10, 90), (20, 30), (90, 120), (100, 130)]
    write_trace([own([Call("isend", "isend", *span, 8, "world") for span in spans])], path)
    assert [event["tid"] for event in assert_is_a_trace(path)] == [1, 2, 3, 2, 1]
    titles = [
        event["args"]["name"] for event in events_of(path, "M") if event["name"] == "thread_name"
    ]
    assert titles == ["world", "world (2)", "world (3)"]


def test_trace_without_calls_is_empty_or_refused(tmp_path: Path) -> None:
    write_trace([own([]), own([], limit=0)], tmp_path / "trace.json")
    assert assert_is_a_trace(tmp_path / "trace.json") == []
    with pytest.raises(ValueError, match=r"no rank keeps calls .*configure\(trace_events="):
        write_trace([own([], limit=0)], tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def _trace(world: World, backend: str) -> None:
    init(world, backend)
    path = Path(world.folder) / "trace.json"
    with pytest.raises(RuntimeError, match="could not write .*: ValueError: no rank keeps calls"):
        dist.save_trace(path)
    dist.configure(enabled=True)
    dist.barrier()  # before calls are kept
    group = dist.new_group([0, 1])
    alone = dist.new_group([1])
    dist.configure(trace_events=100)
    if world.rank == 1:
        dist.all_reduce(torch.ones(3), group=alone)
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0, group, log_name="mine")
    tensors, other = [torch.ones(50), torch.empty(50)], 1 - world.rank
    works = [dist.isend(tensors[0], other), dist.irecv(tensors[1], other)]
    for work in works:
        work.wait()
    calls = [dist.P2POp(dist.isend, tensors[0], other, group)]
    calls += [dist.P2POp(dist.irecv, tensors[1], other, group)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    # A Work calls back on a thread of its own.
    deadline = time.monotonic() + 10
    wanted = 6 + (world.rank == 1)
    while dist.get_comm_operation_count() < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    dist.configure(enabled=False)
    dist.save_trace(path)

    events = assert_is_a_trace(path)
    mine = [event for event in events if event["pid"] == world.rank]
    assert {event["args"]["dtype"] for event in mine} == {"float32"}
    assert sorted(
        (event["name"], event["cat"], event["args"]["bytes"], event["args"]["group"])
        for event in mine
    ) == sorted(
        [
            ("all_reduce", "all_reduce", 4000, "world"),
            ("mine", "broadcast", 40, "ranks 0-1"),
            ("isend", "isend", 200, "world"),
            ("irecv", "irecv", 200, "world"),
            ("batch_isend_irecv", "batch_isend_irecv", 400, "ranks 0-1"),
            *([("all_reduce", "all_reduce", 12, "ranks 1")] if world.rank == 1 else []),
        ]
    )
    # On one host clocks are one: no rank is done with an all-reduce before all have begun it.
    reduced = [event for event in events if event["args"]["bytes"] == 4000]
    assert len(reduced) == world.size
    began = max(event["ts"] for event in reduced)
    assert all(event["ts"] + event["dur"] >= began - 1e-2 for event in reduced)
    data = json.loads(path.read_text())["otherData"]
    assert data["world_size"] == world.size
    assert [rank["clock_error_us"] for rank in data["ranks"]] == [0, 0]

    dist.configure(enabled=True, trace_events=2)  # only the latest are kept
    for size in range(1, 6):
        dist.all_reduce(torch.ones(size))
    dist.configure(enabled=False)
    dist.save_trace(path)
    assert [e["args"]["bytes"] for e in events_of(path, "X") if e["pid"] == world.rank] == [16, 20]
    data = json.loads(path.read_text())["otherData"]
    assert [rank["older_calls_left_out"] for rank in data["ranks"]] == [3, 3]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_trace_has_latest_calls_of_all_ranks(backend: str) -> None:
    run_fresh(2, _trace, backend)


def _beside_the_profiler(world: World) -> None:
    init(world, "dscomm")
    folder = Path(world.folder)
    dist.configure(enabled=True, trace_events=100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(9):
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
    dist.configure(enabled=False)
    dist.save_trace(folder / "ours.json")
    profiler.export_chrome_trace(str(folder / "theirs.json"))

    def spans(name: str, event_name: str) -> list[tuple[float, float]]:
        """In us since 1970."""
        content = json.loads((folder / name).read_text())
        base_us = content.get("baseTimeNanoseconds", 0) / 1e3  # torch 1.13 counts from 1970
        events = [each for each in content["traceEvents"] if each.get("name") == event_name]
        return sorted((base_us + e["ts"], base_us + e["ts"] + e["dur"]) for e in events)

    ours, theirs = spans("ours.json", "all_reduce"), spans("theirs.json", "dscomm:all_reduce")
    assert len(ours) == len(theirs) == 9
    # Calls are 10 ms apart. Medians, because on a busy machine a call may pause between the two
    # clocks' readings.
    for end in (0, 1):
        apart_us = [abs(mine[end] - other[end]) for mine, other in zip(ours, theirs, strict=True)]
        assert statistics.median(apart_us) < 3_000, apart_us
    dist.destroy_process_group()


@pytest.mark.skipif(
    not torch.autograd.kineto_available(),
    reason="torch without Kineto, such as Debian's, traces times from the profiler's start",
)
def test_trace_times_match_torch_profiler() -> None:
    run_fresh(1, _beside_the_profiler)
