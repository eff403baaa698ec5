"""Jobs that torchrun restarts after a rank died: all ranks return in the first new attempt,
whatever earlier attempts left in the shared store."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases.rank_processes import TORCH_2

RANKS = 3
LIMIT_S = 60.0
PLACES = ("before init", "in init", "before new_group", "in new_group", "in a call")

# The victim ends at a given point of the first attempts. Each rank prints one line.
SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
import deepspeed_comm

victims, place, delay_s = sys.argv[1].split(","), sys.argv[2], float(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dies = attempt < len(victims) and int(victims[attempt]) == rank

def at(here, call):
    if dies and place == here:
        threading.Thread(target=lambda: (time.sleep(delay_s), os._exit(9)), daemon=True).start()
    return call()

if dies and place == "before init":
    os._exit(9)
at("in init", lambda: dist.init_process_group("dscomm"))
if dies and place == "before new_group":
    os._exit(9)
group = at("in new_group", dist.new_group)
tensor = torch.ones(100)
at("in a call", lambda: [dist.all_reduce(tensor, group=group) for _ in range(2000 if dies else 1)])
while dies:
    dist.barrier(group)
if attempt < len(victims):
    dist.barrier(group)  # which the victim does not reach
    time.sleep(60)
tensor.fill_(rank)
dist.all_reduce(tensor)
dist.destroy_process_group()
os.write(1, f"rank {rank} of attempt {attempt}: {tensor.tolist()[0]}\\n".encode())
"""


def _restart(folder: Path, victims: list[int], place: str, delay_s: float, elastic: bool) -> str:
    """The output of torchrun and its ranks; there is one restart per victim."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}",
               f"--max_restarts={len(victims)}", "--monitor_interval=0.1"]  # fmt: skip
    if elastic:
        command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    else:
        command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    if not TORCH_2:
        # torch 1.13 with Python 3.11 rejects its own default, which redirects nothing.
        command += ["--redirects=9:0", "--tee=9:0"]
    arguments = [",".join(map(str, victims)), place, str(delay_s)]
    began_s = time.monotonic()
    job = subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S * (1 + len(victims)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    report = f"{job.returncode} after {time.monotonic() - began_s:.1f} s:\n{job.stdout}{job.stderr}"
    for rank in range(RANKS):
        line = f"rank {rank} of attempt {len(victims)}: {sum(range(RANKS)):.1f}"
        assert line in job.stdout, report
    assert job.returncode == 0, report
    return report


@pytest.mark.parametrize(
    ("place", "elastic"),
    [
        (place, elastic)
        if (place, elastic) in (("before init", False), ("in new_group", True))
        else pytest.param(place, elastic, marks=pytest.mark.drill)
        for place in PLACES
        for elastic in (False, True)
    ],
)
def test_ranks_form_a_group_at_the_first_restart(place: str, elastic: bool, tmp_path: Path) -> None:
    _restart(tmp_path, [1], place, 0.002, elastic)


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(20))
def test_repeated_restarts_form_groups(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    victims = [chance.randrange(RANKS) for _ in range(5)]
    delay_s = chance.uniform(0, 0.02)
    _restart(tmp_path, victims, chance.choice(PLACES), delay_s, chance.random() < 0.5)
