from __future__ import annotations

import os
from collections.abc import Iterator

# Before importing torch: ranks are forked, which an OpenMP pool of the parent would not survive.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.cases.harness import RankSets, rank_sets  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankSets]:
    """ranks(4).run(function, ...) runs a module-level function in each of 4 reused ranks."""
    with rank_sets() as sets:
        yield sets
