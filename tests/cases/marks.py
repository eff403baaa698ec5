"""Conditions on which tests of several folders are skipped."""

from __future__ import annotations

import pytest

from tests.cases.harness import TORCH_2

# These tests are of what torch 2 added: torch.compile, functional collectives, coalescing, splits,
# memory from the backend. Debian's torch 1.13 has nothing to call; all other tests run on it.
needs_torch_2 = pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no such call")
