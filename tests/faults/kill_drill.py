"""Kills ranks at random times during collectives and messages, and measures when others notice.

    python -m tests.faults.kill_drill --count 300 --ranks 4 --seed 1

Every kill is a separate job: ranks are forked, work (small and chunked, synchronous and
asynchronous calls, messages), and one of them (in one of ten jobs two, in one of ten the first
rank) gets SIGKILL. The time is measured from just before the kill, by the killer's clock, to the
error, by the survivor's; both read CLOCK_MONOTONIC. A kill passes if every survivor raises within a
second, its error names a killed rank with pid and host, its group can be destroyed, and nothing is
left behind: no process, abstract socket, memory or file. The longest time that this process stood
still after the kill is added to the second: on a machine that busy, the ranks stand still, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import random
import statistics
import sys
import threading
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from tests.cases.rank_processes import SOON_S, Job, ProcessResources  # noqa: E402
from tests.cases.workloads import (  # noqa: E402
    WORKLOADS,
    check_survivors,
    memory_turn_held,
    work_until_raised,
)


class StallMonitor:
    """Context manager with a thread that sleeps 5 ms at a time and records its longest delay: how
    long the machine, or this process, stood still."""

    SLEEP_S = 0.005

    def __enter__(self) -> StallMonitor:
        self.longest_s = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def _beat(self) -> None:
        before_s = time.monotonic()
        while not self._ends.wait(self.SLEEP_S):
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - before_s - self.SLEEP_S)
            before_s = now_s


@dataclasses.dataclass
class Outcome:
    times_s: list[float]  # from kill to error, for all survivors of the kills that passed
    passed: int
    failures: list[str]

    def summary(self) -> str:
        text = f"{self.passed} passed, {len(self.failures)} failed"
        if not self.times_s:
            return text
        ordered = sorted(self.times_s)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return (
            f"{text}; kill to raise, {len(ordered)} survivors: median "
            f"{statistics.median(ordered) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
            f"max {ordered[-1] * 1e3:.1f} ms"
        )


def kill_once(ranks: int, generator: random.Random, pulse: StallMonitor) -> list[float]:
    step = generator.choice(WORKLOADS)
    dead = generator.sample(range(ranks), 2 if ranks > 2 and generator.random() < 0.1 else 1)
    if generator.random() < 0.1:
        dead = [0]
    delay_s = generator.uniform(0.0, 0.1)
    others = memory_turn_held() if generator.random() < 0.1 else contextlib.nullcontext()
    with Job(ranks, work_until_raised, step) as job, others:
        job.wait_for("working")
        resources = ProcessResources(job.pids)
        time.sleep(delay_s)
        pulse.longest_s = 0.0  # what follows counts
        at_s = [job.kill(rank) for rank in dead][0]
        times_s = check_survivors(job, dead, at_s, limit_s=math.inf)
        assert max(times_s) < SOON_S + pulse.longest_s, f"{times_s}\n{job.report()}"
        job.finish()
        if left := resources.left_behind():
            raise AssertionError(f"left behind: {left}\n{job.report()}")
    return times_s


def run(count: int, ranks: int, seed: int, progress: bool = False) -> Outcome:
    outcome = Outcome([], 0, [])
    for number in range(count):
        try:
            with StallMonitor() as pulse:
                # A separate generator for each kill, so that a failure can be repeated alone.
                generator = random.Random(f"{seed}/{ranks}/{number}")
                outcome.times_s += kill_once(ranks, generator, pulse)
            outcome.passed += 1
        except AssertionError as failure:
            still = f"this process stood still for {pulse.longest_s:.3f} s at most"
            outcome.failures.append(f"kill {number} of seed {seed} ({still}): {failure}")
        if progress and (number + 1) % 25 == 0:
            print(f"{number + 1} of {count}: {outcome.summary()}", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{options.count} kills among {options.ranks} ranks, seed {options.seed}; limit {SOON_S} s"
    )
    outcome = run(options.count, options.ranks, options.seed, progress=True)
    for failure in outcome.failures:
        print(failure)
    print(outcome.summary())
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
