"""Training across hosts gives the losses that gloo gives."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.hosts import Hosts
from tests.cluster.jobs import BACKEND, start_ranks


def test_training_losses_match_gloo(make_hosts: Callable[[int], Hosts]) -> None:
    with start_ranks(make_hosts(2), [0, 0, 1, 1], "training.py") as job:
        for result in job.results():
            losses = result["losses"]
            ways = {f"{way}, {name}" for way in ("DDP", "FSDP2") for name in (BACKEND, "gloo")}
            assert set(losses) == {"alone", f"HSDP, {BACKEND}"} | ways
            for name, values in losses.items():
                assert len(values) == 8 and values[-1] < 0.8 * values[0], (name, values)
