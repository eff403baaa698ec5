"""The source tree, as the repository checks read it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked_files() -> list[Path]:
    """What belongs to the project: what git tracks, and what it would if it were added."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = [ROOT / name for name in listing.split("\0") if name]
    # One that has just been removed is still tracked.
    return [file for file in files if file.is_file()]


def copy_tracked_files(folder: Path) -> None:
    """Copies the project to an empty folder."""
    for file in tracked_files():
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


def native_sources(folder: str = "csrc") -> list[Path]:
    """Every .cc and .h below a folder, sorted."""
    return sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in (".cc", ".h"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def without_comments(source: str) -> str:
    """C++ with every comment blanked, its lines kept; strings stay."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(found: re.Match[str]) -> str:
        text = found.group()
        return re.sub(r"[^\n]", " ", text) if text.startswith("/") else text

    return token.sub(blank, source)
