"""One rank of benchmarks/hosts; started on every host, never by hand.

rank.py times SIZES FLAG...    the backends and MPI's own collectives, in turns; the flags are those
                               of deepspeed_comm.bench
rank.py overlap ROUNDS         dscomm and gloo beside compute, in turns; see overlap.py
rank.py bring-up BACKEND       init_process_group() and one all-reduce
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hosts import overlap
from benchmarks.hosts.flat_mpi import FlatMpi
from deepspeed_comm.bench.__main__ import run
from deepspeed_comm.bench.case import Case
from deepspeed_comm.bench.flags import Options, parse
from deepspeed_comm.bench.ledger import Ledger
from deepspeed_comm.bench.measurement import Measurement
from deepspeed_comm.bench.plan import Setting
from tests.cluster.programs.world import World


class BesideMpi(Measurement):
    """Measures the backends, and MPI by itself, over the ranks of dscomm's world."""

    def __init__(self, options: Options, groups: dict[str, Any], ledger: Ledger) -> None:
        super().__init__(options, {**groups, "mpi": groups["dscomm"]}, ledger)
        self._mpi = FlatMpi()
        if (self._mpi.rank, self._mpi.size) != (ledger.rank, ledger.world):
            raise RuntimeError("MPI numbers the ranks differently")

    def case(self, name: str, setting: Setting, count: int) -> Case:
        case = super().case(name, setting, count)
        if name == "mpi":
            place = (case.input, case.output, count, setting.root)
            call = self._mpi.make_call(setting.collective, *place)
            # Keeps the case, because MPI has only the addresses of the case's tensors.
            case.call = functools.partial(lambda case: call(), case)
        return case


def begin() -> World:
    """Brings dscomm up, and with it MPI."""
    world = World()
    dist.init_process_group("dscomm", timeout=timedelta(seconds=120))
    dist.all_reduce(torch.zeros(1))
    world.say("mpi", version=FlatMpi().version)
    return world


def times(sizes: list[int], flags: list[str]) -> int:
    world = begin()
    options = dataclasses.replace(parse(flags, world.rank, world.size), sizes=sizes)
    status = run(options, BesideMpi)
    dist.barrier()
    dist.destroy_process_group()
    return status


def measure_overlap(rounds: int) -> None:
    world = begin()
    groups = {"dscomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    world.say("done", seconds=overlap.measure(groups, rounds))
    dist.barrier()
    dist.destroy_process_group()


def bring_up(backend: str) -> None:
    world = World()
    began = time.monotonic()
    dist.init_process_group(backend)
    dist.all_reduce(torch.zeros(1))
    seconds = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    world.say("done", began=began, seconds=seconds)


if __name__ == "__main__":
    if sys.argv[1] == "times":
        sys.exit(times(json.loads(sys.argv[2]), sys.argv[3:]))
    if sys.argv[1] == "overlap":
        measure_overlap(int(sys.argv[2]))
    else:
        bring_up(sys.argv[2])
