"""The collectives: the source of their data, their bandwidth, and their calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_comm import comm

# The source of one part of an output: (the rank of the input, None for the reduction over all
# ranks; the part of that input).
Source = tuple["int | None", int]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Inputs and outputs consist of parts of `count` elements, as in nccl-tests.

    inputs: from (this rank, number of ranks, root), the number of parts of this rank's input.
    sources: from the same three, the sources of the parts of this rank's output.
    factor: busbw / algbw, from the number of ranks.
    divided: the size counts the parts of all ranks, not of one.
    in_place: the output is the input. reduces, rooted: it has an operator, a root.
    """

    inputs: Callable[[int, int, int], int]
    sources: Callable[[int, int, int], list[Source]]
    factor: Callable[[int], float]
    divided: bool = False
    in_place: bool = False
    reduces: bool = False
    rooted: bool = False

    def count(self, size: int, element_bytes: int, world: int) -> int:
        """The number of elements of a part for a size of `size` bytes, rounded down."""
        return size // element_bytes // (world if self.divided else 1)

    def size(self, count: int, element_bytes: int, world: int) -> int:
        """The size in bytes of parts of `count` elements."""
        return count * element_bytes * (world if self.divided else 1)


def _one(me: int, world: int, root: int) -> int:
    return 1


def _each(me: int, world: int, root: int) -> int:
    return world


def _pinged(me: int, world: int, root: int) -> list[Source]:
    """Both ranks of a pair get the even rank's input; the last of an odd number has no pair."""
    first = me - me % 2
    return [(first, 0)] if first + 1 < world else []


def _neighbours(me: int, world: int, root: int) -> list[Source]:
    """Part 0 of the previous rank's input and part 1 of the next rank's."""
    return [((me - 1) % world, 0), ((me + 1) % world, 1)]


def _share(world: int) -> float:
    return (world - 1) / world


def _whole(world: int) -> float:
    return 1.0


# Factors of nccl-tests' doc/PERFORMANCE.md, and of its sources for gather, scatter and send_recv.
# nccl-tests has no ping_pong and no exchange; docs/benchmarks.md explains their factors.
COLLECTIVES = {
    "all_reduce": Collective(
        _one, lambda me, world, root: [(None, 0)], lambda world: 2 * _share(world),
        in_place=True, reduces=True,
    ),
    "all_gather": Collective(
        _one, lambda me, world, root: [(rank, 0) for rank in range(world)], _share, divided=True
    ),
    "reduce_scatter": Collective(
        _each, lambda me, world, root: [(None, me)], _share, divided=True, reduces=True
    ),
    "broadcast": Collective(
        _one, lambda me, world, root: [(root, 0)], _whole, in_place=True, rooted=True
    ),
    "reduce": Collective(
        _one, lambda me, world, root: [(None, 0)] if me == root else [], _whole,
        in_place=True, reduces=True, rooted=True,
    ),
    "gather": Collective(
        _one,
        lambda me, world, root: [(rank, 0) for rank in range(world)] if me == root else [],
        _share, divided=True, rooted=True,
    ),
    "scatter": Collective(
        lambda me, world, root: world if me == root else 0,
        lambda me, world, root: [(root, me)], _share, divided=True, rooted=True,
    ),
    "all_to_all": Collective(
        _each, lambda me, world, root: [(rank, me) for rank in range(world)], _share, divided=True
    ),
    "send_recv": Collective(_one, lambda me, world, root: [((me - 1) % world, 0)], _whole),
    "ping_pong": Collective(_one, _pinged, lambda world: 2.0),
    "exchange": Collective(lambda me, world, root: 2, _neighbours, lambda world: 2.0),
    "barrier": Collective(lambda me, world, root: 0, lambda me, world, root: [], lambda world: 0.0),
}  # fmt: skip


# The collectives with a direct call of deepspeed_comm.
DIRECT = ("all_reduce", "ping_pong")


def bandwidths(collective: str, size: int, seconds: float, world: int) -> tuple[float, float]:
    """Returns (algbw, busbw) in GB/s (10^9 bytes per second) for a size in bytes."""
    algbw = size / seconds / 1e9
    return algbw, algbw * COLLECTIVES[collective].factor(world)


def torch_op(op: str) -> Any:
    return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))


def _newest(name: str) -> Any:
    """torch's collective on one tensor; newer torch deprecates its old name."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, old)


def make_call(
    name: str,
    given: torch.Tensor,
    result: torch.Tensor,
    op: str,
    root: int,
    group: Any,
    direct: bool = False,
) -> Callable[[], object]:
    """A function that makes one blocking call on one-dimensional tensors. All ranks must call it.

    given, result: the input and the output; empty on ranks without one. root: -1 without one.
    direct: uses deepspeed_comm's direct call, for a name in DIRECT.

    Raises ValueError if the collective needs more ranks.
    """
    me, world = dist.get_rank(group), dist.get_world_size(group)
    if name == "all_reduce":
        function: Any = comm.inference_all_reduce if direct else dist.all_reduce
        return functools.partial(function, given, torch_op(op), group)
    if name == "all_gather":
        return functools.partial(_newest("all_gather"), result, given, group)
    if name == "reduce_scatter":
        return functools.partial(_newest("reduce_scatter"), result, given, torch_op(op), group)
    if name == "broadcast":
        return functools.partial(dist.broadcast, given, root, group)
    if name == "reduce":
        return functools.partial(dist.reduce, given, root, torch_op(op), group)
    if name == "gather":
        parts = list(result.chunk(world)) if me == root else None
        return functools.partial(dist.gather, given, parts, root, group)
    if name == "scatter":
        parts = list(given.chunk(world)) if me == root else None
        return functools.partial(dist.scatter, result, parts, root, group)
    if name == "all_to_all":
        return functools.partial(dist.all_to_all_single, result, given, None, None, group)
    if name == "barrier":
        return functools.partial(dist.barrier, group)
    if world == 1:
        raise ValueError(f"{name} needs two ranks or more")
    if name == "ping_pong":
        return _ping_pong(given, result, group, comm if direct else dist)
    around = ((me + 1) % world, (me - 1) % world)
    if name == "exchange":
        return functools.partial(_exchange, given.chunk(2), result.chunk(2), *around, group)
    return functools.partial(_send_recv, given, result, *around, group)


def _send_recv(given: torch.Tensor, result: torch.Tensor, to: int, of: int, group: Any) -> None:
    works = [dist.irecv(result, of, group), dist.isend(given, to, group)]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _exchange(
    given: tuple[torch.Tensor, ...],
    result: tuple[torch.Tensor, ...],
    following: int,
    before: int,
    group: Any,
) -> None:
    """Tags distinguish the directions, because with two ranks both neighbours are the same."""
    works = [
        dist.irecv(result[0], before, group, 0),
        dist.irecv(result[1], following, group, 1),
        dist.isend(given[0], following, group, 0),
        dist.isend(given[1], before, group, 1),
    ]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _ping_pong(
    given: torch.Tensor, result: torch.Tensor, group: Any, api: Any
) -> Callable[[], object]:
    """Even ranks send to the next rank, which sends the data back."""
    me = dist.get_rank(group)
    if not result.numel():
        return lambda: None

    def ping(peer: int = me + 1) -> None:
        api.send(given, peer, group)
        api.recv(result, peer, group)

    def pong(peer: int = me - 1) -> None:
        api.recv(result, peer, group)
        api.send(result, peer, group)

    return pong if me % 2 else ping
