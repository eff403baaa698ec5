"""Ranks that disagree, in every way of the tests of one host: mismatch.py COUNT ODD_RANK."""

from __future__ import annotations

import sys

from world import World

from tests.cases.mismatch import KINDS, mismatch_rank


def main() -> None:
    count, odd_rank = (int(word) for word in sys.argv[1:])
    world = World()
    answers = mismatch_rank(world, [(kind, count, odd_rank) for kind in range(len(KINDS))])
    world.say("done", answers=answers)


if __name__ == "__main__":
    main()
