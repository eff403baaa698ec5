"""Every collective, with dtypes, operators and sizes, in groups with every kind of placement on
hosts.

    checks.py all|few|world [again] [CASE ...]

"all" uses every dtype and operator in the group of all ranks, "few" a selection; smaller groups
always use the selection. "world" is "few" without the smaller groups. A CASE is one of
tests/cases/together.py, such as tags_case, that the ranks run together afterwards. With "again"
they finally make their group a second time, in the same store.

Data that is only moved, integers, and MIN and MAX must have the bits of the reference. The order of
float sums across hosts is not specified: they may differ from the reference by the rounding of as
many additions, and must have the same bits on every rank.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from world import BACKEND, World

import deepspeed_comm as api
from tests.cases import reference

if BACKEND == "gloo":
    # Dtypes that gloo lacks. Removed before the cases, which use these lists too, are imported.
    _lacked = {torch.int16, torch.uint16, torch.uint32, torch.uint64}
    for _name in ("REDUCED", "MOVED"):
        _left = [t for t in getattr(reference, _name) if t not in _lacked]
        setattr(reference, _name, [t for t in _left if t not in reference.FLOAT8])

from tests.cases.reference import (  # noqa: E402
    COMPLEX,
    FLOATS,
    MOVED,
    OPS,
    REDUCED,
    assert_same_bits,
    bits,
    has_meaning,
    make_input,
    reduce_reference,
)
from tests.cases.together import BY_NAME  # noqa: E402

HAS_UNEVEN = BACKEND != "gloo"  # lists of different sizes in all_gather and all_to_all
# Below and above one cache line's payload, odd; then over several chunks of staging.
COUNTS = [0, 1, 7, 1000]
BIG, BIGGER = 300_001, 1_500_000
FEW_MOVED = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
FEW_MOVED += [t for t in (getattr(torch, "uint16", None), reference.FLOAT8[0]) if t in MOVED]
FEW_REDUCED = [
    (torch.float32, "SUM"),
    (torch.float32, "MAX"),
    (torch.bfloat16, "SUM"),
    (torch.float16, "AVG"),
    (torch.float64, "PRODUCT"),
    (torch.int8, "SUM"),
    (torch.int32, "BXOR"),
    (torch.int64, "MIN"),
    (torch.complex64, "SUM"),
]


@functools.cache
def large_input(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return make_input(dtype, shape, 0)


def all_reductions() -> list[tuple[torch.dtype, str]]:
    found = [(t, op) for t, op in itertools.product(REDUCED, OPS) if has_meaning(t, op)]
    if BACKEND == "gloo":  # gloo adds and multiplies bools as bytes
        found = [(t, op) for t, op in found if t != torch.bool]
    return found


@dataclasses.dataclass
class Group:
    name: str
    members: list[int]  # global ranks
    handle: Any
    rank: int  # of this process in the group
    thorough: bool
    checks: int = 0
    digest: Any = dataclasses.field(default_factory=hashlib.sha256)

    @property
    def size(self) -> int:
        return len(self.members)

    def reductions(self) -> list[tuple[torch.dtype, str]]:
        return all_reductions() if self.thorough else FEW_REDUCED

    def moved(self) -> list[torch.dtype]:
        return MOVED if self.thorough else FEW_MOVED

    def inputs(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
        """Each member's input; no two groups have the same."""
        if shape[0] < 100_000:
            return [make_input(dtype, shape, member, seed=seed) for member in self.members]
        # Generating random numbers would take longer than the collectives.
        return [large_input(dtype, shape).roll(9973 * member + seed) for member in self.members]

    def same(self, got: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
        assert_same_bits(got, expected, (self.name, *what))
        self.checks += 1

    def reduced(
        self, got: torch.Tensor, inputs: list[torch.Tensor], op: str, *what: object
    ) -> None:
        expected = reduce_reference(inputs, op)
        if got.dtype in FLOATS + COMPLEX and op not in ("MIN", "MAX"):
            assert_rounded(got, expected, inputs, op, (self.name, op, *what))
            self.checks += 1
        else:
            self.same(got, expected, op, *what)

    def same_on_every_rank(self, tensor: torch.Tensor) -> None:
        self.digest.update(bits(tensor).numpy().tobytes())


def assert_rounded(
    got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor], op: str, what: object
) -> None:
    """Checks that the results differ no more than two orders of the same additions can."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    if got.dtype in COMPLEX:
        parts = [torch.view_as_real(tensor) for tensor in inputs]
        assert_rounded(torch.view_as_real(got), torch.view_as_real(expected), parts, op, what)
        return
    limits = torch.finfo(got.dtype)
    wide = [tensor.double().abs() for tensor in inputs]
    size = torch.stack(wide).prod(0) if op == "PRODUCT" else torch.stack(wide).sum(0)
    if op == "AVG":
        size = size / len(inputs)
    allowed = 2 * len(inputs) * (limits.eps * size + limits.tiny * limits.eps)
    apart = (got.double() - expected.double()).abs()
    assert bool((apart <= allowed).all()), f"{what}:\ngot      {got}\nexpected {expected}"


def finish(work: Any, is_async: bool) -> None:
    if is_async:
        work.wait()
        # gloo's reduce_scatter never completes its Work.
        assert work.is_completed() or BACKEND == "gloo"
    else:
        assert work is None


# --- the collectives


def check_all_reduce(group: Group) -> None:
    cells = list(itertools.product(group.reductions(), COUNTS))
    cells += [((torch.float32, "SUM"), BIG), ((torch.bfloat16, "AVG"), BIG)]
    cells += [((torch.int8, "MAX"), BIG)]
    cells += [((torch.float32, "SUM"), BIGGER)] if group.name == "world" else []
    for number, ((dtype, op), count) in enumerate(cells):
        inputs = group.inputs(dtype, (count,), number)
        tensor = inputs[group.rank].clone()
        is_async = number % 2 == 0
        finish(dist.all_reduce(tensor, OPS[op], group.handle, is_async), is_async)
        group.reduced(tensor, inputs, op, dtype, count)
        group.same_on_every_rank(tensor)
        for _ in range(2):
            repeated = inputs[group.rank].clone()
            match_id = f"{group.name} {number}"
            work = api.all_reduce_caching(repeated, OPS[op], match_id, group.handle, is_async)
            finish(work, is_async)
            group.reduced(repeated, inputs, op, dtype, count)


def check_reduce(group: Group) -> None:
    for number, (dtype, op) in enumerate(group.reductions()):
        root, count = number % group.size, COUNTS[number % len(COUNTS)]
        inputs = group.inputs(dtype, (count,), number)
        tensor = inputs[group.rank].clone()
        is_async = number % 2 == 0
        work = dist.reduce(tensor, group.members[root], OPS[op], group.handle, is_async)
        finish(work, is_async)
        if group.rank == root:
            group.reduced(tensor, inputs, op, dtype, count, root)
        elif BACKEND != "gloo":  # gloo leaves partial sums there
            group.same(tensor, inputs[group.rank], "reduce, not the root", dtype, count, root)


def check_reduce_scatter(group: Group) -> None:
    cells = [(cell, COUNTS[k % len(COUNTS)]) for k, cell in enumerate(group.reductions())]
    cells += [((torch.float32, "SUM"), BIG), ((torch.float64, "AVG"), BIG)]
    for number, ((dtype, op), count) in enumerate(cells):
        is_async = number % 2 == 0
        whole = group.inputs(dtype, (group.size, count), number)
        mine = [tensor[group.rank] for tensor in whole]
        given = whole[group.rank]
        output = torch.zeros(count).to(dtype)
        if dtype not in COMPLEX:
            work = dist.reduce_scatter(
                output, list(given.unbind(0)), OPS[op], group.handle, is_async
            )
            finish(work, is_async)
            group.reduced(output, mine, op, "reduce_scatter", dtype, count)
            output = torch.zeros(count).to(dtype)
            flat = given.reshape(-1)
            work = dist.reduce_scatter_tensor(output, flat, OPS[op], group.handle, is_async)
            finish(work, is_async)
            group.reduced(output, mine, op, "reduce_scatter_tensor", dtype, count)
    shapes = [(k + 1, 2) for k in range(group.size)]
    lists = [[make_input(torch.float64, s, k, seed=9) for s in shapes] for k in group.members]
    output = torch.zeros(shapes[group.rank], dtype=torch.float64)
    dist.reduce_scatter(output, lists[group.rank], group=group.handle)
    group.reduced(output, [given[group.rank] for given in lists], "SUM", "uneven")


def check_broadcast(group: Group) -> None:
    cells = [*itertools.product(group.moved(), COUNTS), (torch.float32, BIG)]
    for number, (dtype, count) in enumerate(cells):
        root, is_async = number % group.size, number % 3 == 0
        inputs = group.inputs(dtype, (count,), number)
        tensor = inputs[group.rank].clone()
        finish(dist.broadcast(tensor, group.members[root], group.handle, is_async), is_async)
        group.same(tensor, inputs[root], "broadcast", dtype, count, root)


def check_all_gather(group: Group) -> None:
    cells = [*itertools.product(group.moved(), COUNTS), (torch.float32, BIG)]
    for number, (dtype, count) in enumerate(cells):
        is_async = number % 2 == 0
        inputs = group.inputs(dtype, (count,), number)
        outputs = [torch.zeros(count).to(dtype) for _ in inputs]
        finish(dist.all_gather(outputs, inputs[group.rank], group.handle, is_async), is_async)
        for got, expected in zip(outputs, inputs, strict=True):
            group.same(got, expected, "all_gather", dtype, count)
        joined = torch.zeros(group.size * count).to(dtype)
        work = dist.all_gather_into_tensor(joined, inputs[group.rank], group.handle, is_async)
        finish(work, is_async)
        together = torch.cat([tensor.view(torch.uint8) for tensor in inputs]).view(dtype)
        group.same(joined, together, "all_gather_into_tensor", dtype, count)
    if HAS_UNEVEN:
        inputs = [make_input(torch.float32, (k, 3), k) for k in range(group.size)]
        outputs = [torch.zeros(tensor.shape) for tensor in inputs]
        dist.all_gather(outputs, inputs[group.rank], group.handle)
        for got, expected in zip(outputs, inputs, strict=True):
            group.same(got, expected, "all_gather, uneven")


def check_gather_and_scatter(group: Group) -> None:
    for number, (dtype, count) in enumerate(itertools.product(group.moved(), COUNTS)):
        root, is_async = number % group.size, number % 2 == 0
        is_root, source = group.rank == root, group.members[root]
        inputs = group.inputs(dtype, (count,), number)
        if BACKEND != "gloo" or dtype not in COMPLEX:
            outputs = [torch.zeros(count).to(dtype) for _ in inputs] if is_root else None
            work = dist.gather(inputs[group.rank], outputs, source, group.handle, is_async)
            finish(work, is_async)
            for got, expected in zip(outputs or [], inputs, strict=False):
                group.same(got, expected, "gather", dtype, count, root)
        output = torch.zeros(count).to(dtype)
        given = inputs if is_root else None
        finish(dist.scatter(output, given, source, group.handle, is_async), is_async)
        group.same(output, inputs[group.rank], "scatter", dtype, count, root)


def check_all_to_all(group: Group) -> None:
    for number, dtype in enumerate(group.moved()):
        is_async = number % 2 == 0
        # Member a sends a + b elements to member b: nothing from the first to itself.
        pieces = [
            [make_input(dtype, (a + b,), a * 10 + b, seed=number) for b in range(group.size)]
            for a in range(group.size)
        ]
        given, expected = pieces[group.rank], [row[group.rank] for row in pieces]
        if HAS_UNEVEN:
            outputs = [torch.zeros(tensor.shape).to(dtype) for tensor in expected]
            finish(dist.all_to_all(outputs, given, group.handle, is_async), is_async)
            for got, wanted in zip(outputs, expected, strict=True):
                group.same(got, wanted, "all_to_all", dtype)
        sent, wanted = (
            torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
            for tensors in (given, expected)
        )
        output = torch.zeros(wanted.shape).to(dtype)
        splits = [group.rank + k for k in range(group.size)]
        work = dist.all_to_all_single(output, sent, splits, splits, group.handle, is_async)
        finish(work, is_async)
        group.same(output, wanted, "all_to_all_single", dtype)
    big = group.inputs(torch.float32, (group.size * 150_000,), 0)
    output = torch.zeros(big[0].shape)
    dist.all_to_all_single(output, big[group.rank], group=group.handle)
    slices = [tensor.chunk(group.size)[group.rank] for tensor in big]
    group.same(output, torch.cat(slices), "all_to_all_single, big")


def check_coalesced(group: Group) -> None:
    shapes = [(3,), (2, 2), (1000,)]
    inputs = [
        [make_input(torch.float32, shape, k, seed=i) for i, shape in enumerate(shapes)]
        for k in group.members
    ]
    tensors = [tensor.clone() for tensor in inputs[group.rank]]
    dist.all_reduce_coalesced(tensors, group=group.handle)
    for i, tensor in enumerate(tensors):
        group.reduced(tensor, [given[i] for given in inputs], "SUM", "coalesced")


def check_objects(group: Group) -> None:
    everyone: list[Any] = [None] * group.size
    mine = {"member": group.members[group.rank], "text": "x" * 100 * group.rank}
    dist.all_gather_object(everyone, mine, group.handle)
    assert [entry["member"] for entry in everyone] == group.members
    last = group.members[-1]
    sent = [mine, "second"] if group.rank == group.size - 1 else [None, None]
    dist.broadcast_object_list(sent, last, group.handle)
    assert sent[0]["member"] == last and sent[1] == "second"
    received: list[Any] = [None]
    given = [f"for {k}" for k in group.members] if group.rank == 0 else None
    dist.scatter_object_list(received, given, group.members[0], group.handle)
    assert received[0] == f"for {group.members[group.rank]}"
    group.checks += 3


def check_messages(group: Group) -> None:
    """Around a ring of the members, with a tag; then to the first one, which receives from any
    source."""
    right = group.members[(group.rank + 1) % group.size]
    left = group.members[group.rank - 1]
    for number, (dtype, count) in enumerate(itertools.product(group.moved(), (0, 5, 3000))):
        given = {k: make_input(dtype, (count,), k, seed=number) for k in group.members}
        mine = given[group.members[group.rank]]
        sender = dist.isend(mine, right, group.handle, tag=number)
        received = torch.zeros(count).to(dtype)
        dist.irecv(received, left, group.handle, tag=number).wait()
        sender.wait()
        group.same(received, given[left], "message", dtype, count)
    if group.rank > 0:
        dist.send(torch.full((3,), float(group.rank)), group.members[0], group.handle)
        return
    sources = []
    for _ in range(group.size - 1):
        received = torch.zeros(3)
        source = dist.recv(received, None, group.handle)
        sources.append(source)
        assert received.tolist() == [float(group.members.index(source))] * 3, (source, received)
    assert sorted(sources) == group.members[1:], sources
    group.checks += 1


def check_many_in_flight(group: Group) -> None:
    """Asynchronous calls waited for out of order, with synchronous ones between them."""
    works, checks = [], []
    for i in range(40):
        tensor = torch.full((i * 50 + 1,), float(group.rank + i))
        works.append(dist.all_reduce(tensor, group=group.handle, async_op=True))
        checks.append((tensor, float(sum(k + i for k in range(group.size)))))
        if i % 11 == 0:
            single = torch.tensor([group.rank])
            dist.all_reduce(single, dist.ReduceOp.MAX, group.handle)
            assert single.item() == group.size - 1
        dist.barrier(group.handle, async_op=True)  # never waited for
    for work in reversed(works):
        work.wait()
    for tensor, expected in checks:
        assert tensor.unique().tolist() == [expected], group.name
        group.checks += 1
    dist.barrier(group.handle)


CHECKS = [
    check_all_reduce,
    check_reduce,
    check_reduce_scatter,
    check_broadcast,
    check_all_gather,
    check_gather_and_scatter,
    check_all_to_all,
    check_coalesced,
    check_objects,
    check_messages,
    check_many_in_flight,
]


# --- the groups


def subsets(world: World) -> dict[str, list[int]]:
    """Groups within a host, across hosts, and mixed; each set of ranks once."""
    everyone = list(range(world.size))
    hosts = sorted(set(world.placement))
    wanted = {f"on host {host}": world.ranks_of_host(host) for host in hosts}
    wanted["one of each host"] = sorted(world.ranks_of_host(host)[-1] for host in hosts)
    wanted["all but the first"] = everyone[1:]
    wanted["first and last"] = [0, world.size - 1]
    found: dict[str, list[int]] = {}
    for name, members in wanted.items():
        if 2 <= len(members) < world.size and members not in found.values():
            found[name] = members
    return found


def groups_of(world: World, depth: str) -> Iterator[Group]:
    """The groups of this rank, each destroyed after its use."""
    everyone = list(range(world.size))
    yield Group("world", everyone, dist.group.WORLD, world.rank, depth == "all")
    if depth == "world":
        return
    # All are made before the first is used, so that they exist at the same time.
    handles = {name: dist.new_group(members) for name, members in subsets(world).items()}
    for name, members in subsets(world).items():
        if world.rank in members:
            yield Group(name, members, handles[name], members.index(world.rank), False)
            dist.destroy_process_group(handles[name])


def main() -> None:
    depth, *cases = sys.argv[1:]
    assert depth in ("all", "few", "world"), depth
    is_again = cases[:1] == ["again"]
    world = World()
    world.init()
    api.init_distributed()
    counts: collections.Counter[str] = collections.Counter()
    digests = {}
    with contextlib.closing(groups_of(world, depth)) as groups:
        for group in groups:
            for check in CHECKS:
                before = group.checks
                check(group)
                counts[check.__name__] += group.checks - before
            digests[group.name] = group.digest.hexdigest()
    for case in cases[is_again:]:
        BY_NAME[case]()
    dist.barrier()
    dist.destroy_process_group()
    if is_again:
        world.init()
        api.init_distributed()
        group = Group("again", list(range(world.size)), dist.group.WORLD, world.rank, False)
        check_all_reduce(group)
        check_messages(group)
        digests[group.name] = group.digest.hexdigest()
        dist.destroy_process_group()
    world.say("done", counts=counts, digests=digests, cases=cases)


if __name__ == "__main__":
    main()
