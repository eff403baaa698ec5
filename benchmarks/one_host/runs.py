"""One run of one peer: its ranks at all sizes, between two probes of the cores."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.one_host.peers import BEFORE, Peer, title_of
from benchmarks.one_host.states import cpus_of_ranks, probe, state_between

MEETING_BYTES = 1 << 20  # MeetingPlace::kBytes
SHARED = Path("/dev/shm")


OPERATIONS = ("all_reduce", "ping_pong")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The measurements of every run. op is one of OPERATIONS. Sizes in bytes."""

    op: str
    sizes: tuple[int, ...]
    modes: tuple[str, ...]
    budget_ms: float  # of timed calls of one size and mode
    limit_s: float  # after which a run is given up


@dataclasses.dataclass
class Run:
    """failure is empty if all went well; rows are those written before it, each with its `state`;
    refused are sentences about features that the peer lacks."""

    peer: str
    op: str
    ranks: int
    dtype: str
    rows: list[dict[str, Any]]
    failure: str = ""
    refused: tuple[str, ...] = ()


def run_once(name: str, peer: Peer, ranks: int, dtype: str, plan: Plan, prober: Path) -> Run:
    usable = os.sched_getaffinity(0)
    cpus = cpus_of_ranks(usable, ranks)
    probed = cpus or cpus_of_ranks(usable, 2) or []
    with tempfile.TemporaryDirectory(prefix="one_host_", dir=_folder()) as folder:
        out = Path(folder) / "rows"
        # Some peers name their own memory after this file, so its name is unique.
        meet = Path(folder) / f"{Path(folder).name}_meet"
        with meet.open("wb") as file:
            file.truncate(MEETING_BYTES)

        def flags(rank: int) -> list[str]:
            given = {
                "rank": rank, "ranks": ranks, "cpu": cpus[rank] if cpus else -1,
                "meet": meet, "out": out, "sizes": ",".join(map(str, plan.sizes)),
                "dtypes": dtype, "modes": ",".join(plan.modes), "budget-ms": plan.budget_ms,
                "op": plan.op,
            }  # fmt: skip
            return [word for key, value in given.items() for word in (f"--{key}", str(value))]

        before = probe(prober, probed)
        failure = _finish(peer, peer.commands(flags, ranks), plan.limit_s, folder)
        after = probe(prober, probed)
        for left in SHARED.glob(f"*{meet.name}*"):  # left by a peer that was killed
            left.unlink()
        lines = out.read_text().splitlines() if out.exists() else []
    title = title_of(name)
    # If each rank has a core, ranks (except those in Python) also probe before and after each row.
    whole = {"before_ns": before, "after_ns": after}
    found = [{"peer": title, **whole, **json.loads(line)} for line in lines]
    for row in found:
        if name.startswith(BEFORE) and not row["peer"].startswith(BEFORE):
            row["peer"] = BEFORE + row["peer"]  # ranks in Python name themselves
        row["state"] = state_between(row["before_ns"], row["after_ns"])
    rows = [row for row in found if "refused" not in row]
    refused = tuple(dict.fromkeys(row["refused"] for row in found if "refused" in row))
    return Run(name, plan.op, ranks, dtype, rows, failure, refused)


def _folder() -> str | None:
    """In memory, because the kernel would write a file back to a disk now and then."""
    return str(SHARED) if os.access(SHARED, os.W_OK) else None


def _finish(peer: Peer, commands: list[list[str]], limit_s: float, folder: str) -> str:
    """Runs the commands side by side. Returns one line about the failure, or nothing."""
    errors = Path(folder) / "stderr"
    with errors.open("wb") as stderr, _started(peer, commands, stderr) as processes:
        end = time.monotonic() + limit_s
        failed = _first_failure(processes, end)
    if not failed:
        return ""
    return f"{failed}: {telling_line(errors.read_text(errors='replace'))}"


def telling_line(said: str) -> str:
    """The line that tells most: the first that names an error, or the first."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|fail|abort|signal", line, re.IGNORECASE)]
    return [*errors, *lines, "no word"][0][:200]


def _first_failure(processes: list[subprocess.Popen[bytes]], end: float) -> str:
    """Waits for all of them, or for the first that fails, or until `end`."""
    while time.monotonic() < end:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return f"exit status {next(filter(None, statuses))}"
        if None not in statuses:
            return ""
        time.sleep(0.02)
    return "took too long"


@contextlib.contextmanager
def _started(
    peer: Peer, commands: list[list[str]], stderr: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the commands. Each leads a new process group, which is killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=peer.folder,
                    env={**os.environ, **peer.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
