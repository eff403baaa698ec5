"""The communication log: what is counted and timed, and what the original gets wrong."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed_comm as dist
from deepspeed_comm.comms_log import log as log_module
from deepspeed_comm.comms_log import record
from deepspeed_comm.comms_log.histogram import RELATIVE_ERROR
from deepspeed_comm.comms_log.summary import trimmed_mean
from deepspeed_comm.comms_log.trace import Call
from deepspeed_comm.comms_logging import CommsLogger, calc_bw_log, convert_size
from deepspeed_comm.config import CommsLoggerConfig, DeepSpeedCommsConfig
from tests.cases.deepspeed_groups import init
from tests.cases.harness import World, run_fresh

SLEEP_S = 0.2


def test_bandwidths_match_nccl_tests() -> None:
    size, ms, ranks = 10**6, 2.0, 4
    line = size * 8 / (ms * 1e6)  # Gbit/s
    assert calc_bw_log("all_reduce", size, ms, ranks) == pytest.approx((line, line * 1.5))
    assert calc_bw_log("inference_all_reduce", size, ms, ranks)[0] == pytest.approx(line)
    # An all-gather is given a part of the whole, a reduce-scatter all of it.
    assert calc_bw_log("all_gather", size, ms, ranks) == pytest.approx((4 * line, 3 * line))
    assert calc_bw_log("reduce_scatter", size, ms, ranks) == pytest.approx((line, line * 0.75))
    assert calc_bw_log("all_to_all_single", size, ms, ranks) == pytest.approx((line, line * 0.75))
    for name in ("broadcast", "send", "barrier", "monitored_barrier", "something else"):
        assert calc_bw_log(name, size, ms, ranks) == pytest.approx((line, line))
    assert calc_bw_log("all_reduce", size, 0.0, ranks) == (0.0, 0.0)


def test_size_texts_and_trimmed_means_are_correct() -> None:
    assert [convert_size(size) for size in (0, 8, 1536, 3 << 20)] == [
        "0B",
        "8.0 B",
        "1.5 KB",
        "3.0 MB",
    ]
    assert trimmed_mean([]) == 0.0
    assert trimmed_mean([1.0] * 9 + [1000.0]) == 1.0
    assert trimmed_mean([2.0, 4.0]) == 3.0


def test_configuration_sets_valid_keys_and_refuses_invalid_ones() -> None:
    def enabled(config: dict[str, Any]) -> bool:
        log = CommsLogger()
        log.configure(DeepSpeedCommsConfig(config))
        return log.enabled

    log = CommsLogger()
    log.enabled = True
    log.configure(DeepSpeedCommsConfig({}))
    assert log.enabled  # what says nothing of the log changes nothing
    assert not enabled({})
    assert enabled({"comms_logger": {"enabled": True}})
    assert enabled({"comms_logger": {}})  # as in deepspeed.comm
    assert not enabled({"comms_logger": {"enabled": False}})  # there it is on
    log = CommsLogger()
    given = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["all_reduce"]}
    log.configure(DeepSpeedCommsConfig({"comms_logger": given}))
    assert (log.verbose, log.prof_all, log.prof_ops) == (True, False, ["all_reduce"])
    with pytest.raises(TypeError, match="nonsense: unknown key; expected enabled, prof_all"):
        CommsLoggerConfig.parse({"nonsense": 1})
    with pytest.raises(TypeError, match="verbose: expected a bool, got 'maybe'"):
        CommsLoggerConfig.parse({"verbose": "maybe"})
    log.configure(DeepSpeedCommsConfig({"comms_logger": {"trace_events": 7}}))
    assert log.trace_events == 7
    with pytest.raises(TypeError, match="trace_events: expected a int, got True"):
        CommsLoggerConfig.parse({"trace_events": True})
    with pytest.raises(ValueError, match="trace_events: expected 0 or more, got -1"):
        CommsLoggerConfig.parse({"trace_events": -1})
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match="trace_events: expected a number of calls"):
            log.trace_events = wrong  # type: ignore[assignment]
    assert log.trace_events == 7


def test_deepspeed_configuration_keeps_trace_events() -> None:
    """A model of pydantic, which says what the user has set, and knows no trace_events."""
    given = SimpleNamespace(
        enabled=True, verbose=True, debug=False, prof_ops=[], prof_all=False,
        model_fields_set={"enabled", "verbose", "prof_all"},
    )  # fmt: skip
    log = CommsLogger()
    log.trace_events = 5
    log.configure(SimpleNamespace(comms_logger_enabled=True, comms_logger=given))
    assert (log.enabled, log.verbose, log.prof_all, log.trace_events) == (True, True, False, 5)


def test_memory_is_bounded() -> None:
    log = CommsLogger()
    log.trace_events = 10
    for k in range(10_000):
        log.append("barrier", "barrier", 1.0 + k, 0, 2)
        log.trace(Call("barrier", "barrier", k, k + 1, 0, "world"))
    count, latencies, algbws, busbws = log.get_raw_data()["barrier"][0]
    assert count == log.get_total_operations() == 10_000
    kept = record.KEPT_SAMPLES
    assert latencies == [1.0 + k for k in range(10_000 - kept, 10_000)]  # in their order
    assert len(latencies) == len(algbws) == len(busbws) == kept
    summary = log.get_operation_summary("barrier")
    assert summary is not None
    # Of all calls, not of those that are kept.
    assert summary[0]["total_latency_ms"] == pytest.approx(10_000 * 10_001 / 2)
    assert summary[0]["avg_latency_ms"] == pytest.approx(5000.5, rel=RELATIVE_ERROR)
    assert summary[0]["p50_latency_ms"] == pytest.approx(5000, rel=RELATIVE_ERROR)
    assert summary[0]["p99_latency_ms"] == pytest.approx(9900, rel=RELATIVE_ERROR)
    assert log.get_operation_summary("nothing") is None
    assert [call.began_ns for call in log.own_calls()[1]] == list(range(9990, 10_000))
    log.reset_data()
    assert not log.has_data() and log.get_operation_names() == []
    assert log.own_calls() == (10, [], 0)


def test_records_beyond_size_and_name_limits_are_merged() -> None:
    """As of a job whose messages are as long as its sentences, or whose log_name has a counter."""
    log = CommsLogger()
    for size in range(3 * log_module.MOST_RECORDS):
        log.append("all_reduce", "all_reduce", 1.0, size, 2)
    summary = log.get_operation_summary("all_reduce")
    assert summary is not None
    most = log_module.MOST_RECORDS
    # 0 to 2047 by themselves; 2048 is a power of two, up to it and 4096 and 8192 the others go.
    assert set(summary) == {*range(most), 2048, 4096, 8192}
    assert [summary[size]["count"] for size in (5, 2048, 4096, 8192)] == [1, 1, 2048, 2047]
    for k in range(2 * log_module.MOST_NAMES):
        log.append("barrier", f"step {k}", 1.0, 0, 2)
    names = log.get_operation_names()
    assert len(names) == log_module.MOST_NAMES + 1 and log_module.OTHERS in names
    assert log.get_total_operations() == 3 * most + 2 * log_module.MOST_NAMES
    log.reset_data()
    log.append("all_reduce", "all_reduce", 1.0, 5000, 2)
    assert list(log.get_raw_data()["all_reduce"]) == [5000]


def test_timed_op_accepts_any_function_signature() -> None:
    """timed_op is public: what it is given may have parameters of any kind."""
    calls: list[Any] = []

    def plain(tensor: Any, scale: int = 2, log_name: str = "plain") -> int:
        """Says."""
        calls.append((tensor, scale, log_name))
        return scale

    def odd(first: Any, /, *rest: Any, scale: int = 2, **more: Any) -> int:
        calls.append((first, rest, scale, more))
        return scale

    def shadowing(comms_logger: Any, _func: int = 1) -> int:
        calls.append((comms_logger, _func))
        return _func

    timed = dist.timed_op(plain)
    assert timed(1, scale=3) == 3 and timed(1) == 2 and timed(scale=4, tensor=5) == 4
    assert calls == [(1, 3, "plain"), (1, 2, "plain"), (5, 4, "plain")]
    assert (timed.__name__, timed.__doc__, timed.__wrapped__) == ("plain", "Says.", plain)
    with pytest.raises(
        TypeError, match=r"plain\(\) missing 1 required positional argument: 'tensor'"
    ):
        timed()
    calls.clear()
    assert dist.timed_op(odd)(1, 2, 3, scale=4, other=5) == 4
    assert dist.timed_op(shadowing)(7, _func=8) == 8
    assert calls == [(1, (2, 3), 4, {"other": 5}), (7, 8)]


def _results_of_others(world: World) -> None:
    """While the log is on: lists that are no Works are handed on, and a Work that fails is no
    call."""
    init(world)
    dist.configure(enabled=True)

    @dist.timed_op
    def pair(tensor: Any) -> list[Any]:
        return [tensor, 7]

    tensor = torch.ones(2)
    first, second = pair(tensor)
    assert first is tensor and second == 7 and list(logged("pair")) == [8]

    class Failing:
        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_exception(RuntimeError("on purpose"))
            return future

        def wait(self) -> None:
            raise RuntimeError("on purpose")

        def is_completed(self) -> bool:
            return True

    @dist.timed_op
    def failing(tensor: Any) -> Any:
        return Failing()

    with pytest.raises(RuntimeError, match="on purpose"):
        failing(tensor).wait()
    assert not logged("failing")
    dist.comms_logger.settle()
    dist.destroy_process_group()


def test_timed_op_logs_lists_but_no_failed_works() -> None:
    run_fresh(1, _results_of_others)


def _stragglers_of_groups(world: World) -> None:
    """Calls of one group are compared with each other, though others are as long."""
    init(world)
    group = dist.new_group([0, 1])
    dist.configure(enabled=True)
    if world.rank < 2:
        dist.all_reduce(torch.ones(100), group=group)
    dist.all_reduce(torch.ones(100))
    if world.rank < 2:
        dist.all_reduce(torch.ones(100), group=group)
    dist.configure(enabled=False)
    result = dist.log_summary(show_straggler=True, return_dict=True)
    assert result is not None
    found = result["straggler_analysis"]["all_reduce"][400]
    assert found["count"] == (3 if world.rank < 2 else 1)
    own = _latest_by_group(400)
    everyones: list[Any] = [None] * world.size
    dist.all_gather_object(everyones, own)
    fastest = min(each["world"][0] for each in everyones)
    behind = own["world"][0] - fastest
    for k in range(2 if world.rank < 2 else 0):
        least = min(each["ranks 0-1"][k] for each in everyones[:2])
        behind += own["ranks 0-1"][k] - least
    assert found["total_straggler_ms"] == pytest.approx(behind)
    dist.destroy_process_group()


def _latest_by_group(size: int) -> dict[str, list[float]]:
    return dist.comms_logger._records["all_reduce"][size].latest_by_group()


def test_stragglers_are_compared_within_each_group() -> None:
    run_fresh(3, _stragglers_of_groups)


def logged(name: str) -> dict[int, list[Any]]:
    return dist.comms_logger.get_raw_data().get(name, {})


def _what_is_logged(world: World) -> None:
    init(world)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert not dist.has_comm_data()  # it is off

    dist.configure(enabled=True)
    began = time.perf_counter()
    for _ in range(6):
        dist.all_reduce(tensor)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    [(size, (count, latencies, _, busbws))] = logged("all_reduce").items()
    assert (size, count) == (4000, 6)
    # Each call's own time: the original's is that of all calls before, too.
    assert 0 < sum(latencies) <= elapsed_ms
    assert all(busbw > 0 for busbw in busbws)

    # Calls that end the original's job, with exit code 0.
    dist.all_gather_object([None] * world.size, world.rank)
    dist.reduce_scatter_tensor(torch.empty(500), tensor)
    assert list(logged("reduce_scatter_tensor")) == [4000]  # counted once
    assert dist.get_comm_operation_count() == 8
    assert dist.get_logged_comm_ops() == [
        "all_reduce",
        "all_gather_object",
        "reduce_scatter_tensor",
    ]
    dist.reset_log()

    # prof_ops and prof choose calls; log_name is what they are chosen and logged by.
    dist.configure(prof_all=False, prof_ops=["mine"])
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="mine")
    dist.barrier(prof=True)
    assert dist.get_logged_comm_ops() == ["mine", "barrier"]
    dist.reset_log()

    dist.configure(prof_all=True, debug=True)
    dist.all_reduce(tensor)
    assert dist.get_logged_comm_ops() == ["all_reduce | [Caller Func: _what_is_logged]"]
    dist.configure(debug=False)
    dist.reset_log()

    # An asynchronous call takes until it is complete, however soon it returns.
    if world.rank == 1:
        time.sleep(SLEEP_S)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    received = dist.irecv(tensor) if world.rank == 0 else None
    if world.rank == 1:
        time.sleep(SLEEP_S)
        dist.send(tensor, 0)
    if received is not None:
        received.wait()
        for name in ("all_reduce", "irecv"):
            deadline = time.monotonic() + 10
            while not logged(name) and time.monotonic() < deadline:
                time.sleep(0.001)
            [(_, (_, [latency], _, _))] = logged(name).items()
            assert latency >= SLEEP_S * 1e3 * 0.5, (name, latency)

    dist.barrier()
    dist.configure(enabled=False)
    dist.destroy_process_group()


def test_log_has_chosen_calls_and_their_latencies() -> None:
    run_fresh(2, _what_is_logged)


def _messages_of_gloo(world: World) -> None:
    """Its works cannot call back, so they are logged when they are waited for; all of a batch, when
    the last one is."""
    init(world, "gloo")
    dist.configure(enabled=True)
    tensors = [torch.ones(10), torch.empty(10)]
    other = 1 - world.rank
    calls = [dist.P2POp(dist.isend, tensors[0], other), dist.P2POp(dist.irecv, tensors[1], other)]
    works = dist.batch_isend_irecv(calls)
    works[0].wait()
    assert not logged("batch_isend_irecv")
    works[1].wait()
    [(size, (count, _, _, _))] = logged("batch_isend_irecv").items()
    assert (size, count) == (80, 1)
    dist.configure(enabled=False)
    dist.barrier()
    dist.destroy_process_group()


def test_gloo_batch_is_logged_after_last_wait() -> None:
    run_fresh(2, _messages_of_gloo)


def _summary(world: World) -> None:
    init(world)
    dist.configure({"comms_logger": {"enabled": True}})
    group = dist.new_group([0, 1])
    for _ in range(3):
        dist.all_reduce(torch.ones(100))
    # Ranks may log different calls: the original hangs over that.
    if world.rank < 2:
        dist.all_reduce(torch.ones(10), group=group)
    dist.configure(enabled=False)
    result = dist.log_summary(show_straggler=True, return_dict=True)
    assert result is not None
    of_all = result["summary"]["all_reduce"][400]
    assert of_all["count"] == 3 and of_all["msg_size_str"] == "400.0 B"
    assert of_all["total_latency_ms"] > 0 and of_all["avg_latency_ms"] > 0
    [(_, (_, latencies, _, _))] = [each for each in logged("all_reduce").items() if each[0] == 400]
    assert of_all["p50_latency_ms"] == pytest.approx(sorted(latencies)[1], rel=RELATIVE_ERROR)
    assert of_all["p99_latency_ms"] == pytest.approx(max(latencies), rel=RELATIVE_ERROR)
    assert of_all["busbw_avg_gbps"] == pytest.approx(of_all["tput_avg_gbps"] * 4 / 3)
    assert (40 in result["summary"]["all_reduce"]) == (world.rank < 2)
    if world.rank < 2:
        # By the ranks of the group, which are two: 2 (n - 1) / n is 1.
        of_group = result["summary"]["all_reduce"][40]
        assert of_group["busbw_avg_gbps"] == pytest.approx(of_group["tput_avg_gbps"])
    straggler = result["straggler_analysis"]["all_reduce"][400]
    assert straggler["count"] == 3 and straggler["total_straggler_ms"] >= 0
    assert result["metadata"]["world_size"] == 3 and result["metadata"]["rank"] == world.rank
    assert dist.log_summary() is None
    assert dist.log_summary(compact=True) is None
    dist.destroy_process_group()


def test_summary_matches_log_and_is_printed_by_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    run_fresh(3, _summary)
    printed = capfd.readouterr().out
    # By rank 0 alone: once with stragglers, once without.
    assert printed.count("Comm. Op            Message Size        Count") == 3
    assert printed.count("Breakdown with straggler effect") == 1
    heads = "tput_avg (Gbps)     busbw_avg (Gbps)    p50 Latency(ms)     p99 Latency(ms)\n"
    assert f"Total Latency(ms)   Avg Latency(ms)     {heads}" in printed
    [compact] = re.findall(r"^operation, size .*(?:\n.*)*", printed, re.M)
    assert re.search(r"^all_reduce\n(?: .*\n)*  400\.0 B +3 ", compact, re.M)
    assert all(len(line) <= 100 for line in compact.splitlines())
