"""DSCOMM_DEBUG=debug: what it says of the calls of a group; lower levels say nothing of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_comm
from tests.cases.harness import World, run_fresh

LINE = re.compile(r"\[dscomm rank \d pid \d+\] debug: group '0' \(shared memory, 2 ranks\): (.*)")


def _calls(world: World, level: str, folder: str) -> None:
    os.environ["DSCOMM_DEBUG"] = level
    log = os.open(os.path.join(folder, f"log{world.rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    world.init()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(1000))
    pooled: Any = deepspeed_comm.empty(5_000_000).fill_(1.0)
    for tensor in (pooled, pooled, torch.ones(5_000_000)):
        dist.all_reduce(tensor)
    dist.broadcast(torch.ones(100_000), 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["warn", "info", "debug"])
def test_only_debug_level_logs_algorithms_by_size_once_per_group(
    level: str, tmp_path: Path
) -> None:
    run_fresh(2, _calls, level, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"log{rank}").read_text()
        assert ("info: group '0' of 2 ranks" in text) is (level in ("info", "debug")), text
        lines = LINE.findall(text)
        if level != "debug":
            assert lines == [], text
            continue
        assert lines[:4] == [
            "first all_reduce tiny: 4 bytes",
            "first all_reduce one shot: 4000 bytes",
            "first all_reduce chunked: 20000000 bytes",
            "first broadcast in rounds: 400000 bytes",
        ], text
        # Whether the cores are near is the machine's, and a short test may end before it is known.
        distance = r"; peers: (cache-near|cache-far|same core|distance not measured yet)"
        chunked = "3 chunked, 20000000 bytes; 2 of 3 large tensors read in place, from the pool"
        assert re.fullmatch(
            f"all_reduce: 4 tiny, 4 to 8 bytes; 1 one shot, 4000 bytes; {chunked}{distance}",
            lines[4],
        ), text
        assert re.fullmatch(f"broadcast: 1 in rounds, 400000 bytes{distance}", lines[5]), text
        assert len(lines) == 6, text
