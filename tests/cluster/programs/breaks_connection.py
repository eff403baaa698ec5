"""Rank 0 resets the connection of MPI's messages repeatedly until a call fails:
breaks_connection.py TIMEOUT_S."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from world import World

COUNT = 1_000_000
CALLS_BETWEEN = 3
RESET_WHEN_CLOSED = struct.pack("ii", 1, 0)  # struct linger
# Offset of the acknowledged bytes, 64 bits, in struct tcp_info of linux/tcp.h.
BYTES_ACKED = 120


def acknowledged_bytes(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("Q", info, BYTES_ACKED)[0] if len(info) >= BYTES_ACKED + 8 else 0


def busiest_connection() -> int | None:
    """The descriptor of the TCP connection that has sent most: MPI's, after large calls."""
    sent: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # fails for a listening socket
                    sent[int(name)] = acknowledged_bytes(connection)
        except OSError:
            continue
    return max(sent, key=lambda descriptor: sent[descriptor], default=None)


def reset(descriptor: int) -> None:
    connection = socket.socket(fileno=os.dup(descriptor))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_WHEN_CLOSED)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)  # keeps the number in use
    os.close(null)
    connection.close()  # the last descriptor of the connection


def main() -> None:
    world = World()
    world.init()
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(
        timedelta(seconds=float(sys.argv[1]))
    )
    began_s = time.monotonic()
    steps = 0

    def all_reduce(number: int) -> None:
        nonlocal began_s, steps
        began_s, steps = time.monotonic(), number
        dist.all_reduce(torch.ones(COUNT))

    def break_until_it_counts() -> None:
        """Repeats, since MPI may reconnect without losing data."""
        broken_at = -CALLS_BETWEEN
        while True:
            time.sleep(0.1)
            if steps >= broken_at + CALLS_BETWEEN and (busiest := busiest_connection()) is not None:
                broken_at = steps
                reset(busiest)

    for number in range(CALLS_BETWEEN):
        all_reduce(number)
    if world.rank == 0:
        threading.Thread(target=break_until_it_counts, daemon=True).start()
    world.until_raised(all_reduce)
    world.say("took", seconds=time.monotonic() - began_s)
    dist.destroy_process_group()
    world.say("destroyed")


if __name__ == "__main__":
    main()
