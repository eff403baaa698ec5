"""A child of the doctor: one rank of the self-test. Arguments: folder of the store, rank, seconds.

Reports each step before it starts, so that the step of a hanging rank is known. Like a user's
program, it imports the package only if torch does not register the backend by itself.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
# Sizes for each algorithm of an all-reduce: in the mailbox, in one piece, in chunks.
COUNTS = (1, 3000, 500_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def tell(**facts: Any) -> None:
    """Reports facts, like tell() of child.py."""
    print("doctor: " + json.dumps(facts), flush=True)


def main() -> None:
    folder, rank, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    tell(step="init_process_group")
    if hasattr(dist.Backend, "_ensure_backend_registered"):  # as torch 2.14 does for any group
        dist.Backend._ensure_backend_registered("dscomm")
    if not hasattr(dist.Backend, "DSCOMM"):
        import deepspeed_comm  # noqa: F401 - torch learns of the backend by this import

        tell(imported=True)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group(
        "dscomm",
        store=store,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    for count in COUNTS:
        for dtype in DTYPES:
            tell(step=f"all_reduce of {count} {dtype}")
            tensor = torch.full((count,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            expect(tensor, 3)
            for root in range(RANKS):
                tell(step=f"broadcast of {count} {dtype} from rank {root}")
                tensor = torch.full((count,), rank + 5, dtype=dtype)
                dist.broadcast(tensor, root)
                expect(tensor, root + 5)
    tell(step="barrier")
    dist.barrier()
    for count in COUNTS:
        tell(step=f"isend and recv of {count} elements")
        work: Any = dist.isend(torch.full((count,), rank + 7.0), 1 - rank, tag=count)
        received = torch.zeros(count)
        dist.recv(received, 1 - rank, tag=count)
        work.wait()
        expect(received, 1 - rank + 7)
    tell(step="destroy_process_group")
    dist.destroy_process_group()
    tell(done=True)


def expect(tensor: torch.Tensor, value: int) -> None:
    if not tensor.eq(value).all():
        wrong = int(tensor.ne(value).sum())
        raise RuntimeError(f"{wrong} of {tensor.numel()} elements are wrong: all should be {value}")


if __name__ == "__main__":
    main()
