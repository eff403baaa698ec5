"""The cost of an all-reduce and a message of a small tensor, by each API, in us.

    python benchmarks/call_cost.py [--ranks 1 2] [--sizes 8 4096] [--rounds 400] [--json FILE]

For comparison, dist.all_reduce() of a backend that does nothing (nothing_backend.cc, compiled at
the first run, in a minute) takes only torch's own time. In each round every contender makes some
calls, in turns; a row has the medians of the rounds:

    torch alone   torch.distributed.all_reduce() of the backend that does nothing
    torch         torch.distributed.all_reduce() of dscomm
    above         torch less torch alone, round by round: dscomm's part of the time
    api           deepspeed_comm.all_reduce()
    inference     deepspeed_comm.inference_all_reduce()
    caching       deepspeed_comm.all_reduce_caching()
    torch.ops     torch.ops.dscomm.inference_all_reduce_()
    native        the function of the extension that inference calls

With two ranks also the round trip of a message, there and back by blocking calls:

    torch         torch.distributed.send() and recv() of dscomm
    api           deepspeed_comm.send() and recv()
    native        the functions of the extension that api calls

A single rank never waits, so its times are CPU time. Times of more ranks are wall-clock time, on
rank 0, and include the exchange between the ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

import deepspeed_comm
from deepspeed_comm import _direct, _plugin

ROOT = Path(__file__).resolve().parent.parent
CALLS = 200

WAYS = {
    "torch alone": "torch_all_reduce(tensor, group=nothing)",
    "torch": "torch_all_reduce(tensor, group=world)",
    "api": "api.all_reduce(tensor)",
    "inference": "api.inference_all_reduce(tensor)",
    "caching": "api.all_reduce_caching(tensor, SUM, match_id)",
    "torch.ops": "operation(tensor, 'SUM', name)",
    "native": "native.all_reduce(tensor, TORCH_SUM, False)",
}
MESSAGES = {  # by rank 0; rank 1 makes the calls in the reverse order
    "torch": ("torch_send(tensor, {peer})", "torch_recv(tensor, {peer})"),
    "api": ("api.send(tensor, {peer})", "api.recv(tensor, {peer})"),
    "native": ("direct.direct_send(tensor, {peer}, world, 0)",
               "direct.direct_recv(tensor, {peer}, world, 0)"),
}  # fmt: skip
COLUMNS = ("torch alone", "torch", "above", "api", "inference", "caching", "torch.ops", "native")


def nothing_module() -> Any:
    folder = ROOT / "build" / "nothing_backend"
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        "nothing_backend",
        [str(ROOT / "benchmarks" / "nothing_backend.cc")],
        extra_cflags=["-O2"],
        build_directory=str(folder),
    )


def timers(size: int, nothing: Any, clock: Callable[[], float]) -> dict[str, timeit.Timer]:
    world = dist.group.WORLD
    tensor = torch.zeros(size // 4)  # zeros, whose sum is zeros
    known = {
        "torch_all_reduce": dist.all_reduce,
        "tensor": tensor,
        "nothing": nothing,
        "world": world,
        "api": deepspeed_comm,
        "SUM": deepspeed_comm.ReduceOp.SUM,
        "match_id": f"call of {size} bytes",
        "operation": torch.ops.dscomm.inference_all_reduce_,
        "name": world.group_name,
        "native": _direct.find_backend(None, tensor),
        "TORCH_SUM": dist.ReduceOp.SUM,
    }
    return {way: timeit.Timer(written, timer=clock, globals=known) for way, written in WAYS.items()}


def message_timers(size: int, rank: int, clock: Callable[[], float]) -> dict[str, timeit.Timer]:
    known = {
        "torch_send": dist.send,
        "torch_recv": dist.recv,
        "tensor": torch.zeros(size // 4),
        "world": dist.group.WORLD,
        "api": deepspeed_comm,
        "direct": _direct,
    }
    in_order = {way: calls if rank == 0 else calls[::-1] for way, calls in MESSAGES.items()}
    return {
        way: timeit.Timer("; ".join(calls).format(peer=1 - rank), timer=clock, globals=known)
        for way, calls in in_order.items()
    }


def measure(ways: dict[str, timeit.Timer], rounds: int) -> dict[str, float]:
    """Median times of a call, in us."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for timer in ways.values():
        timer.timeit(CALLS)
    for _ in range(rounds):
        for way, timer in ways.items():
            dist.barrier()
            times[way].append(timer.timeit(CALLS) / CALLS * 1e6)
    if "torch alone" in times:
        pairs = zip(times["torch"], times["torch alone"], strict=True)
        times["above"] = [ours - alone for ours, alone in pairs]
    return {way: statistics.median(samples) for way, samples in times.items()}


def run_rank(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    module = nothing_module()
    dist.Backend.register_backend(
        "nothing",
        lambda store, rank, size, timeout: module.NothingBackend(rank, size),
        devices=["cpu"],
    )
    store = dist.FileStore(f"{folder}/store of {ranks}", ranks)
    dist.init_process_group("dscomm", store=store, rank=rank, world_size=ranks)
    deepspeed_comm.init_distributed()
    nothing = dist.new_group(backend="nothing")
    clock = time.thread_time if ranks == 1 else time.perf_counter
    found = {
        str(size): measure(timers(size, nothing, clock), options.rounds) for size in options.sizes
    }
    if ranks == 2:
        for size in options.sizes:
            ways = message_timers(size, rank, clock)
            found[f"{size} B there and back"] = measure(ways, options.rounds)
    dist.barrier()
    dist.destroy_process_group()
    return found


def print_row(title: str, figures: list[float], width: int = 16) -> None:
    print(f"{title:<{width}}" + "".join(f"{figure:>12.2f}" for figure in figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 4096], help="bytes")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path, help="also write the times there")
    options = parser.parse_args()
    _plugin.load_extension()  # which makes torch.ops.dscomm
    nothing_module()
    print(f"{'us per call':<16}" + "".join(f"{column:>12}" for column in COLUMNS))
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            with context.Pool(ranks) as pool:
                arguments = [(rank, ranks, folder, options) for rank in range(ranks)]
                found[str(ranks)] = pool.starmap(run_rank, arguments, chunksize=1)[0]
            for size in options.sizes:
                medians = found[str(ranks)][str(size)]
                print_row(f"{ranks} ranks {size} B", [medians[column] for column in COLUMNS])
    if 2 in options.ranks:
        print(f"{'us there and back':<24}" + "".join(f"{way:>12}" for way in MESSAGES))
        for size in options.sizes:
            medians = found["2"][f"{size} B there and back"]
            print_row(f"2 ranks {size} B", [medians[way] for way in MESSAGES], 24)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
