"""Reports the error of init_process_group(), if any. The argument is its timeout in seconds."""

from __future__ import annotations

import sys

import torch.distributed as dist
from world import GROUP_TIMEOUT_S, World


def main() -> None:
    world = World()
    try:
        world.init(float(sys.argv[1]) if len(sys.argv) > 1 else GROUP_TIMEOUT_S)
    except RuntimeError as error:
        world.say("raised", text=str(error))
        return
    dist.destroy_process_group()
    world.say("destroyed")


if __name__ == "__main__":
    main()
