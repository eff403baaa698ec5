from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """make_hosts(3): three hosts for one test; options as for Hosts."""
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(Hosts(count, tmp_path, **options))
