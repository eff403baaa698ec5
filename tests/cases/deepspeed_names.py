"""The names of deepspeed.comm 0.19.8, and those that this package leaves out or has differently.

deepspeed_0_19_8.json has, for each of its modules, the functions and methods with their parameters
and the source of the defaults, as read from the release.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

THEIRS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("deepspeed_0_19_8.json").read_text()
)
# What programs do not call: parts of how the original does things.
INTERNAL = {
    "timers": "the clocks of its log; ours has its own",
    "timer_summary": "an empty dictionary that nothing reads",
    "build_shm_op": "compiles its shared-memory operation; dscomm is built beforehand",
    "disable_compiler_collective": "for torch below 2.3",
    "get_coalescing_manager": "hides what differs between versions of torch",
    "stage_on_cpu": "for devices of Apple",
    "StagedWork": "for devices of Apple",
}
FLAGS = "DS_COMM_"  # its switches' variables; the functions that set them are here
# Signatures that differ, and why.
DIFFERENT = {
    "backend.Backend.new_group": "theirs takes no ranks, and raises",
    "comm.ProcessGroup.__init__": "theirs has one list for all as the default",
}


def ours(module: str) -> Any:
    return importlib.import_module(f"deepspeed_comm.{module}")
