"""Conditions on which tests of several folders are skipped."""

from __future__ import annotations

import pytest

from tests.cases.harness import TORCH_2

needs_torch_2 = pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no such call")
