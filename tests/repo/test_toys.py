"""The toys of the drill fit the sources, and touch the files that CONTRIBUTING.md lists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from source_tree import ROOT

from tests.toys.toys import LISTED, Toy, all_toys, section

TOYS = all_toys()
COUNTS = {"two": 2, "three": 3, "four": 4}


def name_of_toy(toy: Toy) -> str:
    return toy.name


@pytest.mark.parametrize("toy", TOYS, ids=name_of_toy)
def test_files_of_a_toy_match_list_in_contributing(toy: Toy) -> None:
    assert toy.differences() == []


def test_counts_of_files_in_contributing_are_true() -> None:
    """ "Change two files:", and then two."""
    lists = re.compile(r"(\w+) files\b[^:]*:\n\n((?:[- ] .*\n)+)")
    counts = [found for toy in TOYS for found in lists.findall(section(toy.section))]
    assert len(counts) > 0
    for count, listed in counts:
        assert len(LISTED.findall(listed)) == COUNTS[count.lower()], listed


def test_toys_apply_to_the_sources_in_turn(tmp_path: Path) -> None:
    """Each anchor occurs once, and no new file replaces one."""
    assert len(TOYS) > 0
    names = {edit[0] for toy in TOYS for edit in toy.edits}
    names |= {name for toy in TOYS for name in toy.new_files()}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    for toy in TOYS:
        assert (tmp_path / toy.test_file()).parent.is_dir() and toy.test_file() in toy.new_files()
        toy.apply(tmp_path)


def test_changed_anchor_and_unlisted_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("int one;\nint one;\n")
    toy = Toy("none", "A dtype", [("a.cc", "after", "int one;\n", "int two;\n")], {}, "")
    with pytest.raises(ValueError, match="a.cc has 2 times: int one;"):
        toy.apply(tmp_path)
    differences = toy.differences()
    assert "A dtype: a.cc is touched but not listed" in differences
    assert "A dtype: csrc/core/types/dtype.h is not touched" in differences
