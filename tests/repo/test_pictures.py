"""The pictures of docs/design.md are those that docs/pictures/draw.py draws, and are legible."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(file.name for file in FOLDER.glob("*.svg"))
LEAST_FONT_PX = 11


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, str(FOLDER / "draw.py"), str(folder)], check=True, timeout=60)
    return folder


def test_program_draw_writes_exactly_the_committed_pictures(drawn: Path) -> None:
    assert PICTURES
    assert sorted(file.name for file in drawn.iterdir()) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_drawn_again_equals_the_committed_file(name: str, drawn: Path) -> None:
    assert (drawn / name).read_text() == (FOLDER / name).read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_picture_has_no_text_smaller_than_the_limit(name: str) -> None:
    sizes = [int(size) for size in re.findall(r'font-size="(\d+)"', (FOLDER / name).read_text())]
    assert sizes and min(sizes) >= LEAST_FONT_PX


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_shown_on_the_design_page(name: str) -> None:
    assert f"](pictures/{name})" in (ROOT / "docs" / "design.md").read_text()
