"""Process 1 of a test's host: sets the host up, and keeps it until standard input is closed.

    unshare --net --mount --uts --ipc --pid --fork --mount-proc python host_init.py SETTINGS

SETTINGS is JSON: the host's name, the content of /etc/hosts, and the folders below /tmp and
/dev/shm that stay visible. When this process ends, the kernel ends every process of the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

EMPTIED = ("/tmp", "/dev/shm")

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC = 0x2, 0x4, 0x1000, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    # The system call, because mount(8) would resolve /proc/self/fd to a path that is hidden by now.
    texts = [os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*texts, flags, os.fsencode(options)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def empty_memory_folders(kept: list[str]) -> None:
    """Mounts an empty /tmp and /dev/shm, in which the kept folders have their old paths."""
    before = {path: os.open(path, os.O_PATH) for path in kept}
    for place in EMPTIED:
        mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    for path, descriptor in before.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, flags=_MS_BIND | _MS_REC)
        os.close(descriptor)


def know_names(lines: str) -> None:
    """Mounts a private /etc/hosts, from a file that is deleted: nothing is left behind."""
    path = "/tmp/names-of-hosts"
    with open(path, "w") as file:
        file.write(lines)
    mount(path, "/etc/hosts", flags=_MS_BIND)
    os.unlink(path)


def main() -> None:
    settings = json.loads(sys.argv[1])
    socket.sethostname(settings["name"])
    empty_memory_folders(settings["kept"])
    know_names(settings["names"])
    # Makes the kernel reap orphans.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
