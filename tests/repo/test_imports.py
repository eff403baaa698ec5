"""What a test imports from another file of the tests exists there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_names() -> list[tuple[str, str]]:
    """(module, name) of each `from tests.module import name`."""
    found = set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                found |= {(node.module or "", alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), shared_names())
def test_imported_name_is_defined(module: str, name: str) -> None:
    package = importlib.import_module(module)
    assert hasattr(package, name) or importlib.util.find_spec(f"{module}.{name}")
