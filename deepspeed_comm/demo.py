"""The demo: trains on handwritten digits over dscomm, then compares it with gloo.

    torchrun --nproc-per-node=2 -m deepspeed_comm.demo [options]

DistributedDataParallel trains a small network on scikit-learn's digits, over the backend of
--backend. Batches are divided among the ranks, so the losses hardly depend on the number of ranks.
Then all-reduces of several sizes are timed on dscomm and gloo, interleaved, and checked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepspeed_comm import _launcher_variables
from deepspeed_comm._machine import describe_place, processor_name
from deepspeed_comm._timing import all_reduce_times
from deepspeed_comm.bench.flags import byte_size, positive

BACKENDS = ("dscomm", "gloo")
BATCH = 64  # digits, of all ranks together
HELD_OUT = 360  # of the 1797 digits, for the accuracy
# The flight record's length unless the user sets it; more calls than the demo makes.
RECORDER_ENTRIES = 100_000


def main() -> None:
    options = parse_options()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.exit(
            "The demo needs several processes; start it with torchrun:\n"
            "  torchrun --nproc-per-node=2 -m deepspeed_comm.demo"
        )
    os.environ.setdefault("DSCOMM_RECORDER_ENTRIES", str(RECORDER_ENTRIES))
    local_ranks = _launcher_variables.local_world_size(os.environ, int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))

    dist.init_process_group(options.backend)
    try:
        introduce()
        train(options)
        report_communication()
        compare(options.sizes, options.rounds)
    finally:
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=2 -m deepspeed_comm.demo",
        description="Train on handwritten digits over dscomm, then compare all-reduces with gloo.",
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="dscomm", help="the backend of the training"
    )
    parser.add_argument("--epochs", type=positive, default=12)
    parser.add_argument(
        "--sizes",
        type=float32_size,
        nargs="+",
        default=[8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20],
        metavar="BYTES",
        help="sizes of the all-reduces, such as 8 64K 16M",
    )
    parser.add_argument(
        "--rounds", type=positive, default=15, help="samples of each time; prints their median"
    )
    return parser.parse_args()


def float32_size(text: str) -> int:
    """Parses bytes as byte_size() does; a multiple of 4, for float32."""
    size = byte_size(text)
    if size % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 bytes, got {text}")
    return size


def say(text: str = "") -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def introduce() -> None:
    """Prints the host, the CPUs and the transport of each rank."""
    say(f"{dist.get_world_size()} ranks, torch {torch.__version__}, {processor_name()}")
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"pid {os.getpid()} on {describe_place()}: {describe_group()}")
    for rank, line in enumerate(lines):
        say(f"  rank {rank}: {line}")


def backend_object() -> Any:
    """The default group's backend for CPU tensors; with torch 1.13 that is the group."""
    group: Any = dist.distributed_c10d._get_default_group()
    if hasattr(group, "_get_backend"):
        group = group._get_backend(torch.device("cpu"))
    return getattr(group, "wrapped_pg", group)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def describe_group() -> str:
    carrier = backend_object()
    if not hasattr(carrier, "describe"):
        return dist.get_backend()
    from deepspeed_comm._plugin import load_extension

    return f"dscomm, {carrier.describe()}, reductions on {load_extension().reduce_target()}"


def load_digits(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Images and labels to train on, then held-out images and labels; equal on all ranks."""
    try:
        import sklearn.datasets
    except ImportError as error:
        raise SystemExit(
            f"the demo trains on the digits of scikit-learn ({error}): run "
            "`pip install numpy scikit-learn`"
        ) from None

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=generator)
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.int64)[order]
    return x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT]


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x, y, x_held_out, y_held_out = load_digits(generator)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    share = max(1, BATCH // world)
    steps = len(y) // (share * world)

    say(
        f"\ntraining on {len(y)} digits over {options.backend}: {parameters} parameters, "
        f"{steps} steps an epoch of {share} digits a rank"
    )
    with progress(options.epochs * steps) as (step_done, tell):
        for epoch in range(1, options.epochs + 1):
            began = time.perf_counter()
            order = torch.randperm(len(y), generator=generator)
            loss_sum = torch.zeros(())
            for step in range(steps):
                first = (step * world + rank) * share
                mine = order[first : first + share]
                loss = torch.nn.functional.cross_entropy(model(x[mine]), y[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                step_done()
            dist.all_reduce(loss_sum)
            loss_mean = loss_sum.item() / (steps * world)
            seconds = time.perf_counter() - began
            tell(f"  epoch {epoch:2d}  loss {loss_mean:.4f}  {seconds:.2f} s")

    # Each rank evaluates its share of the held-out digits.
    with torch.no_grad():
        answers = network(x_held_out[rank::world]).argmax(1)
    right = (answers == y_held_out[rank::world]).sum()
    dist.all_reduce(right)
    say(f"  held-out accuracy {right.item() / len(y_held_out):.4f} on {len(y_held_out)} digits")


@contextlib.contextmanager
def progress(steps: int) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """Yields (call after each step, print a line); shows a bar on rank 0 on a terminal."""
    with_bar = dist.get_rank() == 0 and sys.stdout.isatty()
    if with_bar:
        try:
            from rich.progress import Progress
        except ImportError:  # the bar is optional
            with_bar = False
    if not with_bar:
        yield (lambda: None), say
        return

    with Progress(transient=True) as bar:
        task = bar.add_task("training", total=steps)
        yield (lambda: bar.advance(task)), lambda line: bar.console.print(line, highlight=False)


def report_communication() -> None:
    """Prints the training's communication, from the group's flight record."""
    carrier = backend_object()
    if not hasattr(carrier, "flight_record"):
        say(f"\nno summary of the communication: {dist.get_backend()} has no flight record here")
        return
    calls = json.loads(carrier.flight_record())
    totals: dict[str, list[float]] = {}
    for call in calls:
        total = totals.setdefault(call["title"], [0, 0, 0])
        total[0] += 1
        total[1] += call["count"] * element_bytes(call["dtype"])
        total[2] += (call["finished_ns"] - call["started_ns"]) / 1e9
    which = f"{len(calls)} calls"
    if calls and calls[-1]["id"] > len(calls):
        which = f"the last {len(calls)} of {calls[-1]['id']} calls"
    say(f"\nrank 0 communicated, by the flight record ({which}; time includes waiting):")
    for title, (count, byte_count, seconds) in totals.items():
        say(f"  {title:<24} {count:6d} calls {byte_count / 1e6:10.3f} MB {seconds:8.3f} s")


def element_bytes(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def compare(sizes: list[int], rounds: int) -> None:
    """Times all-reduces of both backends, interleaved; the slowest rank counts."""
    carried_by = dist.get_backend()
    contenders = {}
    for name in BACKENDS:
        group = dist.group.WORLD if name == carried_by else dist.new_group(backend=name)
        contenders[name] = functools.partial(dist.all_reduce, group=group)
    say(f"\nall-reduce of float32, SUM: medians of {rounds} samples taken in turns, in us")
    say(f"  {'bytes':>10} {'dscomm':>10} {'gloo':>10} {'gloo/dscomm':>12}")
    for size in sizes:
        medians = all_reduce_times(contenders, size, rounds)
        say(
            f"  {size:>10} {medians['dscomm']:>10.1f} {medians['gloo']:>10.1f} "
            f"{medians['gloo'] / medians['dscomm']:>12.2f}"
        )
    say("  every result was checked")


if __name__ == "__main__":
    main()
