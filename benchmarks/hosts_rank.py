"""One rank of benchmarks/hosts.py; started on every host, never by hand.

hosts_rank.py times SIZES ROUNDS    all-reduces: dscomm, gloo and MPI's own, flat, in turns
hosts_rank.py bring-up BACKEND      init_process_group() and one all-reduce
hosts_rank.py bench FLAG...         deepspeed_comm.bench with these flags
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_comm._timing import all_reduce_times
from deepspeed_comm.bench.__main__ import main as bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster" / "programs"))

from world import World  # noqa: E402


def flat_mpi() -> Callable[[torch.Tensor], None]:
    """MPI_Allreduce over MPI_COMM_WORLD, float32 and SUM, of the MPI that mpirun has prepared."""
    mpi = ctypes.CDLL("libmpi.so.40")
    # Open MPI's handles are addresses of variables.
    world, float32, add = (
        ctypes.byref(ctypes.c_char.in_dll(mpi, f"ompi_mpi_{name}"))
        for name in ("comm_world", "float", "op_sum")
    )

    # MPI writes beside what it sends: given one buffer for both, Open MPI forgoes its algorithms
    # for long messages. The tensor takes the result over, and its old memory is the next one's.
    spare: dict[int, torch.Tensor] = {}

    def all_reduce(tensor: torch.Tensor) -> None:
        out = spare.pop(tensor.numel(), None)
        if out is None:
            out = torch.empty_like(tensor)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (tensor, out))
        if mpi.MPI_Allreduce(*pointers, tensor.numel(), float32, add, world) != 0:
            raise RuntimeError("MPI_Allreduce failed")
        spare[tensor.numel()] = tensor.detach()
        tensor.set_(out)

    return all_reduce


def times(world: World, sizes: list[int], rounds: int) -> None:
    world.init(timeout_s=120.0)
    dist.all_reduce(torch.zeros(1))  # MPI is up from here
    contenders = {
        "dscomm": dist.all_reduce,
        "gloo": functools.partial(dist.all_reduce, group=dist.new_group(backend="gloo")),
        "mpi": flat_mpi(),
    }
    medians = {size: all_reduce_times(contenders, size, rounds) for size in sizes}
    dist.barrier()
    dist.destroy_process_group()
    world.say("done", medians=medians)


def bring_up(world: World, backend: str) -> None:
    began = time.monotonic()
    dist.init_process_group(backend)
    dist.all_reduce(torch.zeros(1))
    seconds = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    world.say("done", began=began, seconds=seconds)


if __name__ == "__main__":
    if sys.argv[1] == "times":
        times(World(), json.loads(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "bench":
        sys.exit(bench(sys.argv[2:]))
    else:
        bring_up(World(), sys.argv[2])
