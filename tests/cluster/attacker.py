"""A stranger: repeatedly connects to a host's ports, with data that no rank sends.

attacker.py ADDRESS UID SPARED [PORTS]: runs as user UID. It attacks PORTS, such as 1024-1100; by
default all listening ports of its own network namespace, at ADDRESS and at 127.0.0.1. It never
connects to port SPARED. It keeps each connection for as long as it can, until SIGTERM; then it
prints, as JSON, how often it was connected to each port.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

# Nothing; less than a greeting; other protocols; noise; Open MPI's greeting, from rank 0 and from
# an invalid rank, with more data after it; and a header that announces a huge message.
WORDS = [
    b"",
    b"\x00",
    b"GET / HTTP/1.0\r\n\r\n",
    random.Random(1).randbytes(4096),
    b"OPAL-TCP-BTL\0\0\0\0" + bytes(8),
    b"OPAL-TCP-BTL\0\0\0\0" + b"\xff" * 200,
    b"\xff" * 16,
]
AT_ONCE = 4  # connections to one port with the same data


def listening(address: str) -> set[tuple[str, int]]:
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            place, port = words[1].split(":")
            at = address if place == "00000000" else ".".join(map(str, bytes.fromhex(place)[::-1]))
            found.add((at, int(port, 16)))
            if place == "00000000":
                found.add(("127.0.0.1", int(port, 16)))
    return found


def begin(target: tuple[str, int]) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        client.connect(target)
    return client


def main() -> None:
    address, uid, spared = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    first, last = map(int, sys.argv[4].split("-")) if len(sys.argv) > 4 else (0, -1)
    tried = {(address, port) for port in range(first, last + 1)}
    os.setgid(uid)
    os.setuid(uid)
    connected: collections.Counter[int] = collections.Counter()
    held: dict[tuple[tuple[str, int], int, int], socket.socket] = {}
    spoken: set[socket.socket] = set()

    def end(*_: object) -> None:
        print(json.dumps(connected))
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    print("attacking", flush=True)
    while True:
        for target in tried or listening(address):
            for kind, words in enumerate(WORDS):
                for number in range(AT_ONCE):
                    key = (target, kind, number)
                    if target[1] == spared:
                        continue
                    try:
                        if key not in held:
                            held[key] = begin(target)
                        elif held[key] not in spoken:
                            held[key].getpeername()
                            connected[target[1]] += 1
                            spoken.add(held[key])
                            held[key].send(words)
                            if number == 1:
                                held[key].shutdown(socket.SHUT_WR)  # half open
                            elif number == 2:
                                held.pop(key).close()  # like a port scan
                        elif held[key].recv(4096) == b"":
                            held.pop(key).close()  # closed by the peer: connects again
                    except BlockingIOError:
                        pass
                    except OSError:
                        # Not connected yet, or no longer.
                        client = held.get(key)
                        if client and client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
                            held.pop(key).close()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
