"""Ranks that disagree: twelve kinds in three sizes, each reported on every rank at once."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.cases.mismatch import KINDS, RANKS, mismatch_rank
from tests.cases.rank_processes import FAULT, SOON_S, TORCH_2, Job, World, names_rank

SIZES = {"tiny": 6, "staged": 3000, "chunked": 300_000}  # floats: 24 B, 12 kB, 1.2 MB


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
    with Job(RANKS, mismatch_rank, [(kind, count, odd_rank) for kind in range(len(KINDS))]) as job:
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
