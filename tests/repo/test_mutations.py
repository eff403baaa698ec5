"""The mutations of the drill find in the sources what they replace, however these have changed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader

from source_tree import ROOT

DRILL = ROOT / "tests" / "mutation" / "drill"


def test_every_mutation_changes_its_file() -> None:
    loader = SourceFileLoader("mutation_drill", str(DRILL))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    drill = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = drill  # where its dataclass looks for its module
    loader.exec_module(drill)
    assert len(drill.MUTATIONS) > 10
    for mutation in drill.MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert drill.mutate(text, mutation) != text, mutation.name
