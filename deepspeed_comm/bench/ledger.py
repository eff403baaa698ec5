"""Exchanges results between ranks through the job's store, not through a measured backend, whose
faults could corrupt them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch.distributed as dist

_serial = itertools.count()  # counts the exchanges of this process, equally on all ranks


class Ledger:
    """Methods are collective over the default group. Values must be serializable as JSON. If a rank
    is missing, the store raises after the group's timeout."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: Any) -> list[Any] | None:
        """Returns the values of all ranks, in rank order, on rank 0; None on other ranks."""
        key = f"deepspeed_comm.bench/{next(_serial)}"
        if self.rank != 0:
            self._store.set(f"{key}/{self.rank}", json.dumps(mine))
            return None
        others = [json.loads(self._store.get(f"{key}/{k}")) for k in range(1, self.world)]
        return [mine, *others]

    def agree(self, mine: Any) -> Any:
        """Returns rank 0's value on all ranks."""
        key = f"deepspeed_comm.bench/{next(_serial)}"
        if self.rank == 0:
            self._store.set(key, json.dumps(mine))
            return mine
        return json.loads(self._store.get(key))
