"""What the ranks tell each other of a run goes through the job's store: a backend that is measured
carries none of it, so that its faults cannot hide in it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch.distributed as dist

_serial = itertools.count()  # of the calls in a process, the same on all ranks


class Ledger:
    """Its calls are collective over the default group; values are anything that JSON has. A rank
    that does not come is an error of the store after the group's timeout."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: Any) -> list[Any] | None:
        """On rank 0 the values of all ranks, in their order; None on the others."""
        key = f"deepspeed_comm.bench/{next(_serial)}"
        if self.rank != 0:
            self._store.set(f"{key}/{self.rank}", json.dumps(mine))
            return None
        others = [json.loads(self._store.get(f"{key}/{k}")) for k in range(1, self.world)]
        return [mine, *others]

    def agree(self, mine: Any) -> Any:
        """Rank 0's value, on all ranks."""
        key = f"deepspeed_comm.bench/{next(_serial)}"
        if self.rank == 0:
            self._store.set(key, json.dumps(mine))
            return mine
        return json.loads(self._store.get(key))
