"""Failures that the harness must report: misbehaves.py fails|hangs|silent."""

from __future__ import annotations

import signal
import sys

from world import World


def main() -> None:
    world = World()
    print(f"rank {world.rank} was here", flush=True)
    if world.rank == 1:
        if sys.argv[1] == "fails":
            raise ValueError("on purpose")
        if sys.argv[1] == "hangs":
            signal.pause()
        if sys.argv[1] == "silent":
            return
    world.say("done")


if __name__ == "__main__":
    main()
