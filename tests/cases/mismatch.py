"""Calls of ranks that disagree, and the texts of the error that each rank must get."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.cases.rank_processes import FAULT, World
from tests.cases.workloads import is_of_later_call

RANKS = 3
CANARY = 77.0


def floats(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


# Each function makes the calls of one rank in a group. `odd` is true on the rank that differs: the
# first rank in half of the cases, the last in the others.


def other_collective(group: Any, odd: bool, count: int) -> None:
    if odd:
        dist.broadcast(floats(count), 0, group=group)
    else:
        dist.all_reduce(floats(count), group=group)


def dtype_of_the_same_width(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(floats(count, torch.int32 if odd else torch.float32), group=group)


def element_count(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(floats(count + 1 if odd else count), group=group)


def operator(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(floats(count), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)


def root(group: Any, odd: bool, count: int) -> None:
    dist.broadcast(floats(count), 1 if odd else 2, group=group)


def calls_swapped(group: Any, odd: bool, count: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(floats(count), group=group),
        lambda: dist.broadcast(floats(count), 0, group=group),
    ]
    for call in reversed(calls) if odd else calls:
        call()


def call_skipped(group: Any, odd: bool, count: int) -> None:
    if not odd:
        dist.all_reduce(floats(count), group=group)
    dist.broadcast(floats(count), 0, group=group)


def call_doubled(group: Any, odd: bool, count: int) -> None:
    dist.all_reduce(floats(count), group=group)
    if odd:
        dist.all_reduce(floats(count), group=group)
    dist.broadcast(floats(count), 0, group=group)


def splits_do_not_fit(group: Any, odd: bool, count: int) -> None:
    """The odd rank sends its neighbours one element more than they expect."""
    part = count // RANKS
    sends = [part + 1] * RANKS if odd else [part] * RANKS
    receives = [part] * RANKS
    if odd:
        receives[dist.get_rank()] = part + 1
    dist.all_to_all_single(floats(sum(receives)), floats(sum(sends)), receives, sends, group=group)


def lists_of_different_length(group: Any, odd: bool, count: int) -> None:
    tensors = [floats(count) for _ in range(3 if odd else 2)]
    dist.all_reduce_coalesced(tensors, group=group)


def receive_smaller_than_the_send(group: Any, odd: bool, count: int) -> None:
    """Ranks 0 and 2 exchange a message, of which the odd one receives too little; rank 1 calls
    after."""
    rank = dist.get_rank()
    if odd:
        dist.recv(floats(count - 1), 2 - rank, group=group)
    elif rank != 1:
        dist.send(floats(count), 2 - rank, group=group)


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


def mismatch_rank(world: World, cases: list[tuple[int, int, int]]) -> list[tuple[str, float, bool]]:
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
