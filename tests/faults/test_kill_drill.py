"""Random kills: a few in every test run, and the full count in the drill."""

from __future__ import annotations

import pytest
from kill_drill import run


@pytest.mark.parametrize(("ranks", "count"), [(4, 8), (2, 2)])
def test_random_kills_raise_on_survivors(ranks: int, count: int) -> None:
    outcome = run(count, ranks, seed=11)
    print(outcome.summary())
    assert not outcome.failures, "\n".join(outcome.failures)
    assert len(outcome.times_s) >= count * max(1, ranks - 2)


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "count"), [(4, 300), (8, 40), (16, 20), (2, 40)])
def test_many_random_kills_raise_on_survivors(ranks: int, count: int) -> None:
    outcome = run(count, ranks, seed=3)
    print(outcome.summary())
    assert not outcome.failures, "\n".join(outcome.failures)
