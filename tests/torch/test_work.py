"""The Work of an asynchronous call, and the profiler's view of calls."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import TORCH_2, RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2
from tests.cases.work import (
    callbacks_case,
    lifetime_case,
    semantics_case,
)


def test_work_reports_completion_and_results(ranks: RankSets) -> None:
    ranks(3).run(semantics_case)


def test_callbacks_may_start_calls(ranks: RankSets) -> None:
    ranks(2).run(callbacks_case)


def test_queued_calls_survive_dropped_tensors_and_work_objects(ranks: RankSets) -> None:
    ranks(3).run(lifetime_case)


def _wait_limit_case(world: World) -> None:
    world.init(timeout=timedelta(seconds=20))
    tensor = torch.ones(3)
    if world.rank == 1:
        time.sleep(1.5)
    work = dist.all_reduce(tensor, async_op=True)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="200 ms"):
            work.wait(timedelta(milliseconds=200))
        assert not work.is_completed() and not work.is_success()
        if TORCH_2:  # torch 1.13 cannot pass an exception to Python, not even None
            assert work.exception() is None
    # The call itself continues.
    work.wait()
    assert tensor.tolist() == [2.0] * 3


def test_work_continues_after_wait_timeout() -> None:
    run_fresh(2, _wait_limit_case)


def _failure_case(world: World) -> None:
    world.init()
    group = dist.new_group(timeout=timedelta(seconds=1))
    tensor = torch.ones(3)
    if world.rank == 0:
        work = dist.all_reduce(tensor, async_op=True, group=group)
        future = work.get_future()
        with pytest.raises(RuntimeError, match="all_reduce in group"):
            work.wait()
        assert work.is_completed() and not work.is_success()
        with pytest.raises(RuntimeError, match="dscomm"):
            future.wait()
        if TORCH_2:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(tensor, group=group)
        else:
            with pytest.raises(RuntimeError):
                dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0] * 3
    # The default group, in which nothing failed, goes on.
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def test_failure_reaches_work_and_future() -> None:
    run_fresh(2, _failure_case)


_CALLS: dict[str, Any] = {
    "all_reduce": lambda t, **o: dist.all_reduce(t, **o),
    "broadcast": lambda t, **o: dist.broadcast(t, 0, **o),
    "reduce": lambda t, **o: dist.reduce(t, 0, **o),
    "all_gather": lambda t, **o: dist.all_gather([t.clone() for _ in range(2)], t, **o),
    "reduce_scatter": lambda t, **o: dist.reduce_scatter(
        t.clone(), [t.clone() for _ in range(2)], **o
    ),
    "all_to_all": lambda t, **o: dist.all_to_all(
        [t.clone() for _ in range(2)], [t.clone() for _ in range(2)], **o
    ),
    "barrier": lambda t, **o: dist.barrier(**o),
}
if TORCH_2:
    _CALLS["all_gather_into_tensor"] = lambda t, **o: dist.all_gather_into_tensor(
        torch.cat([t, t]), t, **o
    )
    _CALLS["reduce_scatter_tensor"] = lambda t, **o: dist.reduce_scatter_tensor(
        t, torch.cat([t, t]), **o
    )


def _profiler_case(path: str) -> None:
    rank = dist.get_rank()
    for name, call in _CALLS.items():
        for is_async in (False, True):
            with torch.profiler.profile(record_shapes=True) as profiler:
                work = call(torch.ones(4, 5), async_op=is_async)
                if work is not None:
                    work.wait()
            events = [event for event in profiler.events() if event.name == f"dscomm:{name}"]
            assert len(events) == 1, (name, is_async, [event.name for event in profiler.events()])
            if name != "barrier":
                shape = [8, 5] if name == "reduce_scatter_tensor" else [4, 5]
                assert events[0].input_shapes[0] == shape, (name, events[0].input_shapes)
    with torch.profiler.profile(record_shapes=True) as profiler:
        sender = dist.isend(torch.ones(6), 1 - rank)
        dist.recv(torch.zeros(6), 1 - rank)
        sender.wait()
    names = [event.name for event in profiler.events()]
    assert names.count("dscomm:send") == 1 and names.count("dscomm:recv") == 1, names
    if not TORCH_2:
        return
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(7))
    trace_path = f"{path}/trace{rank}.json"
    profiler.export_chrome_trace(trace_path)
    with open(trace_path) as file:
        trace = json.load(file)
    (event,) = [e for e in trace["traceEvents"] if e.get("name") == "record_param_comms"]
    assert event["args"]["Collective name"] == "all_reduce"
    assert event["args"]["In msg nelems"] == 7 and event["args"]["Group size"] == 2
    assert event["args"]["dtype"] == "Float"


def test_profiler_shows_collectives_and_messages(ranks: RankSets, tmp_path: Any) -> None:
    ranks(2).run(_profiler_case, str(tmp_path))


def _introspection_case() -> None:
    rank = dist.get_rank()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "dscomm" and backend.rank() == rank and backend.size() == 2
    assert "2" in backend.describe()
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(17))
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 2
    record = json.loads(backend.flight_record())
    assert [entry["title"] for entry in record[-2:]] == ["all_reduce", "barrier"]
    assert record[-2]["count"] == 17 and record[-2]["dtype"] == "float32"
    assert backend.options.backend == "dscomm"
    assert backend.options._timeout == timedelta(seconds=30)
    backend.set_timeout(timedelta(seconds=29))
    assert backend.options._timeout == timedelta(seconds=29)
    backend.set_timeout(timedelta(seconds=30))


@needs_torch_2
def test_backend_introspection(ranks: RankSets) -> None:
    ranks(2).run(_introspection_case)


def test_native_module_describes_itself() -> None:
    from deepspeed_comm import _C

    assert _C.torch_version.split("+")[0].split("a")[0][:4] == torch.__version__[:4]
    assert isinstance(_C.reduce_target(), str) and _C.reduce_target()
    rows = _C.settings()
    assert all(row["name"].startswith("DSCOMM_") and row["meaning"] for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) > 5
