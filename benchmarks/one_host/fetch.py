"""Brings files of Debian and PyPI into folders of the build, where nothing of the system changes.

A folder that is complete says what it was made of, and is made once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 600.0  # of one tool's run


class Unavailable(Exception):
    """A peer cannot be had here, and why: one line."""


def run_tool(
    command: list[str], what: str, folder: Path | None = None, more: dict[str, str] | None = None
) -> str:
    """What the command prints. `more` is added to the environment. Raises Unavailable, with the
    last line that it says, where it fails or is not there."""
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(more or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from None
    if result.returncode != 0:
        said = [line.strip() for line in (result.stdout + result.stderr).splitlines()]
        errors = [line for line in said if "error" in line.lower() or line.startswith("E:")]
        last = (errors or [line for line in said if line] or ["no word"])[0]
        raise Unavailable(f"{what} failed: {last[:200]}")
    return result.stdout


def made_once(folder: Path, of: str, make: Callable[[Path], None]) -> Path:
    """The folder, filled by make() unless it is there already and was made of the same."""
    stamp = folder / ".made-of"
    if stamp.exists() and stamp.read_text() == of:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        make(part)
        (part / ".made-of").write_text(of)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def wheels(folder: Path, *requirements: str) -> Path:
    """Their files below one prefix: include, lib, bin. Without what they depend on."""

    def make(part: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed"]
        what = f"pip install {' '.join(requirements)}"
        run_tool([*pip, "--prefix", str(part), *requirements], what)

    return made_once(folder, " ".join(requirements), make)


def source(folder: Path, requirement: str, below: str) -> Path:
    """One folder of a source distribution, as `folder/below`. Nothing of it is built.

    pip unpacks it, then asks it for its metadata, for which some want packages that are not here:
    what has been unpacked is kept, and whether that question was answered does not matter.
    """

    def make(part: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-clean"]
        options = ["--no-binary", ":all:", "--no-build-isolation"]
        unpacked = part / "unpacked"
        unpacked.mkdir()
        refusal = None
        try:
            run_tool(
                [*pip, *options, "--dest", str(unpacked), requirement],
                f"pip download {requirement}",
                more={"TMPDIR": str(unpacked)},
            )
        except Unavailable as error:
            refusal = error
        found = next(iter(sorted(unpacked.glob(f"pip-download-*/*/{below}"))), None)
        if found is None:
            raise refusal or Unavailable(f"{requirement} has no {below}")
        shutil.copytree(found, part / below)
        shutil.rmtree(unpacked)

    return made_once(folder, requirement, make)


def debian_packages(folder: Path, *packages: str) -> Path:
    """Their files below one root, as if they were installed there."""

    def make(part: Path) -> None:
        what = f"apt-get download {' '.join(packages)}"
        # As root, apt would become another user, who may not write here, and say so.
        options = ["-o", "APT::Sandbox::User=root"]
        run_tool(["apt-get", "download", *options, *packages], what, folder=part)
        for file in part.glob("*.deb"):
            run_tool(["dpkg-deb", "-x", str(file), str(part)], f"unpacking {file.name}")
            file.unlink()

    return made_once(folder, " ".join(packages), make)
