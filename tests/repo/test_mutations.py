"""The mutations of the drill find in the sources what they replace, however these have changed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT

DRILL = ROOT / "tests" / "mutation" / "drill"


@pytest.fixture(scope="module")
def drill() -> ModuleType:
    loader = SourceFileLoader("mutation_drill", str(DRILL))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # where its dataclass looks for its module
    loader.exec_module(module)
    return module


def test_copy_of_the_tree_can_be_configured(drill: ModuleType, tmp_path: Path) -> None:
    drill.Sandbox(tmp_path, ["tests", "walker"], schedules=1)


def test_every_mutation_changes_its_file(drill: ModuleType) -> None:
    assert len(drill.MUTATIONS) > 10
    for mutation in drill.MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert drill.mutate(text, mutation) != text, mutation.name
