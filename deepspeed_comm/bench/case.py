"""One collective over one backend with one size: tensors, the call, and the check of its result.

Inputs are small whole numbers, a function of the rank and the index, so results are exact in every
dtype and for every order of reduction. The reference is computed locally.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_comm.bench.collectives import COLLECTIVES, make_call

CHUNK = 1 << 20  # elements made or compared at a time
_UNWRITTEN = 3  # the value of outputs before a call


def values(rank: int, first: int, count: int, op: str, world: int, seed: int) -> torch.Tensor:
    """Elements first to first + count - 1 of the input of `rank`; int64.

    They are not periodic, so misplaced data is detected. Sums are at most 127, or the number of
    ranks if that is larger; products are at most 64.
    """
    mixed = (torch.arange(first, first + count) + rank * 1_000_003 + seed * 7_654_321) * 2654435761
    mixed = ((mixed ^ (mixed >> 17)) * 2246822519) >> 24
    if op == "prod":
        return 1 + (mixed % 3 == 0).to(torch.int64) * (rank < 6)
    return mixed % max(2, 127 // world + 1)


def reduced(first: int, count: int, op: str, world: int, seed: int) -> torch.Tensor:
    """The reduction of all ranks' values(); float64."""
    inputs = (values(rank, first, count, op, world, seed).double() for rank in range(world))
    joined = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = functools.reduce(joined, inputs)
    return total / world if op == "avg" else total


class Case:
    """The collective of this rank. direct: use deepspeed_comm's direct calls, not torch's."""

    def __init__(
        self,
        name: str,
        count: int,
        dtype: torch.dtype,
        op: str,
        root: int,
        group: Any,
        direct: bool = False,
    ) -> None:
        collective = COLLECTIVES[name]
        self.world = dist.get_world_size(group)
        place = (dist.get_rank(group), self.world, root)
        self.count, self.op, self.in_place = count, op, collective.in_place
        self.sources = collective.sources(*place)
        self.input = torch.zeros(count * collective.inputs(*place), dtype=dtype)
        self.output = (
            self.input if self.in_place else torch.zeros(count * len(self.sources), dtype=dtype)
        )
        self.rank = place[0]
        self.call: Callable[[], object] = make_call(
            name, self.input, self.output, op, root, group, direct
        )

    def clear(self) -> None:
        """Sets the input to zeros, which reductions in place keep, and a separate output to 3s."""
        self.output.fill_(_UNWRITTEN)
        self.touch()

    def touch(self) -> None:
        """Writes the whole input again."""
        self.input.fill_(0)

    def wrong_after_clear(self) -> int:
        """The number of nonzero elements of this rank's output, for calls after clear()."""
        if not self.sources:
            return 0
        return sum(int((chunk.double() != 0).sum().item()) for chunk in self.output.split(CHUNK))

    def wrong_in_a_call(self, seed: int) -> int:
        """Calls once with new values; returns the number of wrong elements of the output."""
        if not self.in_place:
            self.output.fill_(_UNWRITTEN)
        for first in range(0, self.input.numel(), CHUNK):
            chunk = self.input[first : first + CHUNK]
            chunk.copy_(values(self.rank, first, chunk.numel(), self.op, self.world, seed))
        self.call()
        wrong = 0
        for part, (rank, of_input) in enumerate(self.sources):
            for first in range(0, self.count, CHUNK):
                count = min(CHUNK, self.count - first)
                got = self.output[part * self.count + first :][:count].double()
                place = (of_input * self.count + first, count, self.op, self.world, seed)
                expected = reduced(*place) if rank is None else values(rank, *place).double()
                wrong += int((~self._same(got, expected)).sum().item())
        return wrong

    def _same(self, got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        if self.op == "avg" and self.world & (self.world - 1):
            # The mean may be a fraction; backends may round each term or the sum.
            eps = torch.finfo(self.input.dtype).eps
            return (got - expected).abs() <= self.world * eps * expected.abs()
        return got == expected
