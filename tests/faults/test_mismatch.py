"""Ranks that disagree: twelve kinds in three sizes, each reported on every rank at once."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import FAULT, SOON_S, TORCH_2, Job, World, names_rank
from workloads import is_of_later_call

SIZES = {"tiny": 6, "staged": 3000, "chunked": 300_000}  # floats: 24 B, 12 kB, 1.2 MB
RANKS = 3
CANARY = 77.0


def _floats(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


# Each function makes the calls of one rank in a group. `odd` is true on the rank that differs: the
# first rank in half of the cases, the last in the others.


def other_collective(group: Any, odd: bool, count: int) -> None:
    if odd:
        dist.broadcast(_floats(count), 0, group=group)
    else:
        dist.all_reduce(_floats(count), group=group)


def dtype_of_the_same_width(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(_floats(count, torch.int32 if odd else torch.float32), group=group)


def element_count(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(_floats(count + 1 if odd else count), group=group)


def operator(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(_floats(count), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)


def root(group: Any, odd: bool, count: int) -> None:
    dist.broadcast(_floats(count), 1 if odd else 2, group=group)


def calls_swapped(group: Any, odd: bool, count: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(_floats(count), group=group),
        lambda: dist.broadcast(_floats(count), 0, group=group),
    ]
    for call in reversed(calls) if odd else calls:
        call()


def call_skipped(group: Any, odd: bool, count: int) -> None:
    if not odd:
        dist.all_reduce(_floats(count), group=group)
    dist.broadcast(_floats(count), 0, group=group)


def call_doubled(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(_floats(count), group=group)
    if odd:
        dist.all_reduce(_floats(count), group=group)
    dist.broadcast(_floats(count), 0, group=group)


def splits_do_not_fit(group: Any, odd: bool, count: int) -> None:
    """The odd rank sends its neighbours one element more than they expect."""
    part = count // RANKS
    sends = [part + 1] * RANKS if odd else [part] * RANKS
    receives = [part] * RANKS
    if odd:
        receives[dist.get_rank()] = part + 1
    dist.all_to_all_single(
        _floats(sum(receives)), _floats(sum(sends)), receives, sends, group=group
    )


def lists_of_different_length(group: Any, odd: bool, count: int) -> None:
    tensors = [_floats(count) for _ in range(3 if odd else 2)]
    dist.all_reduce_coalesced(tensors, group=group)


def receive_smaller_than_the_send(group: Any, odd: bool, count: int) -> None:
    """Ranks 0 and 2 exchange a message, of which the odd one receives too little; rank 1 calls
    after."""
    rank = dist.get_rank()
    if odd:
        dist.recv(_floats(count - 1), 2 - rank, group=group)
    elif rank != 1:
        dist.send(_floats(count), 2 - rank, group=group)


@dataclasses.dataclass
class Kind:
    calls: Callable[[Any, bool, int], None]
    # Both sides' texts in the message; names in braces are those of `counts` below.
    sides: tuple[str, str]


KINDS = [
    Kind(
        other_collective,
        (r"all_reduce\(float32\[{n}\], SUM\)", r"broadcast\(float32\[{n}\], root 0\)"),
    ),
    Kind(
        dtype_of_the_same_width,
        (r"all_reduce\(float32\[{n}\], SUM\)", r"all_reduce\(int32\[{n}\], SUM\)"),
    ),
    Kind(
        element_count,
        (r"all_reduce\(float32\[{n}\], SUM\)", r"all_reduce\(float32\[{n_more}\], SUM\)"),
    ),
    Kind(operator, (r"all_reduce\(float32\[{n}\], SUM\)", r"all_reduce\(float32\[{n}\], MAX\)")),
    Kind(root, (r"broadcast\(float32\[{n}\], root 1\)", r"broadcast\(float32\[{n}\], root 2\)")),
    Kind(
        calls_swapped,
        (r"all_reduce\(float32\[{n}\], SUM\)", r"broadcast\(float32\[{n}\], root 0\)"),
    ),
    Kind(
        call_skipped, (r"all_reduce\(float32\[{n}\], SUM\)", r"broadcast\(float32\[{n}\], root 0\)")
    ),
    Kind(
        call_doubled, (r"all_reduce\(float32\[{n}\], SUM\)", r"broadcast\(float32\[{n}\], root 0\)")
    ),
    Kind(splits_do_not_fit, (r"sends {part_more} elements to", r"expects {part};")),
    Kind(lists_of_different_length, (r"tensor 1 of 2", r"tensor 1 of 3")),
    Kind(
        receive_smaller_than_the_send,
        (r"a send of float32\[{n}\]", r"a receive of float32\[{n_less}\]"),
    ),
]


def _cause(text: str) -> str:
    """A message without its prefix, which names the call that raised it."""
    return re.sub(r"^dscomm: \w+ in group '\w+': ", "", text)


def _rank(world: World, cases: list[tuple[int, int, int]]) -> list[tuple[str, float, bool]]:
    """Runs each case in a new group of the same processes; returns each error and its time."""
    world.init()
    answers = []
    for kind, count, odd_rank in cases:
        group = dist.new_group()
        canary = torch.full((count,), CANARY)
        dist.barrier()
        began_s = time.monotonic()
        text, is_fault = "", False
        try:
            KINDS[kind].calls(group, world.rank == odd_rank, count)
            # A rank without an error so far gets it in its next call.
            dist.all_reduce(canary, group=group)
        except RuntimeError as error:
            text, is_fault = str(error), isinstance(error, FAULT)
        took_s = time.monotonic() - began_s
        # Later calls raise at once, name the first cause, and leave the tensor alone.
        canary.fill_(CANARY)
        again = ""
        try:
            dist.all_reduce(canary, group=group)
        except RuntimeError as error:
            again = str(error)
        untouched = bool((canary == CANARY).all())
        is_told = is_of_later_call(_cause(again), _cause(text))
        answers.append((text, took_s, is_fault and is_told and untouched))
        dist.barrier()
        dist.destroy_process_group(group)
    # The other group is not affected.
    total = torch.full((5,), float(world.rank))
    dist.all_reduce(total)
    assert total.tolist() == [float(sum(range(world.size)))] * 5
    dist.destroy_process_group()
    return answers


@pytest.mark.parametrize(
    ("size", "odd_rank"),
    [
        ("tiny", 0),
        ("staged", 2),
        ("chunked", 0),
        pytest.param("tiny", 2, marks=pytest.mark.drill),
        pytest.param("staged", 0, marks=pytest.mark.drill),
        pytest.param("chunked", 2, marks=pytest.mark.drill),
    ],
)
def test_mismatched_calls_raise_on_every_rank(size: str, odd_rank: int) -> None:
    count = SIZES[size]
    part = count // RANKS
    counts = {
        "n": count,
        "n_more": count + 1,
        "n_less": count - 1,
        "part": part,
        "part_more": part + 1,
    }
    with Job(RANKS, _rank, [(kind, count, odd_rank) for kind in range(len(KINDS))]) as job:
        answers = job.results()
        pids = job.pids
    problems = []
    for number, kind in enumerate(KINDS):
        texts = []
        for rank in range(RANKS):
            text, took_s, lasting = answers[rank][number]
            texts.append(text)
            where = f"{kind.calls.__name__}, rank {rank}: {text!r}"
            if not text:
                problems.append(f"nothing raised: {where}")
                continue
            for side in kind.sides:
                for name, value in counts.items():
                    side = side.replace("{" + name + "}", str(value))
                if not re.search(side, text):
                    problems.append(f"does not show {side}: {where}")
            named = [r for r in range(RANKS) if names_rank(text, r, pids[r])]
            if odd_rank not in named or len(named) < 2:
                problems.append(f"does not name both ranks: {where}")
            if f"group '{number + 1}'" not in text:
                problems.append(f"does not name the group: {where}")
            if not lasting:
                problems.append(f"the next call does not repeat it, or wrote: {where}")
            if took_s > SOON_S:
                problems.append(f"took {took_s:.2f} s: {where}")
        # Ranks that detect it together may report different pairs, of the same call.
        if (
            len(
                {
                    match.group() if (match := re.search(r"call #\d+", text)) else ""
                    for text in texts
                }
            )
            > 1
        ):
            problems.append(f"the ranks name different calls: {kind.calls.__name__}: {texts}")
    assert not problems, "\n".join(problems)


# --- a group made of different ranks

# The list that each of three ranks passes to new_group(); None: a list without the rank. (torch
# sorts the list, so another order is no disagreement.)
MEMBERSHIPS = {
    "two disjoint claims to be first": ([0, 1], [1, 2], None),
    "one list is longer": ([0, 1, 2], [0, 1], [0, 1, 2]),
    "two claims to be second": ([0, 1], [0, 1], [0, 2]),
}


def _make_groups(world: World, lists: tuple[list[int] | None, ...]) -> str:
    world.init()
    members = lists[world.rank]
    dist.barrier()
    began_s = time.monotonic()
    text = ""
    try:
        group = dist.new_group(members if members is not None else [0, 1])
        if members is not None and world.rank in members:
            dist.all_reduce(torch.ones(3), group=group)
    except (RuntimeError, ValueError) as error:
        text = str(error)
    took_s = time.monotonic() - began_s
    dist.barrier()
    assert took_s < SOON_S, f"{took_s:.2f} s: {text}"
    # The default group goes on.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world.size
    return text


@pytest.mark.parametrize("what", MEMBERSHIPS)
def test_new_group_with_different_member_lists_raises(what: str) -> None:
    lists = MEMBERSHIPS[what]
    if not TORCH_2 and what != "one list is longer":
        pytest.skip("torch 1.13's own barrier waits in new_group() for the ranks that raised")
    with Job(RANKS, _make_groups, lists, limit_s=50) as job:
        texts = job.results()
    for rank, text in enumerate(texts):
        # Members that agree may have made their group before the disagreeing one came.
        same = [other for other in lists if other == lists[rank]]
        if lists[rank] is not None and len(same) != len(lists[rank]):
            assert "different members" in text or "believes in" in text, texts
            assert "global rank" in text or re.search(r"believes in \d ranks, rank \d in \d", text)


# --- in the last calls

# Texts that the error must contain for both sides.
LAST_CALLS = {
    "other root": ("broadcast(float32[3], root 0)", "broadcast(float32[3], root 3)"),
    "one more": ("made 9 calls", "made 10 calls"),
    "none": ("made no call", "made 1 call"),
    "the same": (),
}


def _leaves_groups(world: World, composed: bool) -> list[str]:
    """Rank 3 differs in its last call, or makes one call less, and leaves first, last, or together
    with the others. Returns the error of destroying each group."""
    if composed:
        world.compose()
    world.init()
    odd = world.rank == 3
    texts = []
    for calls in LAST_CALLS:
        for first in ([3], [0, 1, 2], [0, 1, 2, 3]):
            group = dist.new_group()
            value = torch.zeros(3)
            # No rank waits for rank 3 in these calls, so all return.
            if calls == "other root":
                # Root 0 first: a rank that waits long for a root compares all calls.
                if world.rank == 0:
                    dist.broadcast(value, 0, group=group)
                dist.barrier()
                if world.rank != 0:
                    dist.broadcast(value, 3 if odd else 0, group=group)
            elif calls == "none":
                if not odd:
                    dist.broadcast(value, 0, group=group)
            else:
                for _ in range(9 if odd and calls == "one more" else 10):
                    dist.broadcast(value, 0, group=group)
            dist.barrier()
            if world.rank not in first:
                dist.barrier()
            text = ""
            try:
                dist.destroy_process_group(group)
            except RuntimeError as error:
                assert isinstance(error, FAULT)
                text = str(error)
                dist.destroy_process_group(group)  # completes torch's part
            if world.rank in first:
                dist.barrier()
            texts.append(text)
            dist.barrier()
    dist.destroy_process_group()
    return texts


@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 destroys a group by dropping it")
@pytest.mark.parametrize("composed", [False, True], ids=["flat", "composed"])
def test_mismatch_in_the_last_calls_raises_in_destroy(composed: bool) -> None:
    with Job(4, _leaves_groups, composed) as job:
        texts = job.results()
        pids = job.pids
    problems = []
    for number, calls in enumerate(call for call in LAST_CALLS for _ in range(3)):
        told = [texts[rank][number] for rank in range(4) if texts[rank][number]]
        if bool(told) != (calls != "the same"):
            problems.append(f"{calls}, {number}: {told}")
        for text in told:
            if not names_rank(text, 3, pids[3]) or any(s not in text for s in LAST_CALLS[calls]):
                problems.append(f"{calls}: {text}")
    assert not problems, "\n".join(problems)
