"""Runs one test of the suite in ranks forked from this process, and says how it ended.

A forked rank starts in milliseconds, where a spawned one imports torch for seconds. The price is
that this process must have no thread and no process group. Each test has fresh ranks, so one that
crashes or hangs costs only itself: it is killed at its limit, with every process it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.torch_suite import suite as torch_suite

# The others get this long to say what they saw, after the first rank failed.
_GRACE_S = 3.0
_LOG_TAIL_CHARACTERS = 3000
# In a stack, everything from _rank_main outwards is this runner's.
_OUTER_FRAMES = re.compile(r"^  File .* in _rank_main\n(  File .*\n?)*", re.MULTILINE)

_fork = multiprocessing.get_context("fork")


@dataclasses.dataclass
class RankReport:
    outcome: str  # passed, failed or skipped
    detail: str = ""


@dataclasses.dataclass
class Outcome:
    outcome: str  # passed, failed or skipped
    detail: str = ""  # the reason of a skip, or what went wrong, rank by rank
    seconds: float = 0.0


def run(
    suite: type[Any],
    name: str,
    backend: str,
    ranks: int,
    limit_s: float,
    name_check_answered: bool = False,
) -> Outcome:
    """Runs the test called `name`; see suite.monitored_barrier_answered_gloo for the last one."""
    reason = torch_suite.skip_reason(suite, name)
    if reason is not None:
        return Outcome("skipped", reason)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"this process has {threads} threads; ranks are forked from one only")

    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    started = time.monotonic()
    common_distributed.initialize_temp_directories()
    try:
        distributed_test.Barrier.init()
        with contextlib.ExitStack() as stack:
            if name_check_answered:
                stack.enter_context(torch_suite.monitored_barrier_answered_gloo())
            reports = _Ranks(suite, name, backend, ranks).collect(limit_s)
    finally:
        common_distributed.cleanup_temp_dir()
    outcome = _judge(reports)
    outcome.seconds = time.monotonic() - started
    return outcome


def _judge(reports: list[RankReport]) -> Outcome:
    if any(report.outcome == "failed" for report in reports):
        lines = [
            f"rank {rank}: {report.outcome}{': ' if report.detail else ''}{report.detail}"
            for rank, report in enumerate(reports)
        ]
        return Outcome("failed", "\n".join(lines))
    outcomes = {report.outcome for report in reports}
    if outcomes == {"skipped", "passed"}:
        return Outcome("failed", f"some ranks skipped it: {[vars(report) for report in reports]}")
    return Outcome(reports[0].outcome, reports[0].detail)


class _Ranks:
    """The ranks of one test."""

    def __init__(self, suite: type[Any], name: str, backend: str, count: int) -> None:
        folder = os.environ["TEMP_DIR"]
        self._logs = [os.path.join(folder, f"log_{rank}") for rank in range(count)]
        self._processes = []
        self._connections: list[Connection] = []
        self._reports: dict[int, RankReport] = {}
        self._ended: set[int] = set()
        for rank in range(count):
            parent_end, child_end = _fork.Pipe(duplex=False)
            process = _fork.Process(
                target=_rank_main,
                args=(suite, name, backend, rank, os.path.join(folder, "store"), self._logs[rank]),
                kwargs={"connection": child_end},
            )
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)

    def collect(self, limit_s: float) -> list[RankReport]:
        """Waits for all ranks, for limit_s and no longer; no process of theirs is left."""
        deadline = time.monotonic() + limit_s
        cause = f"not finished after {limit_s:.0f} s"
        stopping = False
        try:
            while len(self._ended) < len(self._processes) and time.monotonic() < deadline:
                self._wait_for_news(deadline)
                failed = [rank for rank, said in self._reports.items() if said.outcome == "failed"]
                if failed and not stopping:
                    stopping = True
                    cause = f"stopped {_GRACE_S:.0f} s after rank {failed[0]} had failed"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            late = [rank for rank in range(len(self._processes)) if rank not in self._ended]
            self._ask_for_stacks(late)
            for rank in late:
                said = f", though it had {self._outcome(rank)}" if rank in self._reports else ""
                self._reports[rank] = RankReport("failed", f"{cause}{said}{self._log_tail(rank)}")
        finally:
            self._kill()
        return [self._reports[rank] for rank in range(len(self._processes))]

    def _outcome(self, rank: int) -> str:
        return self._reports[rank].outcome if rank in self._reports else ""

    def _wait_for_news(self, deadline: float) -> None:
        running = [rank for rank in range(len(self._processes)) if rank not in self._ended]
        unheard = [rank for rank in running if rank not in self._reports]
        # Reports are read as they come, since a long one does not fit the pipe. A process that a
        # rank started keeps the rank's sentinel open, so exit codes are looked at as well.
        wait(
            [self._processes[rank].sentinel for rank in running]
            + [self._connections[rank] for rank in unheard],
            min(0.2, max(0.0, deadline - time.monotonic())),
        )
        for rank in running:
            exit_code = self._processes[rank].exitcode
            if rank in unheard:
                with contextlib.suppress(EOFError):
                    if self._connections[rank].poll():
                        self._reports[rank] = self._connections[rank].recv()
            if exit_code is not None:
                self._end(rank, exit_code)

    def _end(self, rank: int, exit_code: int) -> None:
        """Of a rank whose exit code was seen just now, so that its pid is nobody else's yet."""
        self._ended.add(rank)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)  # What it started, and left.
        if rank not in self._reports or exit_code != 0:
            said = f" after it had {self._outcome(rank)}" if rank in self._reports else ""
            detail = f"died{said}, {_exit_text(exit_code)}{self._log_tail(rank)}"
            self._reports[rank] = RankReport("failed", detail)
        elif self._outcome(rank) == "failed":
            self._reports[rank].detail += self._log_tail(rank)

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(1.0)  # The handler writes at once; there is nothing to wait for but that.

    def _log_tail(self, rank: int) -> str:
        with (
            contextlib.suppress(FileNotFoundError),
            open(self._logs[rank], errors="replace") as log,
        ):
            text = _OUTER_FRAMES.sub("", log.read()).strip()
            return f"\n[log]\n{text[-_LOG_TAIL_CHARACTERS:]}\n" if text else ""
        return ""

    def _kill(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended:
                # Not waited for yet, so the pid is still its own. Each rank leads a group, in
                # which whatever it started still is; it may not have got as far as that.
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError):
                        kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _rank_main(
    suite: type[Any],
    name: str,
    backend: str,
    rank: int,
    store: str,
    log: str,
    connection: Connection,
) -> None:
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The runner's handler would end in its frames.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    connection.send(_run_test(suite, name, backend, rank, store))


def _run_test(suite: type[Any], name: str, backend: str, rank: int, store: str) -> RankReport:
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed import distributed_test

    case = suite(name)
    case.rank = rank
    case.file_name = store
    try:
        dist.init_process_group(
            backend,
            init_method=case.init_method,
            world_size=int(case.world_size),
            rank=rank,
            timeout=timedelta(seconds=torch_suite.group_timeout_s(name)),
        )
        if dist.get_backend() != backend:
            raise AssertionError(f"the group's backend is {dist.get_backend()}, not {backend}")
        case._barrier()
        common_utils.set_rng_seed()
        # Read when the suite was imported, before this test had a file of its own.
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
        if torch_suite.DEVICE_CHOSEN_BY_NAME.match(name):
            distributed_test.BACKEND = "gloo"
        getattr(case, name)()
        case._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        return RankReport("skipped", str(skip) or "skipped by the test without a reason")
    except SystemExit as leaving:
        for skip in common_distributed.TEST_SKIPS.values():
            if leaving.code == skip.exit_code:
                return RankReport("skipped", skip.message)
        return RankReport("failed", f"left with exit status {leaving.code}")
    except BaseException:
        return RankReport("failed", traceback.format_exc())
    return RankReport("passed")
