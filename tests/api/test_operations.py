"""What every operation of the API does, on dscomm and on gloo, over all ranks and over a group."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import re
import sys
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

import deepspeed_comm as dist
from deepspeed_comm import _direct, comm
from deepspeed_comm._log import warn_once
from deepspeed_comm._plugin import load_extension
from deepspeed_comm.comms_log import trace
from deepspeed_comm.torch import Noop
from tests.cases.deepspeed_groups import BACKENDS, init
from tests.cases.harness import TORCH_2, World, run_fresh
from tests.cases.marks import needs_torch_2

if TORCH_2:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import BaseTorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 3
MEMBERS = [0, 2]  # of the group

# It raises for these two by itself; the case runs all collectives, as dscomm does there. Messages
# are run over it all the same.
old_gloo = pytest.mark.skipif(
    not TORCH_2, reason="gloo of torch 1.13 has no all_gather_into_tensor and no reduce_scatter"
)


def values(rank: int, count: int = 4) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def over(ranks: list[int], me: int, group: Any) -> None:
    """Each collective over these ranks, of which this one is `me`, sync and async."""
    size, own = len(ranks), values(me)
    has_all_to_all = dist.get_backend(group) != "gloo"  # which has the form of one tensor alone
    everyones = [values(rank) for rank in ranks]
    total = torch.stack(everyones).sum(0)
    index = ranks.index(me)
    for async_op in (False, True):

        def done(result: Any, is_async: bool = async_op) -> None:
            if is_async:
                result.wait()
            else:
                assert result is None

        tensor = own.clone()
        done(dist.all_reduce(tensor, group=group, async_op=async_op))
        assert torch.equal(tensor, total)
        tensor = own.clone()
        done(dist.all_reduce(tensor, dist.ReduceOp.MAX, group, async_op))
        assert torch.equal(tensor, everyones[-1])
        tensor = own.clone()
        done(dist.all_reduce(tensor, torch.distributed.ReduceOp.MIN, group, async_op))
        assert torch.equal(tensor, everyones[0])

        tensor = own.clone()
        done(dist.broadcast(tensor, ranks[-1], group, async_op))
        assert torch.equal(tensor, everyones[-1])
        tensor = own.clone()
        done(dist.reduce(tensor, ranks[0], group=group, async_op=async_op))
        assert index > 0 or torch.equal(tensor, total)

        parts = [torch.empty(4) for _ in ranks]
        done(dist.all_gather(parts, own, group, async_op))
        assert all(torch.equal(*pair) for pair in zip(parts, everyones, strict=True))
        for call in (dist.all_gather_into_tensor, dist.allgather_fn, dist.all_gather_base):
            joined = torch.empty(4 * size)
            done(call(joined, own, group=group, async_op=async_op))
            assert torch.equal(joined, torch.cat(everyones))

        whole = [own + 100 * k for k in range(size)]
        expected = total + 100 * index * size
        output = torch.empty(4)
        done(dist.reduce_scatter(output, whole, group=group, async_op=async_op))
        assert torch.equal(output, expected)
        for call in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn, dist.reduce_scatter_base):
            output = torch.empty(4)
            done(call(output, torch.cat(whole), group=group, async_op=async_op))
            assert torch.equal(output, expected)

        output = torch.empty(4 * size)
        done(dist.all_to_all_single(output, torch.cat(whole), group=group, async_op=async_op))
        assert torch.equal(output, torch.cat([each + 100 * index for each in everyones]))

        if has_all_to_all:
            parts = [torch.empty(4) for _ in ranks]
            done(dist.all_to_all(parts, whole, group, async_op))
            assert all(map(torch.equal, parts, [each + 100 * index for each in everyones]))

        parts = [torch.empty(4) for _ in ranks] if index == 0 else None
        done(dist.gather(own, parts, ranks[0], group, async_op))
        assert parts is None or all(map(torch.equal, parts, everyones))
        output = torch.empty(4)
        done(dist.scatter(output, whole if index == 0 else None, ranks[0], group, async_op))
        assert torch.equal(output, everyones[0] + 100 * index)

        tensors = [own.clone(), values(me, 7)]
        done(dist.all_reduce_coalesced(tensors, group=group, async_op=async_op))
        assert torch.equal(tensors[0], total)
        assert torch.equal(tensors[1], torch.stack([values(rank, 7) for rank in ranks]).sum(0))
        outputs = [torch.empty(4 * size), torch.empty(2 * size)]
        done(dist.all_gather_coalesced(outputs, [own, own[:2].clone()], group, async_op))
        assert torch.equal(outputs[0], torch.cat(everyones))
        assert torch.equal(outputs[1], torch.cat([each[:2] for each in everyones]))
        # That may have left torch believing that calls are still being coalesced.
        output = torch.empty(4)
        done(dist.reduce_scatter_tensor(output, torch.cat(whole), group=group, async_op=async_op))
        assert torch.equal(output, expected)
        done(dist.barrier(group, async_op))

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": me}, group)
    assert objects == [{"rank": rank} for rank in ranks]
    objects = [("from", me)]
    dist.broadcast_object_list(objects, ranks[0], group)
    assert objects == [("from", ranks[0])]
    objects = [None] * size
    dist.gather_object(me, objects if index == 0 else None, ranks[0], group)
    assert index > 0 or objects == ranks
    objects = [None]
    dist.scatter_object_list(objects, list("abc")[:size] if index == 0 else None, ranks[0], group)
    assert objects == ["abc"[index]]
    tensor = own.clone()
    dist.broadcast(tensor, group=group, group_src=1)
    assert torch.equal(tensor, everyones[1])
    parts = [torch.empty(4) for _ in ranks] if index == 1 else None
    dist.gather(own, parts, group=group, group_dst=1)
    assert parts is None or all(map(torch.equal, parts, everyones))


def _collectives(world: World, backend: str) -> None:
    init(world, backend)
    assert dist.get_backend() == backend and dist.is_initialized()
    over(list(range(world.size)), world.rank, None)
    group = dist.new_group(MEMBERS)
    if world.rank in MEMBERS:
        over(MEMBERS, world.rank, group)
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["dscomm", pytest.param("gloo", marks=old_gloo)])
def test_collectives(backend: str) -> None:
    run_fresh(RANKS, _collectives, backend)


def _point_to_point(world: World, backend: str) -> None:
    init(world, backend)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent, got = values(world.rank), torch.empty(4)
    work = dist.isend(sent, right)
    assert dist.recv(got, left) == left
    work.wait()
    assert torch.equal(got, values(left))
    # isend and irecv return at once: both may come first on every rank.
    works = [dist.irecv(got, left, tag=3), dist.isend(sent + 1, right, tag=3)]
    for work in works:
        work.wait()
    assert torch.equal(got, values(left) + 1)
    ops = [dist.P2POp(dist.isend, sent + 2, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, values(left) + 2)
    with pytest.raises(AssertionError, match="isend or deepspeed_comm.irecv"):
        dist.P2POp(torch.distributed.isend, sent, right)
    if world.rank == 0:
        dist.send(sent, 1)
    elif world.rank == 1:
        assert dist.recv(got) == 0  # from any
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_point_to_point_delivers(backend: str) -> None:
    run_fresh(RANKS, _point_to_point, backend)


def _inference(world: World) -> None:
    """All that the original's shared-memory operation gets wrong."""
    init(world)
    group = dist.new_group(MEMBERS)
    total = torch.stack([values(rank) for rank in range(world.size)]).sum(0)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.int16):
        tensor = values(world.rank).to(dtype)
        assert dist.inference_all_reduce(tensor) is tensor
        assert torch.equal(tensor, total.to(dtype)), dtype
    tensor = values(world.rank)
    dist.inference_all_reduce(tensor, dist.ReduceOp.MAX)
    assert torch.equal(tensor, values(world.size - 1))
    tensor = torch.zeros(4, 2)
    tensor[:, 1] = values(world.rank)
    dist.inference_all_reduce(tensor[:, 1])  # not contiguous
    assert torch.equal(tensor[:, 1], total) and not tensor[:, 0].any()
    if world.rank in MEMBERS:
        tensor = values(world.rank)
        dist.inference_all_reduce(tensor, group=group)
        assert torch.equal(tensor, values(0) + values(2))
    tensor = values(world.rank)
    work = dist.inference_all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, total)
    dist.barrier()
    dist.destroy_process_group()


def test_inference_all_reduce() -> None:
    run_fresh(RANKS, _inference)


class _Undecided:
    def __bool__(self) -> bool:
        raise ArithmeticError("neither")


def _direct_calls(world: World) -> None:
    """What the native entry does itself, what it leaves to others, and what it refuses."""
    init(world)
    everyone = torch.distributed.group.WORLD
    assert _direct.world._default_pg is everyone
    tensor = values(world.rank)
    dist.all_reduce_caching(tensor, match_id="again")
    dist.inference_all_reduce(tensor)
    SUM = dist.ReduceOp.SUM
    direct = _direct.direct_all_reduce
    repeat = dist.cdb._plans.known["again"].repeat
    assert "not_implemented" not in (direct.__name__, repeat.__name__)
    total = values(0) + values(1)
    for call in (direct, repeat):
        tensor = values(world.rank)
        references = sys.getrefcount(tensor)
        assert call(tensor, SUM, everyone, False) is None
        assert torch.equal(tensor, total) and sys.getrefcount(tensor) == references
        tensor = torch.nn.Parameter(values(world.rank), requires_grad=False)
        call(tensor, SUM, everyone, True).wait()
        assert torch.equal(tensor, total)
        for other in (
            (None, SUM, everyone, False),
            ([tensor], SUM, everyone, False),
            (tensor.to("meta"), SUM, everyone, False),
            (tensor, "sum", everyone, False),
            (tensor, dist.ReduceOp.UNUSED, everyone, False),
            (tensor, SUM, None, False),
            (tensor, SUM, "a group", False),
        ):
            assert call(*other) is NotImplemented, other
        for count in (0, 3, 5):
            with pytest.raises(TypeError, match=f"by position, got {count} arguments"):
                call(*(tensor, SUM, everyone, False, None)[:count])
        with pytest.raises(TypeError, match="keyword"):
            call(tensor, SUM, everyone, async_op=False)
        with pytest.raises(ArithmeticError, match="neither"):
            call(tensor, SUM, everyone, _Undecided())
    assert direct(tensor, torch.distributed.ReduceOp.MAX, everyone, False) is None
    assert repeat(tensor, dist.ReduceOp.MAX, everyone, False) is NotImplemented
    assert repeat(tensor[1:], SUM, everyone, False) is NotImplemented
    assert repeat(tensor.double(), SUM, everyone, False) is NotImplemented

    # The operations say what is wrong with it.
    for nothing in (None, "SUM", dist.ReduceOp.UNUSED):
        with pytest.raises(TypeError, match="op: expected one of deepspeed_comm.ReduceOp"):
            dist.inference_all_reduce(tensor, nothing)
    caching = functools.partial(dist.all_reduce_caching, match_id="no")
    for call in (dist.inference_all_reduce, caching):
        # torch 1.13 has no Python TypeError for these; a list has no shape to make a plan of.
        with pytest.raises((TypeError, AttributeError, RuntimeError), match="ensor|shape"):
            call([1.0, 2.0])
        with pytest.raises((TypeError, RuntimeError), match="complex32|ComplexHalf"):
            call(torch.zeros(2, dtype=torch.complex32))
        with pytest.raises(NotImplementedError, match="AVG of int64"):
            call(torch.zeros(2, dtype=torch.int64), op=dist.ReduceOp.AVG)
    dist.barrier()

    # Another thread runs while this one waits: here it lets the other rank come.
    store = torch.distributed.FileStore(f"{world.folder}/let come", world.size)
    tensor = values(world.rank)
    if world.rank == 0:
        thread = threading.Timer(0.2, store.set, ("come", "now"))
        thread.start()
    else:
        store.wait(["come"])
    dist.inference_all_reduce(tensor)
    assert torch.equal(tensor, total)

    # Groups end: one that is kept says so, and another one may be at its address.
    group = dist.new_group([0, 1])
    for _ in range(3):
        dist.inference_all_reduce(tensor, group=group)
        dist.all_reduce_caching(tensor, match_id="of a group", group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    if TORCH_2:  # 1.13 tells a group of its end by dropping it
        with pytest.raises(ValueError, match="destroyed on this rank"):
            dist.inference_all_reduce(tensor, group=group)
        with pytest.raises(ValueError, match="destroyed on this rank"):
            dist.all_reduce_caching(tensor, match_id="of a group", group=group)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    for round_number in range(5):
        group = dist.new_group([0, 1])
        tensor = values(world.rank)
        dist.inference_all_reduce(tensor, group=group)
        dist.all_reduce_caching(tensor, match_id="of a group", group=group)
        assert torch.equal(tensor, 2 * total), round_number
        dist.barrier()
        dist.destroy_process_group(group)
        del group

    # And so does the world, after which there may be another one.
    dist.barrier()
    dist.destroy_process_group()
    assert _direct.world._default_pg is None
    for call in (dist.inference_all_reduce, caching):
        with pytest.raises(AssertionError, match="initialize it"):
            call(tensor)
    init(world, name="another")
    assert _direct.world._default_pg is torch.distributed.group.WORLD
    tensor = values(world.rank)
    dist.inference_all_reduce(tensor)
    dist.all_reduce_caching(tensor, match_id="again")
    assert torch.equal(tensor, 2 * total)
    dist.barrier()
    dist.destroy_process_group()


def test_direct_all_reduce_sums_or_returns_not_implemented() -> None:
    run_fresh(2, _direct_calls)


def _direct_messages(world: World) -> None:
    """Blocking messages pass torch.distributed by where they are plain, with the same results."""
    init(world)
    everyone = torch.distributed.group.WORLD
    pair = dist.new_group([1, 2])  # whose ranks are other numbers than the world's
    me, right, left = world.rank, (world.rank + 1) % 3, (world.rank - 1) % 3

    def around(group: Any, to: int, of: int | None, first: bool, tag: int = 0) -> int:
        sent, got = values(me), torch.empty(4)
        references = sys.getrefcount(sent)
        source = -1 if first else dist.recv(got, of, group=group, tag=tag)
        assert dist.send(sent, to, group=group, tag=tag) is None
        source = dist.recv(got, of, group=group, tag=tag) if first else source
        assert torch.equal(got, values(source)) and sys.getrefcount(sent) == references
        return source

    assert around(None, right, left, me == 0) == left
    if me > 0:
        around(pair, 3 - me, 3 - me, me == 1)
    send, recv = _direct.direct_send, _direct.direct_recv
    assert "not_implemented" not in (send.__name__, recv.__name__)

    # From now on torch's own are not called.
    long_way = torch.distributed.send, torch.distributed.recv
    torch.distributed.send = torch.distributed.recv = None  # type: ignore[assignment]
    assert around(None, right, left, me == 0) == left
    assert around(everyone, right, left, me == 0, tag=2_000_000_000) == left
    assert around(None, right, None, me == 0) == left
    if me > 0:
        assert around(pair, 3 - me, 3 - me, me == 1) == 3 - me
        assert around(pair, 3 - me, None, me == 1) == 3 - me
    dist.barrier()
    if me == 0:  # a later tag is taken first
        for tag in (5, 6):
            dist.send(torch.full((2,), float(tag)), 1, tag=tag)
    elif me == 1:
        for tag in (6, 5):
            got = torch.zeros(2)
            dist.recv(got, 0, tag=tag)
            assert got.tolist() == [tag, tag]
    torch.distributed.send, torch.distributed.recv = long_way

    # What is not plain is left to torch, which says what is wrong, or does it.
    plain = values(me)
    for tensor in (None, [plain], plain.to("meta"), torch.zeros(4, dtype=torch.complex64),
                   values(me, 8)[::2], values(me, 16).view(4, 4).t(),
                   torch.ones(1, dtype=torch.complex64).conj().imag):  # fmt: skip
        assert send(tensor, right, everyone, 0) is NotImplemented
        assert recv(tensor, right, everyone, 0) is NotImplemented
    for peer in (me, 3, -1, 2**40, "1", 1.0, True):
        assert send(plain, peer, everyone, 0) is NotImplemented
        assert recv(plain, peer, everyone, 0) is NotImplemented
    assert send(plain, None, everyone, 0) is NotImplemented
    assert send(plain, 0, pair, 0) is recv(plain, 0, pair, 0) is NotImplemented
    for tag in (-1, 2**31, None, 0.0):
        assert (
            send(plain, right, everyone, tag) is recv(plain, left, everyone, tag) is NotImplemented
        )
    for group in (None, "a group", GroupLike()):
        assert send(plain, right, group, 0) is recv(plain, left, group, 0) is NotImplemented
    for count in (0, 3, 5):
        for call in (send, recv):
            with pytest.raises(TypeError, match=f"by position, got {count} arguments"):
                call(*(plain, right, everyone, 0, None)[:count])
    with torch.profiler.profile():
        assert send(plain, right, everyone, 0) is recv(plain, left, everyone, 0) is NotImplemented
    with pytest.raises((ValueError, RuntimeError), match="itself|the same as|rank of the current"):
        dist.send(plain, me)
    complex_pair = torch.complex(plain, -plain)
    work = dist.isend(complex_pair, right)
    got = torch.zeros(4, dtype=torch.complex64)
    assert dist.recv(got, left) == left
    work.wait()
    assert torch.equal(got, torch.complex(values(left), -values(left)))
    strided = torch.zeros(8)
    work = dist.isend(plain, right)
    dist.recv(strided[::2], left)
    work.wait()
    assert torch.equal(strided[::2], values(left)) and not strided[1::2].any()
    dist.barrier()
    dist.destroy_process_group()


class GroupLike:
    """No group, but an object that can be referred to weakly."""


def test_direct_send_and_recv_bypass_torch_for_plain_tensors() -> None:
    run_fresh(3, _direct_messages)


def _failing_messages(world: World) -> list[list[Any]]:
    """What a call says that fails, and what the flight record has of it: by either way."""
    init(world)
    told = []
    for is_direct in (True, False):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
        late = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        apart = late if world.rank == 0 else None  # rank 1 sends nothing in it
        api: Any = dist if is_direct else torch.distributed
        tensor = torch.zeros(3)
        for each in (group, late):  # makes the direct calls known
            if world.rank == 0:
                api.send(tensor, 1, group=each)
            else:
                api.recv(tensor, 0, group=each)
        known = _direct.direct_send(tensor, world.rank, group, 0)
        assert known is NotImplemented  # to itself, which torch refuses
        lines = []
        if apart is not None:
            with pytest.raises(RuntimeError) as timed_out:
                api.recv(tensor, 1, group=apart)
            lines.append(str(timed_out.value))
        with pytest.raises((RuntimeError, ValueError)) as differing:
            if world.rank == 0:
                api.send(torch.zeros(5), 1, group=group)
                api.recv(tensor, 1, group=group)
            else:
                api.recv(tensor, 0, group=group)
        if world.rank == 1:  # rank 0 may hear of it in either call
            lines.append(str(differing.value))
        with pytest.raises((RuntimeError, ValueError)) as ended:
            api.send(tensor, 1 - world.rank, group=group)
        lines.append(str(ended.value))
        record = _direct.find_group_backend(late).flight_record()
        fields = ("title", "dtype", "count", "peer", "tag", "state")
        entries = [[entry[field] for field in fields] for entry in json.loads(record)]
        # What the other rank is doing at that moment is as it may be.
        lines = [re.sub(r"(running|sleeping) \(state .\)", "there", line) for line in lines]
        told.append([re.sub(r"'[^']*'|\d+", "N", line) for line in lines] + entries)
        torch.distributed.barrier()
    return told


def test_direct_and_torch_messages_report_same_failures() -> None:
    for direct, other in run_fresh(2, _failing_messages):
        assert direct == other and len(direct) >= 3


def _messages_of_an_aborted_group(world: World) -> None:
    init(world)
    store = torch.distributed.FileStore(f"{world.folder}/aborted", world.size)
    for api in (dist, torch.distributed):
        group = dist.new_group([0, 1])
        tensor = values(world.rank)
        if world.rank == 0:
            api.send(tensor, 1, group=group)  # from which on the direct calls know the group
            api.send(tensor + 1, 1, group=group)
            group.abort()
            store.set(api.__name__, "aborted")
        else:
            api.recv(tensor, 0, group=group)
            store.wait([api.__name__])
            assert api.recv(tensor, 0, group=group) == 0
            assert torch.equal(tensor, values(0) + 1)
            with pytest.raises((RuntimeError, ValueError), match="abort"):
                api.recv(tensor, 0, group=group)
        torch.distributed.barrier()


@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no abort()")
def test_direct_and_torch_messages_sent_before_abort_are_received() -> None:
    run_fresh(2, _messages_of_an_aborted_group)


def _caching(world: World, backend: str) -> None:
    said_before = warn_once.cache_info().misses  # in the process that this one was forked from
    init(world, backend)
    group = dist.new_group(MEMBERS)
    total = torch.stack([values(rank) for rank in range(world.size)]).sum(0)
    for _ in range(3):
        tensor = values(world.rank)
        assert dist.all_reduce_caching(tensor, match_id="sum") is None
        assert torch.equal(tensor, total)
        # Other calls come between, of the same tensors and of others.
        dist.all_reduce(tensor)
        tensor = values(world.rank).to(torch.int64)
        dist.all_reduce_caching(tensor, dist.ReduceOp.MAX, "max")
        assert torch.equal(tensor, values(world.size - 1).to(torch.int64))
        tensor = values(world.rank, 100_000)
        work = dist.all_reduce_caching(tensor, match_id="long", async_op=True)
        work.wait()
        everyones = [values(rank, 100_000) for rank in range(world.size)]
        assert torch.equal(tensor, torch.stack(everyones).sum(0))
        tensor = values(world.rank)
        result = dist.all_reduce_caching(tensor, match_id="two", group=group)
        assert result is None
        among = values(0) + values(2) if world.rank in MEMBERS else values(world.rank)
        assert torch.equal(tensor, among)

    # That it is no more than all_reduce is said once, by rank 0.
    warnings = warn_once.cache_info().misses - said_before
    assert warnings == (backend == "gloo" and world.rank == 0)
    tensor = values(world.rank)
    wrong: list[tuple[Any, str]] = [
        ({"tensor": tensor[:3]}, r"'sum' stands for another call: shape \(4,\) before, \(3,\) now"),
        ({"tensor": tensor.double()}, "dtype torch.float32 before, torch.float64 now"),
        ({"op": dist.ReduceOp.MAX}, "op ReduceOp.SUM before, ReduceOp.MAX now"),
    ]
    if world.rank in MEMBERS:
        wrong.append(({"group": group}, r"another group, with ranks \[0, 1, 2\] before"))
    for difference, message in wrong:
        with pytest.raises(ValueError, match=message):
            dist.all_reduce_caching(**{"tensor": tensor, "match_id": "sum", **difference})
    for nothing in ("", None, 7):
        with pytest.raises(TypeError, match="match_id: got .*, expected a non-empty string"):
            dist.all_reduce_caching(tensor, match_id=nothing)
    # torch's own operation is the same as ours.
    dist.all_reduce_caching(tensor, torch.distributed.ReduceOp.SUM, "sum")
    assert torch.equal(tensor, total)
    if backend == "dscomm":
        # Each call has a factor of its own.
        for factor in (0.5, 0.25):
            tensor = values(world.rank)
            op = torch.distributed._make_nccl_premul_sum(factor)
            dist.all_reduce_caching(tensor, op, "scaled")
            assert torch.equal(tensor, total * factor)
        # What was refused has fixed nothing.
        whole = values(world.rank).to(torch.int64)
        with pytest.raises(NotImplementedError, match="AVG of int64"):
            dist.all_reduce_caching(whole, dist.ReduceOp.AVG, "refused")
        dist.all_reduce_caching(whole, dist.ReduceOp.SUM, "refused")
        assert torch.equal(whole, total.to(torch.int64))
    dist.barrier()
    # What a group that is gone has used is free.
    if world.rank in MEMBERS:
        dist.destroy_process_group(group)
    tensor = values(world.rank, 7)
    dist.all_reduce_caching(tensor, match_id="two")
    assert torch.equal(tensor, torch.stack([values(rank, 7) for rank in range(3)]).sum(0))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_reduce_caching(backend: str) -> None:
    run_fresh(RANKS, _caching, backend)


def _ids_that_differ(world: World) -> None:
    init(world)
    mine = "left" if world.rank == 1 else "right"
    with pytest.raises(RuntimeError, match=f"with another match_id.*rank passed match_id '{mine}'"):
        dist.all_reduce_caching(values(world.rank), match_id=mine)


def test_all_reduce_caching_with_different_ids_raises() -> None:
    run_fresh(RANKS, _ids_that_differ)


def _compiled(world: World) -> None:
    init(world)
    group = dist.new_group(MEMBERS)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return dist.inference_all_reduce(tensor * 2, dist.ReduceOp.MAX) + 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def functional(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.ops.dscomm.inference_all_reduce(tensor, "SUM", name) + tensor

    @torch.compile(fullgraph=True, backend="aot_eager")
    def without_use(tensor: torch.Tensor, name: str) -> torch.Tensor:
        torch.ops.dscomm.inference_all_reduce(tensor, "SUM", name)
        dist.inference_all_reduce(tensor * 2)
        return tensor + 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def with_use(tensor: torch.Tensor, name: str) -> torch.Tensor:
        total = torch.ops.dscomm.inference_all_reduce(tensor, "SUM", name)
        return total + dist.inference_all_reduce(tensor * 2)

    own = values(world.rank)
    # Calls without a use for the result on some ranks are made all the same.
    total = values(0) + values(1) + values(2)
    world_name = dist.get_world_group().group_name
    if world.rank == 0:
        assert torch.equal(with_use(own, world_name), 3 * total)
    else:
        assert torch.equal(without_use(own, world_name), own + 1)
    assert torch.equal(step(own), values(world.size - 1) * 2 + 1)
    result = torch.ops.dscomm.inference_all_reduce(own.clone().requires_grad_(), "SUM", world_name)
    assert torch.equal(result.detach(), total)
    with pytest.raises(RuntimeError, match="derivative for dscomm::inference_all_reduce is not"):
        result.sum().backward()
    if world.rank in MEMBERS:
        assert torch.equal(functional(own, group.group_name), values(0) + values(2) + own)
    assert torch.equal(own, values(world.rank))
    with pytest.raises(ValueError, match="got 'MEDIAN', expected one of SUM"):
        torch.ops.dscomm.inference_all_reduce(own, "MEDIAN", "0")
    dist.barrier()
    dist.destroy_process_group()


# With torch 1.13 there is nobody who traces, and no torch.ops.dscomm.
@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no torch.compile")
def test_inference_all_reduce_compiles_as_full_graph() -> None:
    run_fresh(RANKS, _compiled)


def _compiled_over_gloo(world: World) -> None:
    """The native module need not be there."""
    init(world, "gloo")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return dist.inference_all_reduce(tensor * 2, dist.ReduceOp.MAX) + 1

    assert torch.equal(step(values(world.rank)), values(world.size - 1) * 2 + 1)
    assert "deepspeed_comm._C" not in sys.modules
    dist.barrier()
    dist.destroy_process_group()


# With torch 1.13 there is nobody who traces, and no torch.ops.dscomm.
@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no torch.compile")
def test_inference_all_reduce_over_gloo_compiles_as_full_graph() -> None:
    run_fresh(RANKS, _compiled_over_gloo)


def _empty(world: World) -> None:
    with pytest.raises(AssertionError, match="init_distributed"):
        dist.empty(3)
    # torch's own initialisation is enough.
    world.init()
    is_in_pool = load_extension().is_in_pool
    tensor = dist.empty(30, 1000)
    assert tensor.shape == (30, 1000) and tensor.dtype == torch.float32 and is_in_pool(tensor)
    assert dist.empty([30, 1000], dtype=torch.int16).dtype == torch.int16
    assert dist.empty(torch.Size((7, 5))).shape == dist.empty((7, 5)).shape == (7, 5)
    assert dist.empty(0).numel() == 0 and dist.empty().shape == ()
    tensor.requires_grad_().sum().backward()
    with pytest.raises(RuntimeError, match="negative"):
        dist.empty(-3)
    gloo = torch.distributed.new_group(backend="gloo")
    assert not is_in_pool(dist.empty(30, 1000, group=gloo))
    # What does not fit is an ordinary tensor. One that is freed leaves room.
    kept = [dist.empty(100_000, dtype=torch.float64) for _ in range(8)]
    assert [is_in_pool(each) for each in kept] == [True] * 5 + [False] * 3
    del kept[1], tensor
    kept.append(dist.empty(100_000, dtype=torch.float64))
    assert is_in_pool(kept[-1])
    for each in kept:
        each.fill_(world.rank)
        torch.distributed.all_reduce(each)
        assert each.eq(1).all()
    torch.distributed.destroy_process_group()
    assert kept[0].eq(1).all()
    global outlives
    outlives = kept[0]  # freed at the end of the process, or never


outlives: torch.Tensor


def test_empty_uses_pool_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSCOMM_POOL_BYTES", str(4 << 20))
    run_fresh(2, _empty)


def _groups(world: World) -> None:
    init(world)
    everyone = list(range(world.size))
    group = dist.new_group(MEMBERS, timeout=comm.default_pg_timeout)
    assert dist.get_world_size() == world.size and dist.get_rank() == world.rank
    # The original's answers are [] without a group, and none at all, for ever, with the world's.
    assert dist.get_all_ranks_from_group() == everyone
    assert dist.get_all_ranks_from_group(dist.get_world_group()) == everyone
    if world.rank in MEMBERS:
        assert dist.get_all_ranks_from_group(group) == MEMBERS
        assert dist.get_process_group_ranks(group) == MEMBERS
        assert dist.get_global_rank(group, 1) == 2
        assert dist.get_world_size(group) == 2
        assert dist.get_rank(group) == MEMBERS.index(world.rank)
        with pytest.raises(ValueError, match="group_rank: got 2, expected 0 to 1"):
            dist.get_global_rank(group, 2)
        dist.destroy_process_group(group)
    else:
        assert dist.get_rank(group) == -1 and dist.get_world_size(group) == -1
        assert dist.all_reduce(torch.ones(2), group=group) is None
    assert dist.is_initialized() and comm.cdb is dist.cdb is not None
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert getattr(dist, f"has_{name}")() is hasattr(torch.distributed, name)
    assert dist.has_all_reduce_coalesced() is True
    with pytest.raises(TypeError, match="op: expected one of"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.UNUSED)
    with pytest.raises(ValueError, match="got both"):
        dist.broadcast(torch.ones(2), 0, group_src=0)
    with pytest.raises(ValueError, match="got neither"):
        dist.broadcast(torch.ones(2))
    with pytest.raises(AssertionError, match="1 output tensors for 2 input tensors"):
        dist.all_gather_coalesced([torch.ones(6)], [torch.ones(2), torch.ones(2)])
    if TORCH_2:
        dist.monitored_barrier(wait_all_ranks=True)
        assert dist.has_coalescing_manager() is True
        mesh = dist.initialize_mesh_device((world.size,), ("dp",))
        assert mesh.size() == world.size
    dist.barrier()
    dist.destroy_process_group()


def test_queries_of_groups_and_features_answer_correctly() -> None:
    run_fresh(RANKS, _groups)


def _gloo_says_what_it_cannot(world: World) -> None:
    init(world, "gloo")
    assert dist.has_coalescing_manager() is False
    dist.barrier()  # a rank of gloo that leaves early breaks the others' beginning
    dist.destroy_process_group()


def test_has_coalescing_manager_is_false_over_gloo() -> None:
    run_fresh(2, _gloo_says_what_it_cannot)


def _switches(world: World) -> None:
    init(world)
    from deepspeed_comm import torch as executor

    switches = {
        "all_gather": (
            executor.all_gather_comm_off,
            ([torch.zeros(4), torch.zeros(4)], values(world.rank)),
        ),
        "reduce_scatter": (executor.reduce_scatter_comm_off, (torch.zeros(4), [values(0)] * 2)),
        "broadcast": (executor.broadcast_comm_off, (torch.zeros(4), 0)),
        "all_reduce": (executor.all_reduce_comm_off, (values(world.rank),)),
        "reduce": (executor.reduce_comm_off, (values(world.rank), 0)),
    }
    for name, (switch, arguments) in switches.items():
        switch(True)
        result = getattr(dist, name)(*arguments)
        assert isinstance(result, Noop) and result.wait() is None
        switch(False)
        assert getattr(dist, name)(*arguments) is None
    dist.destroy_process_group()


def test_collective_switched_off_does_not_communicate() -> None:
    run_fresh(2, _switches)


def _user_initialised(world: World) -> None:
    world.init("gloo")
    assert not dist.is_initialized()  # torch alone does not count
    dist.init_distributed()
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    dist.init_distributed(dist_init_required=False)  # there is one
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(AssertionError, match="Distributed backend is not initialized"):
        dist.init_distributed(dist_init_required=False)
    world.init("dscomm", name="again")
    dist.init_distributed()
    assert dist.is_initialized() and dist.get_backend() == "dscomm"
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_init_distributed_adopts_existing_torch_group() -> None:
    run_fresh(2, _user_initialised)


class _Seen(TorchDispatchMode if TORCH_2 else object):  # type: ignore[misc]
    """The collectives of c10d that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if op.namespace == "c10d":
            self.names.append(op._opname)
        return op(*given, **(named or {}))


def _modes(world: World) -> None:
    """Modes and transforms see the direct calls, and these give the same results as always."""
    init(world)
    everyone = torch.distributed.group.WORLD
    total = values(0) + values(1)
    caching = functools.partial(dist.all_reduce_caching, match_id="seen")
    direct = (dist.inference_all_reduce, caching)
    for call in direct:  # from here on the native entries know the group
        for _ in range(2):
            call(values(world.rank))
    repeat = dist.cdb._plans.known["seen"].repeat

    def reduced(call: Any, tensor: torch.Tensor | None = None) -> torch.Tensor:
        tensor = values(world.rank) if tensor is None else tensor
        call(tensor)
        return tensor

    for call in direct:
        # On both ranks, and on one beside a direct call of the other.
        for ranks in ({0, 1}, {1}):
            mode = _Seen() if world.rank in ranks else contextlib.nullcontext()
            with mode:
                assert torch.equal(reduced(call), total)
            assert world.rank not in ranks or mode.names == ["allreduce_"]
            mode = BaseTorchFunctionMode() if world.rank in ranks else contextlib.nullcontext()
            with mode:
                tensor = values(world.rank)
                for native in (_direct.direct_all_reduce, repeat):
                    if world.rank in ranks:
                        given = (tensor, dist.ReduceOp.SUM, everyone, False)
                        assert native(*given) is NotImplemented
                assert torch.equal(reduced(call), total)
        assert torch.equal(reduced(call), total)  # directly again
        with CommDebugMode() as counted:
            torch.distributed.all_reduce(values(world.rank))
            reduced(call)
        assert counted.get_total_counts() == 2

        def traced(tensor: torch.Tensor) -> torch.Tensor:
            return reduced(call, tensor * 2) + 1  # noqa: B023

        graph = make_fx(traced)(values(world.rank))
        assert graph.code.count("c10d.allreduce_") == 1
        assert torch.equal(torch.func.functionalize(traced)(values(world.rank)), 2 * total + 1)
        assert torch.equal(torch.func.grad(lambda t: traced(t).sum())(values(0)), 2 * torch.ones(4))  # noqa: B023
        with pytest.raises(RuntimeError, match="[Bb]atching rule"):
            torch.vmap(traced)(torch.ones(2, 4))

        # A real tensor is not sent while tensors are to be without data.
        sequence = everyone._get_backend(torch.device("cpu"))._get_sequence_number_for_group
        before, tensor = sequence(), values(world.rank)
        with FakeTensorMode():
            with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
                call(tensor)
            reduced(call, torch.ones(4))
        assert sequence() == before and torch.equal(tensor, values(world.rank))

        # A tensor without memory.
        with pytest.raises(ValueError, match="zero tensor"):
            call(torch._efficientzerotensor(4))
        tensor = values(world.rank)
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="without memory"):
            call(tensor)
        # Views with a bit, which the backend reads itself.
        view = torch.complex(values(0), values(world.rank)).conj().imag
        assert torch.equal(reduced(call, view), -total)
    _modes_of_messages(world.rank)
    # One rank with a match_id that differs, by the long way.
    dist.barrier()
    match_id = "left" if world.rank == 1 else "right"
    with pytest.raises(RuntimeError, match="with another match_id"):
        with _Seen() if world.rank == 1 else contextlib.nullcontext():
            dist.all_reduce_caching(values(world.rank), match_id=match_id)


def _modes_of_messages(rank: int) -> None:
    everyone = torch.distributed.group.WORLD
    for mode, names in ((_Seen, ["send", "recv_"]), (BaseTorchFunctionMode, None)):
        for is_seen in (rank == 1, True):  # on one rank beside a direct call of the other
            tensor = values(rank)
            with mode() if is_seen else contextlib.nullcontext() as seen:
                if rank == 0:
                    dist.send(tensor, 1)
                else:
                    assert dist.recv(tensor, 0) == 0
                for native in (_direct.direct_send, _direct.direct_recv):
                    assert not is_seen or native(tensor, 1 - rank, everyone, 0) is NotImplemented
            assert torch.equal(tensor, values(0))
            if is_seen and names is not None:
                assert seen.names == [names[rank]]
    # Zeros without memory can be sent, but not be received into.
    with pytest.raises(ValueError, match="zero tensor"):
        dist.recv(torch._efficientzerotensor(4), 1 - rank)
    tensor = values(1)
    if rank == 0:
        dist.send(torch._efficientzerotensor(4), 1)
    else:
        dist.recv(tensor, 0)
        assert not tensor.any()
    tensor.untyped_storage().resize_(0)
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="without memory"):
            call(tensor, 1 - rank)


@needs_torch_2
def test_dispatch_modes_and_transforms_see_direct_calls() -> None:
    run_fresh(2, _modes)


def _versions(world: World, backend: str) -> None:
    """A backward pass that needs what a collective has overwritten raises."""
    init(world, backend)
    load_extension()
    name = torch.distributed.group.WORLD.group_name
    operation = torch.ops.dscomm.inference_all_reduce_

    def torch_ops(tensor: torch.Tensor) -> None:
        operation(tensor, "SUM", name)

    caching = functools.partial(dist.all_reduce_caching, match_id="version")
    for call in (dist.inference_all_reduce, caching, torch_ops) * 2:
        weight = torch.ones(4, requires_grad=True)
        saved = torch.ones(4)
        result = (weight * saved).sum()
        before = saved._version
        call(saved)
        assert saved.tolist() == [2.0] * 4 and saved._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
        with torch.inference_mode():
            tensor = torch.ones(4)
            call(tensor)
        assert tensor.tolist() == [2.0] * 4
        call(tensor)  # an inference tensor outside of the mode, which has no version
        assert tensor.tolist() == [4.0] * 4
    dist.barrier()
    dist.destroy_process_group()


@needs_torch_2
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_raises_if_collective_changed_saved_tensor(backend: str) -> None:
    run_fresh(2, _versions, backend)


def _split_groups(world: World, is_logged: bool) -> None:
    """Groups that torch does not list, by everything that takes a group."""
    init(world)
    dist.configure(enabled=is_logged, prof_all=True)
    everyone = torch.distributed.group.WORLD
    group = everyone.split_group(MEMBERS, timedelta(seconds=20), group_name="pair")
    if world.rank in MEMBERS:
        me, size = MEMBERS.index(world.rank), len(MEMBERS)
        assert dist.get_rank(group) == me and dist.get_world_size(group) == size
        assert dist.get_backend(group) == "dscomm"
        assert dist.get_process_group_ranks(group) == MEMBERS
        assert dist.get_all_ranks_from_group(group) == MEMBERS
        assert [dist.get_global_rank(group, k) for k in range(size)] == MEMBERS
        with pytest.raises(ValueError, match="group_rank: got 2, expected 0 to 1"):
            dist.get_global_rank(group, 2)
        over(MEMBERS, world.rank, group)
        total = values(0) + values(2)
        for match_id in ("split", "split", "another"):
            tensor = values(world.rank)
            assert dist.inference_all_reduce(tensor, group=group) is tensor
            assert torch.equal(tensor, total)
            tensor = values(world.rank)
            dist.all_reduce_caching(tensor, match_id=match_id, group=group)
            assert torch.equal(tensor, total)
        with pytest.raises(ValueError, match=r"ranks \[0, 2\] before, \[0, 1, 2\] now"):
            dist.all_reduce_caching(tensor, match_id="split")
        with pytest.raises(ValueError, match=r"shape \(4,\) before, \(2,\) now"):
            dist.all_reduce_caching(tensor[:2], match_id="split", group=group)
        dist.monitored_barrier(group, timedelta(seconds=20))
        other, sent, got = MEMBERS[1 - me], values(world.rank), torch.empty(4)
        works = [dist.isend(sent, other, group), dist.irecv(got, other, group)]
        for work in works:
            work.wait()
        assert torch.equal(got, values(other))
        if me == 0:
            dist.send(sent, other, group)
            dist.send(sent, other, group)
        else:
            assert dist.recv(got, other, group) == other
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("deepspeed_comm.torch._backends_of", lambda group: [])
                with pytest.raises(ValueError, match="neither torch nor the backend of group '"):
                    dist.recv(got, group=group)  # raises before it takes the message
            assert dist.recv(got, group=group) == other
        with pytest.raises(ValueError, match=r"global rank 1, expected one of the group, \[0, 2\]"):
            dist.broadcast(sent, 1, group)
        assert dist.empty(3, group=group).shape == (3,)
        if is_logged:
            assert "all_reduce" in dist.get_logged_comm_ops()
            assert trace.group_text(group) == f"group {group.group_name}"
            assert dist.comms_logger.get_raw_data()["monitored_barrier"]
        group.shutdown()
    else:
        assert group is None
    dist.configure(enabled=False)
    dist.reset_log()
    dist.barrier()
    dist.destroy_process_group()


@needs_torch_2
@pytest.mark.parametrize("is_logged", [False, True])
def test_calls_accept_group_made_by_split_group(is_logged: bool) -> None:
    run_fresh(RANKS, _split_groups, is_logged)


def _logged_functional(world: World) -> None:
    """An AsyncCollectiveTensor has a wait() and is a tensor: it is returned as one, and logged."""
    import torch.distributed._functional_collectives as functional

    init(world)
    everyone = torch.distributed.group.WORLD
    for is_logged in (False, True):
        dist.configure(enabled=is_logged, prof_all=True)
        tensor = functional.all_reduce(values(world.rank), "sum", everyone)
        assert type(tensor) is functional.AsyncCollectiveTensor
        assert dist.inference_all_reduce(tensor) is tensor
        assert torch.equal(tensor + 0, 2 * (values(0) + values(1)))
    assert dist.comms_logger.get_raw_data()["all_reduce"][16][0] == 1
    dist.configure(enabled=False)
    dist.reset_log()
    dist.barrier()
    dist.destroy_process_group()


@needs_torch_2
def test_asynchronous_collective_tensor_is_returned_and_logged() -> None:
    run_fresh(2, _logged_functional)


def _graph_breaks(world: World) -> None:
    """Operations that end a graph: torch.compile calls them instead of raising."""
    init(world)
    rank, other = world.rank, 1 - world.rank
    group = dist.new_group([0, 1])
    half = torch.distributed._make_nccl_premul_sum(0.5)

    def every(tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty(8)
        dist.all_gather_coalesced([output], [tensor * 1])
        total = output[:4] + output[4:]
        scaled = tensor * 1
        total = total + 2 * dist.inference_all_reduce(scaled, half)
        memory = dist.empty(4)
        memory.copy_(tensor)
        dist.all_reduce_caching(memory, match_id="pool")
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        everyones = [None, None]
        dist.all_gather_object(everyones, rank)
        received = torch.empty(4)
        works = [dist.isend(tensor * 1, other), dist.irecv(received, other)]
        for work in works:
            work.wait()
        total = total + memory + (tensor + received)
        dist.all_reduce_caching(memory, match_id="group", group=group)
        return total + sum(everyones) + dist.get_rank(group) + 0 * memory

    compiled = torch.compile(every, backend="eager")
    for _ in range(2):
        expected = 4 * (values(0) + values(1)) + 1 + rank
        assert torch.equal(compiled(values(rank)), expected)
    assert torch._dynamo.utils.counters["graph_break"]
    dist.barrier()
    dist.destroy_process_group()


@needs_torch_2
def test_compiled_operations_with_graph_breaks_are_correct() -> None:
    importlib.import_module("torch._dynamo")  # once, not in each rank
    run_fresh(2, _graph_breaks, limit_s=240.0)


def _group_of_torch_case(world: World, name: str, backend: str) -> None:
    world.init(backend)
    tensor = torch.ones(3)
    if name == "barrier":
        dist.barrier()
    elif name == "get_rank":
        assert dist.get_rank() == world.rank
    else:
        call = getattr(dist, name)
        call(tensor, **({"match_id": "here"} if name == "all_reduce_caching" else {}))
        assert tensor.eq(world.size).all()
    assert dist.is_initialized()
    torch.distributed.barrier()  # else a rank may leave while another one connects (gloo)
    torch.distributed.destroy_process_group()
    # Not a group that has been: the next one.
    with pytest.raises(AssertionError, match="please initialize it"):
        dist.barrier()
    world.init(backend, name="again")
    dist.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["all_reduce", "inference_all_reduce", "all_reduce_caching", "barrier", "get_rank"]
)
def test_operation_after_torch_init_uses_group_of_torch(name: str, backend: str) -> None:
    run_fresh(2, _group_of_torch_case, name, backend)
