"""What programs written for DeepSpeed pass, and expect to be released, without DeepSpeed."""

from __future__ import annotations

import collections
import enum
import logging
import sys
import types
from typing import Any

import numpy
import pytest
import torch
import torch.distributed

import deepspeed_comm as dist
from deepspeed_comm import _direct, reduce_op
from deepspeed_comm._log import warn_once
from deepspeed_comm.backend import select_backend
from deepspeed_comm.config import CommsLoggerConfig
from deepspeed_comm.reduce_op import torch_reduce_op
from tests.cases.deepspeed_groups import init
from tests.cases.harness import World, run_fresh

RANKS = 2


def _make_reduce_op(base: type = enum.Enum, **members: int) -> Any:
    """An enum as deepspeed.comm.reduce_op has it."""
    names = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "UNUSED"]
    return base("ReduceOp", members or {name: k for k, name in enumerate(names)})


ForeignOp = _make_reduce_op()


def test_foreign_reduce_op_maps_to_torch_op_of_same_name() -> None:
    for op in dist.ReduceOp:
        if op is not dist.ReduceOp.UNUSED:
            assert torch_reduce_op(ForeignOp[op.name]) == op.torch_op
    # The name decides, not the number; and enums whose members are equal are not mixed up.
    first = _make_reduce_op(enum.IntEnum, SUM=1, MIN=2)
    second = _make_reduce_op(enum.IntEnum, MAX=1, SUM=2)
    assert first.SUM == second.MAX
    expected = torch.distributed.ReduceOp
    for op, torch_op in (
        (first.SUM, expected.SUM),
        (second.MAX, expected.MAX),
        (second.SUM, expected.SUM),
        (first.MIN, expected.MIN),
    ):
        assert torch_reduce_op(op) == torch_op


def test_invalid_reduce_op_raises_type_error() -> None:
    other_name = enum.Enum("Reduction", {"SUM": 0})
    other_member = _make_reduce_op(TOTAL=0)
    for op in (ForeignOp.UNUSED, other_name.SUM, other_member.TOTAL, "SUM", 0, None):
        with pytest.raises(TypeError, match="op: expected one of"):
            torch_reduce_op(op)


def test_memory_of_foreign_reduce_ops_is_bounded() -> None:
    for _ in range(reduce_op.MOST_FOREIGN_OPS + 10):
        assert torch_reduce_op(_make_reduce_op().MAX) == torch.distributed.ReduceOp.MAX
    assert len(reduce_op.foreign_ops) <= reduce_op.MOST_FOREIGN_OPS


def _foreign_op_case(world: World) -> None:
    assert torch_reduce_op(ForeignOp.MIN) == torch.distributed.ReduceOp.MIN  # before the extension
    init(world)
    tensor = torch.full((4,), float(world.rank + 1))
    for op, expected in ((ForeignOp.SUM, 3.0), (ForeignOp.MAX, 2.0), (ForeignOp.MIN, 1.0)):
        out = tensor.clone()
        dist.all_reduce(out, op=op)
        assert out.tolist() == [expected] * 4
        out = tensor.clone()
        dist.inference_all_reduce(out, op=op)
        assert out.tolist() == [expected] * 4
        # From then on the call goes the direct way.
        out = tensor.clone()
        group = torch.distributed.group.WORLD
        assert _direct.direct_all_reduce(out, op, group, False) is None
        assert out.tolist() == [expected] * 4
        for _ in range(2):
            out = tensor.clone()
            dist.all_reduce_caching(out, op=op, match_id=op.name)
            assert out.tolist() == [expected] * 4
        out = tensor.clone()
        dist.reduce(out, 0, op=op)
        assert world.rank != 0 or out.tolist() == [expected] * 4
    dist.destroy_process_group()


def test_collectives_accept_foreign_reduce_op() -> None:
    run_fresh(RANKS, _foreign_op_case)


def test_backend_ccl_selects_dscomm_unless_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend("ccl") == select_backend("CCL") == "dscomm"
    assert select_backend("cpu:ccl,cuda:nccl") == "cpu:dscomm,cuda:nccl"
    assert select_backend("gloo") == "gloo"
    # Where oneCCL's bindings have registered theirs, it is meant.
    monkeypatch.setattr(torch.distributed.Backend, "CCL", "ccl", raising=False)
    assert select_backend("ccl") == "ccl"


def _ccl_case(world: World) -> list[str]:
    warn_once.cache_clear()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_comm").addHandler(handler)
    init(world, "ccl")
    assert dist.get_backend() == "dscomm"
    group = dist.new_group([0, 1], backend="ccl")
    assert dist.get_backend(group) == "dscomm"
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    return told


def test_init_distributed_with_ccl_reports_use_of_dscomm() -> None:
    for told in run_fresh(RANKS, _ccl_case):
        assert [text for text in told if "ccl" in text] == [
            "the backend ccl is not registered with torch; dscomm is used instead"
        ]


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, "true", "True", "ON", "1", "yes", "y", "t", b"true"]
)
def test_log_switch_accepts_true_values_of_pydantic(value: Any) -> None:
    assert CommsLoggerConfig.parse({"enabled": value}).enabled is True


@pytest.mark.parametrize(
    "value", [False, 0, 0.0, "false", "False", "OFF", "0", "no", "n", "f", b"off"]
)
def test_log_switch_accepts_false_values_of_pydantic(value: Any) -> None:
    assert CommsLoggerConfig.parse({"prof_all": value}).prof_all is False


@pytest.mark.parametrize("value", [2, -1, 0.5, "", " true", "maybe", None, [], b"\xff"])
def test_log_switch_refuses_values_that_pydantic_refuses(value: Any) -> None:
    with pytest.raises(TypeError, match="comms_logger: verbose: expected a bool, got"):
        CommsLoggerConfig.parse({"verbose": value})


def test_log_lists_and_numbers_are_coerced_as_by_pydantic() -> None:
    config = CommsLoggerConfig.parse({"prof_ops": ("all_reduce",), "trace_events": "7"})
    assert config.prof_ops == ["all_reduce"] and config.trace_events == 7
    assert CommsLoggerConfig.parse({"trace_events": 8.0}).trace_events == 8
    assert CommsLoggerConfig.parse({"prof_ops": {"send"}}).prof_ops == ["send"]
    for given in ({"prof_ops": "all_reduce"}, {"trace_events": 1.5}, {"trace_events": True}):
        with pytest.raises(TypeError):
            CommsLoggerConfig.parse(given)


def _empty_case(world: World) -> None:
    init(world)
    five = numpy.int64(5)
    for given, shape in (
        ((five,), (5,)),
        ((numpy.int32(2), numpy.uint8(3)), (2, 3)),
        ((torch.Size([2, 3]),), (2, 3)),
        (([five, 2],), (5, 2)),
        ((numpy.array([2, 3]),), (2, 3)),
        ((torch.tensor(4),), (4,)),
        ((range(1, 3),), (1, 2)),
        (([],), ()),
        ((), ()),
        ((0,), (0,)),
    ):
        assert tuple(dist.empty(*given).shape) == shape, given
    for wrong in ((2.0,), ("5",), ([2.5],), (None,)):
        with pytest.raises(TypeError, match="size: expected whole numbers or one sequence of them"):
            dist.empty(*wrong)  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_empty_takes_integers_of_numpy() -> None:
    run_fresh(1, _empty_case)


def _groups_module(released: list[Any], has_release: bool = True) -> types.ModuleType:
    """A stand-in for deepspeed.utils.groups, as far as it is asked."""
    module = types.ModuleType("deepspeed.utils.groups")
    if has_release:
        module._release_process_group_references = (  # type: ignore[attr-defined]
            lambda group=None: released.append(group)
        )
    return module


def _release_case(world: World) -> None:
    init(world)
    name = "deepspeed.utils.groups"
    released: list[Any] = []
    sys.modules[name] = _groups_module(released)
    part = dist.new_group([0, 1])
    dist.destroy_process_group(part)
    assert released == [part]
    released.clear()
    other = dist.new_group([1 - world.rank])
    dist.destroy_process_group(other)  # this rank is none of it
    assert released == []
    dist.destroy_process_group(torch.distributed.group.WORLD)
    assert released == [None]  # all groups are gone with it
    init(world, name="again")
    released.clear()
    dist.destroy_process_group()
    assert released == [None]
    # Older versions of DeepSpeed keep their references.
    sys.modules[name] = _groups_module(released, has_release=False)
    init(world, name="thrice")
    dist.destroy_process_group()
    assert collections.Counter(released) == {None: 1}


def test_destroy_process_group_releases_the_references_of_deepspeed() -> None:
    run_fresh(RANKS, _release_case)
