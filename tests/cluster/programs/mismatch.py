"""Ranks that disagree, in every way of the tests of one host: mismatch.py COUNT ODD_RANK."""

from __future__ import annotations

import sys

from test_mismatch import KINDS, _rank
from world import World


def main() -> None:
    count, odd_rank = (int(word) for word in sys.argv[1:])
    world = World()
    answers = _rank(world, [(kind, count, odd_rank) for kind in range(len(KINDS))])
    world.say("done", answers=answers)


if __name__ == "__main__":
    main()
