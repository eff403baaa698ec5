"""Tests that end badly, each in its way, run by the runner with gloo; prints what it made of them.

  python -m tests.torch_suite.misbehave

For test_runner.py. A program of its own, since the suite is loaded once per process and ranks are
forked from a process of one thread.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
import unittest

from tests.torch_suite import forked_ranks, suite

_RANKS = 2
_LIMIT_S = 60.0
_LIMIT_OF_HANGING_S = 4.0


def main() -> int:
    class Misbehaving(suite.load("gloo", _RANKS)):  # type: ignore[misc]
        def test_passes(self) -> None:
            self._barrier()

        def test_one_rank_raises(self) -> None:
            if self.rank == 1:
                raise ValueError("rank 1 is unhappy" + 100_000 * "!")  # More than a pipe holds.

        def test_one_rank_is_killed(self) -> None:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def test_one_rank_leaves(self) -> None:
            if self.rank == 1:
                sys.exit(3)

        def test_one_rank_dies_after_its_report(self) -> None:
            if self.rank == 1:
                multiprocessing.util.Finalize(None, os.abort, exitpriority=1)

        def test_hangs(self) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # With a process of its own, which must not outlive it.
            child = subprocess.Popen(["sleep", "600"])
            print(f"child {child.pid}", flush=True)
            while self.rank == 1:
                time.sleep(1)

        def test_skips(self) -> None:
            raise unittest.SkipTest("for a reason")

        def test_hangs_as_one_rank_skips(self) -> None:
            if self.rank == 1:
                raise unittest.SkipTest("for a reason")

    own = [name for name in vars(Misbehaving) if name.startswith("test_")]
    outcomes = {}
    for name in own:
        limit_s = _LIMIT_OF_HANGING_S if "hangs" in name else _LIMIT_S
        outcome = forked_ranks.run(Misbehaving, name, "gloo", _RANKS, limit_s)
        outcomes[name] = dataclasses.asdict(outcome)
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
