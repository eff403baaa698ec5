"""The settings to measure, in the order of the table."""

from __future__ import annotations

import dataclasses

import torch

from deepspeed_comm.bench.collectives import COLLECTIVES
from deepspeed_comm.bench.flags import DTYPES, Options, has_meaning


@dataclasses.dataclass(frozen=True)
class Setting:
    """One collective, dtype, operator and root; if unused, op is "sum" and root is -1."""

    collective: str
    dtype: str
    op: str
    root: int

    def sizes(self, options: Options, world: int) -> list[tuple[int, int]]:
        """The different sizes as (bytes, count), rounded down to whole elements of every rank."""
        collective = COLLECTIVES[self.collective]
        width = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        counts = dict.fromkeys(collective.count(size, width, world) for size in options.sizes)
        if self.collective == "barrier":
            return [(0, 0)]
        return [(collective.size(count, width, world), count) for count in counts if count]

    @property
    def redop(self) -> str:
        return self.op if COLLECTIVES[self.collective].reduces else "none"

    @property
    def type(self) -> str:
        return "none" if self.collective == "barrier" else self.dtype


def settings(options: Options, world: int) -> list[Setting]:
    """All settings of the flags, in the order of the table."""
    found = []
    for name in options.collectives:
        collective = COLLECTIVES[name]
        roots = range(world) if options.root is None else [options.root]
        for dtype in options.dtypes if name != "barrier" else options.dtypes[:1]:
            for op in options.ops if collective.reduces else ["sum"]:
                for root in roots if collective.rooted else [-1]:
                    if has_meaning(op, dtype):
                        found.append(Setting(name, dtype, op, root))
    return found
