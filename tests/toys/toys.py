"""Toy additions: a folder each, with new files at their places and edits of others in additions.py.

additions.py has

    SECTION     the title of the kind of addition under "Add something" in CONTRIBUTING.md
    EDITS       (file, where, anchor, text): the anchor occurs once in the file, and the text is
                inserted "before" or "after" it, or comes "instead" of it
    NOT_NEEDED  {file or folder that the section lists: why this toy leaves it alone}
    TESTS       the filter of core tests that cover the toy
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import runpy
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# A file or folder of the tree in a list of CONTRIBUTING.md; * stands for a part of a name.
LISTED = re.compile(r"`((?:csrc|deepspeed_comm|docs|tests|cmake)/[\w./*-]+)`")


@dataclasses.dataclass(frozen=True)
class Toy:
    name: str
    section: str
    edits: list[tuple[str, str, str, str]]
    not_needed: dict[str, str]
    tests: str

    def new_files(self) -> list[str]:
        folder = FOLDER / self.name
        files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        return sorted(files - {"additions.py"})

    def test_file(self) -> str:
        """The test of the toy itself, which no addition has."""
        return f"tests/core/toy_{self.name}_test.cc"

    def touched(self) -> set[str]:
        return {edit[0] for edit in self.edits} | set(self.new_files()) - {self.test_file()}

    def apply(self, tree: Path) -> None:
        """Adds the toy to a tree, which may have others."""
        for name, where, anchor, text in self.edits:
            file = tree / name
            source = file.read_text()
            if source.count(anchor) != 1:
                raise ValueError(f"{self.name}: {name} has {source.count(anchor)} times: {anchor}")
            new = {"before": text + anchor, "after": anchor + text, "instead": text}[where]
            file.write_text(source.replace(anchor, new))
        for name in self.new_files():
            assert not (tree / name).exists(), name
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text((FOLDER / self.name / name).read_text())

    def differences(self) -> list[str]:
        """How the toy differs from the list of its section."""
        listed = set(LISTED.findall(section(self.section)))
        touched = self.touched()
        wrong = [f"{each} is not listed" for each in sorted(set(self.not_needed) - listed)]
        for entry in sorted(listed):
            is_touched = any(covers(entry, file) for file in touched)
            if is_touched == (entry in self.not_needed):
                wrong.append(f"{entry} is {'' if is_touched else 'not '}touched")
        wrong += [
            f"{file} is touched but not listed"
            for file in sorted(touched)
            if not any(covers(entry, file) for entry in listed)
        ]
        return [f"{self.section}: {each}" for each in wrong]


def covers(entry: str, file: str) -> bool:
    return fnmatch.fnmatch(file, entry) or file.startswith(entry.rstrip("/") + "/")


def section(title: str) -> str:
    """Of "Add something" in CONTRIBUTING.md, the part with this title."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    [part] = re.findall(rf"^\*\*{re.escape(title)}[.:]\*\*(.*?)(?=^\*\*|^## )", page, re.M | re.S)
    return str(part)


def all_toys() -> list[Toy]:
    toys = []
    for file in sorted(FOLDER.glob("*/additions.py")):
        facts = runpy.run_path(str(file))
        names = ("SECTION", "EDITS", "NOT_NEEDED", "TESTS")
        toys.append(Toy(file.parent.name, *(facts[name] for name in names)))
    return toys
