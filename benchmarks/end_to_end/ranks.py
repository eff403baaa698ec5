"""One run of one contender: two new processes, each with one core and one thread."""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from workload import DEEPSPEED, GLOO, Workload

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.cases.harness import GROUP_TIMEOUT, RankFailure, World, run_fresh  # noqa: E402
from tests.clients.program_ranks import free_port  # noqa: E402

RANKS = 2
LIMIT_S = 90.0  # of a run; runs take less than a tenth of it


class RunFailed(Exception):
    """Has the output of the ranks."""


@dataclasses.dataclass(frozen=True)
class Run:
    figures: dict[str, float]  # by metric: the median of samples, each of the slowest rank
    outcome: list[Any]  # of each rank
    disturbance: float  # the share of other processes in a rank's core, the most of any rank


def run(workload: Workload, contender: str, quick: bool, pinned: bool = True) -> Run:
    """Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="dscomm-bench-") as folder:
        try:
            measured = run_fresh(
                RANKS, _in_rank, workload.measure, workload.has_group, contender, quick,
                pinned, free_port(), folder, limit_s=LIMIT_S
            )  # fmt: skip
        except RankFailure as failure:
            said = (path.read_text(errors="replace")[-2000:] for path in Path(folder).iterdir())
            raise RunFailed("\n".join([str(failure), *said])) from None
    samples, outcomes, disturbances = zip(*measured, strict=True)
    figures = {
        metric: statistics.median(map(max, zip(*(each[metric] for each in samples), strict=True)))
        for metric in workload.metrics
    }
    return Run(figures, list(outcomes), max(disturbances))


def _in_rank(
    world: World,
    measure: Any,
    has_group: bool,
    contender: str,
    quick: bool,
    pinned: bool,
    port: int,
    folder: str,
) -> tuple[dict[str, list[float]], Any, float]:
    cores = sorted(os.sched_getaffinity(0))
    own = cores[world.rank % len(cores)]
    if pinned:
        # Before the first thread starts, so that the backends' threads are on this core, too.
        os.sched_setaffinity(0, {own})
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_WORLD_SIZE=str(world.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with _output_to(Path(folder) / f"output{world.rank}"):
        if has_group:
            dist.init_process_group(backend_of(contender), timeout=GROUP_TIMEOUT)
        torch.manual_seed(0)
        began, busy, used = time.monotonic(), _busy_s(own), time.process_time()
        samples, outcome = measure(contender, quick)
        _check_groups(contender)
        dist.barrier()
        taken = (_busy_s(own) - busy) - (time.process_time() - used)
        disturbance = taken / (time.monotonic() - began) if pinned and len(cores) > 1 else 0.0
        return samples, outcome, disturbance


def _busy_s(core: int) -> float:
    """Seconds for which the core has run processes since the machine began."""
    [line] = re.findall(rf"^cpu{core} (.*)$", Path("/proc/stat").read_text(), re.M)
    return sum(map(int, line.split()[:3])) / os.sysconf("SC_CLK_TCK")


def backend_of(contender: str) -> str:
    """DeepSpeed's op is an addition to a group of gloo."""
    return GLOO if contender == DEEPSPEED else contender.split()[0]


def _check_groups(contender: str) -> None:
    used = {str(name) for name, _ in dist.distributed_c10d._world.pg_map.values()}
    if used != {backend_of(contender)}:
        raise RuntimeError(f"expected groups of {backend_of(contender)} alone, got {used}")


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Collects the output of libraries, which is shown only if a run fails."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    kept = [os.dup(each) for each in (1, 2)]
    try:
        for each in (1, 2):
            os.dup2(file, each)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for each, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, each)
            os.close(copy)
        os.close(file)
