"""Says what init_process_group() raises, if it does."""

from __future__ import annotations

import torch.distributed as dist
from world import World


def main() -> None:
    world = World()
    try:
        world.init()
    except RuntimeError as error:
        world.say("raised", text=str(error))
        return
    dist.destroy_process_group()
    world.say("destroyed")


if __name__ == "__main__":
    main()
