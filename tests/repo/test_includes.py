"""Data goes one way: base and store, types, reduce and topology, team, shm, messages, transport,
detector, formation, engine, torch; mpi implements what transport declares. So do includes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from source_tree import ROOT, name_of, native_sources, without_comments

# Each layer with all that it may include besides itself.
LAYERS = {
    "core/base": set(),
    "core/store": {"core/base"},
    "core/types": {"core/base"},
    "core/reduce": {"core/base", "core/types"},
    "core/topology": {"core/base"},
    "core/team": {"core/base", "core/types", "core/reduce", "core/topology"},
    "core/shm": {"core/base", "core/types", "core/reduce", "core/topology", "core/team"},
    "core/messages": {"core/base", "core/types", "core/team", "core/shm"},
    "core/transport": {"core/base", "core/store", "core/types", "core/team", "core/messages"},
    "core/detector": {"core/base", "core/store", "core/team", "core/transport"},
    "core/formation": {
        "core/base", "core/store", "core/types", "core/reduce", "core/topology", "core/team",
        "core/shm", "core/messages", "core/transport", "core/detector",
    },
    "core/engine": {
        "core/base", "core/store", "core/types", "core/reduce", "core/topology", "core/team",
        "core/shm", "core/messages", "core/transport", "core/detector", "core/formation",
    },
    "pmix": {"core/base"},
    "mpi": {
        "core/base", "core/store", "core/types", "core/reduce", "core/topology", "core/team",
        "core/shm", "core/messages", "core/transport", "core/detector", "pmix",
    },
    "torch": {
        "core/base", "core/store", "core/types", "core/reduce", "core/topology", "core/team",
        "core/shm", "core/messages", "core/transport", "core/detector", "core/formation",
        "core/engine",
    },
}  # fmt: skip

# What the core is free of, so that it builds, runs and is tested without any of them.
FOREIGN = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|numpy)\b|^(Python|mpi|mpi-ext|pmix\w*)\.h$")

# And who is there for it.
OWN_FOREIGN = {
    "torch": re.compile(""),
    "mpi": re.compile(r"^(mpi(-ext)?|pmix)\.h$"),
    "pmix": re.compile(r"^pmix\w*\.h$"),
}

SOURCES = native_sources()


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', without_comments(text), re.M)


def layer_of(path: str) -> str | None:
    """The layer of a path relative to csrc."""
    return next((layer for layer in LAYERS if path.startswith(layer + "/")), None)


def complaints(layer: str, text: str) -> list[str]:
    found = []
    for included in includes(text):
        target = layer_of(included)
        # torch's own headers lie below torch/csrc; ours is the folder csrc/torch.
        if target == "torch" and not (ROOT / "csrc" / included).exists():
            target = None
        if target is not None and target != layer and target not in LAYERS[layer]:
            found.append(f"{included}: {layer} must know nothing of {target}")
        allowed = OWN_FOREIGN.get(layer)
        if FOREIGN.match(included) and not (allowed and allowed.match(included)):
            found.append(f"{included}: {layer} includes no torch, MPI, PMIx or Python")
    return found


def test_every_source_has_a_layer() -> None:
    assert SOURCES
    lost = [
        name_of(file) for file in SOURCES if layer_of(str(file.relative_to(ROOT / "csrc"))) is None
    ]
    assert not lost, "give these folders a place in LAYERS"


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_includes_follow_the_order_of_layers(file: Path) -> None:
    layer = layer_of(str(file.relative_to(ROOT / "csrc")))
    assert layer is not None
    assert not complaints(layer, file.read_text())


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_project_includes_are_written_relative_to_csrc(file: Path) -> None:
    for included in includes(file.read_text()):
        beside = file.parent / included
        assert not beside.is_file() or (ROOT / "csrc" / included).exists(), included


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core/base", '#include "core/types/dtype.h"'),
        ("core/team", '#include "core/shm/mailbox/mailboxes.h"'),
        ("core/shm", '#include "core/engine/group.h"'),
        ("core/engine", '#include "torch/backend.h"'),
        ("core/engine", "#include <torch/extension.h>"),
        ("core/shm", "#include <mpi.h>"),
        ("core/base", "#  include <Python.h>"),
    ],
)
def test_wrong_include_is_reported(layer: str, line: str) -> None:
    assert complaints(layer, f"// {line}\n") == []
    assert complaints(layer, line)
