"""Many ranks on one host: times of init, calls, a group and the end, with dscomm and gloo.

    benchmarks/many_ranks.py [--ranks 64 128 256] [--backends dscomm gloo] [--limit-s 300]

All ranks are forked from one process that has imported torch. Times are those of the slowest rank,
in ms; of calls, the median of 20. Memory is the growth of a rank's private pages and of its share
of shared pages; descriptors are those opened. Both are the most of any rank. "-": not within the
limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

CALLS = 20
COLUMNS = ("init", "first call", "8 B", "1 MiB", "new_group", "destroy")


def memory_kb() -> int:
    """Private pages of this process, and its share of the shared ones."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return int(fields["Pss"].split()[0])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def timed(body: Callable[[], object]) -> float:
    began_s = time.monotonic()
    body()
    return time.monotonic() - began_s


def run_rank(
    backend: str, rank: int, size: int, port: int, limit_s: float, out: Connection
) -> None:
    torch.set_num_threads(1)
    before_kb, before_fds = memory_kb(), descriptors()
    times = []
    timeout = timedelta(seconds=limit_s)
    address = f"tcp://127.0.0.1:{port}"
    times.append(
        timed(
            lambda: dist.init_process_group(
                backend, init_method=address, rank=rank, world_size=size, timeout=timeout
            )
        )
    )
    for count, calls in ((2, 1), (2, CALLS), (1 << 18, CALLS)):
        data = torch.ones(count)

        def call(data: torch.Tensor = data) -> None:
            dist.all_reduce(data)

        times.append(statistics.median(timed(call) for _ in range(calls)))
    times.append(timed(lambda: dist.all_reduce(torch.ones(2), group=dist.new_group())))
    kb, fds = memory_kb() - before_kb, descriptors() - before_fds
    dist.barrier()
    times.append(timed(dist.destroy_process_group))
    out.send((times, kb, fds))


def in_child(arguments: tuple[str, int, int, int, float, Connection]) -> None:
    try:
        run_rank(*arguments)
    except Exception:
        if arguments[1] == 0:
            traceback.print_exc()
        os._exit(1)
    os._exit(0)


def measure(backend: str, size: int, limit_s: float) -> tuple[list[float], float, int] | None:
    """The slowest rank's times, the greatest memory in MB, the most descriptors."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=in_child, args=((backend, rank, size, port, limit_s, there),)
        )
        process.start()
        there.close()
        ranks.append((process, here))
    deadline_s = time.monotonic() + limit_s
    found = []
    for _, here in ranks:
        try:
            if here.poll(max(0.0, deadline_s - time.monotonic())):
                found.append(here.recv())
        except EOFError:
            pass
    for process, here in ranks:
        if len(found) < size:
            process.kill()
        process.join()
        here.close()
    if len(found) < size:
        return None
    times = [max(each) for each in zip(*(times for times, _, _ in found), strict=True)]
    return times, max(kb for _, kb, _ in found) / 1024, max(fds for _, _, fds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--backends", nargs="+", default=["dscomm", "gloo"])
    parser.add_argument("--limit-s", type=float, default=300.0)
    options = parser.parse_args()
    print(f"| ranks | backend | {' | '.join(COLUMNS)} | MB a rank | descriptors |")
    print(f"| --: | --- |{' --: |' * (len(COLUMNS) + 2)}")
    for size in options.ranks:
        for backend in options.backends:
            found = measure(backend, size, options.limit_s)
            if found is None:
                cells = ["-"] * (len(COLUMNS) + 2)
            else:
                times, megabytes, fds = found
                cells = [f"{each * 1e3:.{2 if each < 0.1 else 0}f}" for each in times]
                cells += [f"{megabytes:.1f}", str(fds)]
            print(f"| {size} | {backend} | {' | '.join(cells)} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
