"""The surface of DeepSpeed's CCL module: without a process group of torch.distributed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from deepspeed_comm import ReduceOp, ccl
from tests.cases.harness import World, run_fresh

RANKS = 3


def first_ranks(world: World, name: str, mine: list[int] | None) -> list[int]:
    """What one rank has, on all of them: by a file, as a program may do it."""
    path = Path(world.folder) / name
    if mine is not None:
        path.with_suffix(".part").write_text(" ".join(map(str, mine)))
        path.with_suffix(".part").rename(path)
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def _surface(world: World) -> None:
    os.environ["MASTER_ADDR"] = "192.0.2.1"  # another host's: who serves says its own address
    everyone = list(range(world.size))
    tensor = torch.full((5,), float(world.rank))
    with pytest.raises(RuntimeError, match=r"call ccl.initialize\(size, rank, kvs\) first"):
        ccl.all_reduce(tensor, ReduceOp.SUM, everyone)
    with pytest.raises(ValueError, match="rank 7 must be at least 0 and below size, 3"):
        ccl.initialize(world.size, 7, [0] * 256)
    own = ccl.get_kvs_addr(world.rank)
    assert len(own) == 256 and any(own) == (world.rank == 0)
    if world.rank > 0:
        with pytest.raises(ValueError, match="those of the first rank, not its own"):
            ccl.initialize(world.size, world.rank, torch.tensor(own, dtype=torch.uint8))
    kvs = first_ranks(world, "kvs", own if world.rank == 0 else None)
    for _ in range(2):  # the second changes nothing
        ccl.initialize(world.size, world.rank, torch.tensor(kvs, dtype=torch.uint8))
    assert not torch.distributed.is_initialized()
    assert (ccl.get_rank(0), ccl.get_world_size(0)) == (world.rank, world.size)
    assert set(ccl.get_available_coll()) <= set(vars(ccl))

    ccl.broadcast(tensor, 2, everyone, False)
    assert torch.equal(tensor, torch.full((5,), 2.0))
    assert ccl.all_reduce(tensor, ReduceOp.SUM, everyone, False) is None
    assert torch.equal(tensor, torch.full((5,), 6.0))
    assert ccl.inference_all_reduce(tensor.clone(), ReduceOp.MAX) is None
    # The original takes what it does not know for int8.
    for dtype in (torch.float64, torch.float16, torch.int16, torch.uint8):
        each = torch.full((5,), world.rank + 1, dtype=dtype)
        ccl.all_reduce(each, ReduceOp.PRODUCT, everyone)
        assert torch.equal(each, torch.full((5,), 6, dtype=dtype)), dtype
    for _ in range(3):
        each = torch.full((5,), world.rank + 1.0)
        ccl.all_reduce_caching(each, ReduceOp.SUM, "layer 1", everyone)
        assert torch.equal(each, torch.full((5,), 6.0))
    with pytest.raises(ValueError, match="'layer 1' stands for another call: dtype"):
        ccl.all_reduce_caching(each.double(), ReduceOp.SUM, "layer 1", everyone)
    works: list[Any] = [
        ccl.all_reduce(tensor, ReduceOp.SUM, everyone, True),
        ccl.broadcast(tensor, 0, everyone, True),
        ccl.barrier(everyone, True),
    ]
    for work in works:
        work.wait()
    assert torch.equal(tensor, torch.full((5,), 18.0))

    # A group; the original takes one that it does not know for the world.
    pair = [2, 0]
    with pytest.raises(ValueError, match=r"no group of the ranks \[2, 0\]"):
        ccl.barrier(pair)
    if world.rank in pair:
        is_first = world.rank == pair[0]
        own = ccl.get_sub_kvs_addr(is_first)
        kvs = first_ranks(world, "sub_kvs", own if is_first else None)
        with pytest.raises(ValueError, match="at position"):
            ccl.initialize_sub_comm(2, 1 - pair.index(world.rank), kvs, pair)
        ccl.initialize_sub_comm(2, pair.index(world.rank), kvs, pair)
        tensor = torch.full((5,), float(world.rank))
        ccl.broadcast(tensor, 0, pair)
        assert torch.equal(tensor, torch.full((5,), 2.0))
        assert ccl.get_rank(pair) == pair.index(world.rank) and ccl.get_world_size(pair) == 2
    ccl.barrier(everyone)


def test_ccl_module_works_without_process_group_of_torch() -> None:
    run_fresh(RANKS, _surface)
