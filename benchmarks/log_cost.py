"""The cost of the communications log for a call, in ns.

    python benchmarks/log_cost.py [--rounds 1000] [--json FILE]

One process, whose backend does nothing, so that the cost around the call shows. In each round every
contender makes some calls, in turns; a row has the medians of the rounds:

    backend   the backend's own method, with the same arguments
    bare      the operation without the log
    off       the operation, with the log off
    log       off less bare, round by round: what the log costs while it is off
    package   off, where the program writes dist.all_reduce(...), which looks the name up
    on        the operation, with the log on
    traced    as on, with calls also kept for a trace
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
from pathlib import Path
from typing import Any

import torch

import deepspeed_comm
from deepspeed_comm import comm
from deepspeed_comm.backend import Backend

CALLS = 200
CALLS_WITH_LOG = 10  # which take longer
# Written as in programs: arguments by name cost more than arguments by position.
WRITTEN = {
    "all_reduce(tensor)": "all_reduce(tensor, SUM, None, False)",
    "all_reduce(tensor, op=SUM, async_op=False)": "all_reduce(tensor, SUM, None, False)",
    "all_gather_into_tensor(tensor, tensor)": "all_gather_into_tensor(tensor, tensor, None, False)",
    "barrier()": "barrier(None, False, None)",
}


class NothingBackend(Backend):
    """A world of one in which every collective is done at once."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.initialized = True

    def get_world_size(self, group: Any = None) -> int:
        return 1

    def all_reduce(
        self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> None:
        return None

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> None:
        return None

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
        return None


def contenders(written: str, called: str) -> dict[str, timeit.Timer]:
    """The timers of an operation: `written` as in a program, `called` as on the backend."""
    name, arguments = written.split("(", 1)
    known = {
        "backend": comm.cdb,
        "bare": getattr(comm, name).__wrapped__,
        "operation": getattr(comm, name),
        "package": deepspeed_comm,
        "tensor": torch.ones(4),
        "SUM": comm.ReduceOp.SUM,
    }
    statements = {
        "backend": f"backend.{called}",
        "bare": f"bare({arguments}",
        "off": f"operation({arguments}",
        "package": f"package.{name}({arguments}",
        "on": f"operation({arguments}",
        "traced": f"operation({arguments}",
    }
    return {key: timeit.Timer(text, globals=known) for key, text in statements.items()}


def measure(timers: dict[str, timeit.Timer], rounds: int) -> dict[str, float]:
    """Median times of a call, in ns."""
    times: dict[str, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, timer in timers.items():
            has_log = key in ("on", "traced")
            comm.configure(enabled=has_log, trace_events=1000 if key == "traced" else 0)
            calls = CALLS_WITH_LOG if has_log else CALLS
            times[key].append(timer.timeit(calls) / calls * 1e9)
    comm.configure(enabled=False)
    times["log"] = [off - bare for off, bare in zip(times["off"], times["bare"], strict=True)]
    return {key: statistics.median(samples) for key, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="also write the times there")
    options = parser.parse_args()
    comm.set_backend(NothingBackend())
    columns = ("backend", "bare", "off", "log", "package", "on", "traced")
    print(f"{'ns per call':<44}" + "".join(f"{column:>9}" for column in columns))
    found = {}
    for written, called in WRITTEN.items():
        found[written] = measure(contenders(written, called), options.rounds)
        figures = "".join(f"{found[written][column]:>9.0f}" for column in columns)
        print(f"{written:<44}{figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
