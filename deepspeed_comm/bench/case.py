"""One collective over one backend at one size: tensors, the call, and the check of its result.

The reference knows nothing of what carries the data. Every input is a function of rank and place
with small whole numbers for values, so that each result is exact in every dtype, in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_comm.bench.collectives import COLLECTIVES, make_call

CHUNK = 1 << 20  # elements that are made or compared at a time
_UNWRITTEN = 3  # in every output before a call


def values(rank: int, first: int, count: int, op: str, world: int, seed: int) -> torch.Tensor:
    """Elements first to first + count of rank's input, int64.

    No part of it repeats, so that data in a wrong place is seen. Sums of up to 127 ranks fit into
    127, those of more are at most their number; products fit into 64.
    """
    mixed = (torch.arange(first, first + count) + rank * 1_000_003 + seed * 7_654_321) * 2654435761
    mixed = ((mixed ^ (mixed >> 17)) * 2246822519) >> 24
    if op == "prod":
        return 1 + (mixed % 3 == 0).to(torch.int64) * (rank < 6)
    return mixed % max(2, 127 // world + 1)


def reduced(first: int, count: int, op: str, world: int, seed: int) -> torch.Tensor:
    """The same elements of all ranks' inputs, reduced; float64."""
    inputs = (values(rank, first, count, op, world, seed).double() for rank in range(world))
    joined = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = functools.reduce(joined, inputs)
    return total / world if op == "avg" else total


class Case:
    """Of this rank. `direct` makes deepspeed_comm's own calls, else torch.distributed's."""

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
        """Zeros, which stay what they are, however often they are reduced in place."""
        self.output.fill_(_UNWRITTEN)
        self.touch()

    def touch(self) -> None:
        """Rewrites the whole input."""
        self.input.fill_(0)

    def wrong_after_clear(self) -> int:
        """How many elements of this rank's output the zeros of all ranks did not make 0."""
        if not self.sources:
            return 0
        return sum(int((chunk.double() != 0).sum().item()) for chunk in self.output.split(CHUNK))

    def wrong_in_a_call(self, seed: int) -> int:
        """Calls once with new values; how many elements of this rank's output are wrong."""
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
            # A third of a whole number is none, and a backend may round the thirds, or their sum.
            eps = torch.finfo(self.input.dtype).eps
            return (got - expected).abs() <= self.world * eps * expected.abs()
        return got == expected
