"""Fetches packages of Debian and PyPI into folders of the build; the system does not change.

A complete folder names the packages that it was made of, and is made once.
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
    """Why a peer is unavailable here: one line."""


def run_tool(
    command: list[str], what: str, folder: Path | None = None, more: dict[str, str] | None = None
) -> str:
    """The output of the command. `more` is added to the environment. Raises Unavailable, with
    its first error line, if the command fails or is missing."""
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
    """The folder, filled by make() unless it exists and was made of the same packages."""
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
    """The wheels' files below one prefix: include, lib, bin. Without their dependencies."""

    def make(part: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed"]
        what = f"pip install {' '.join(requirements)}"
        run_tool([*pip, "--prefix", str(part), *requirements], what)

    return made_once(folder, " ".join(requirements), make)


def source(folder: Path, requirement: str, below: str) -> Path:
    """One folder of a source distribution, as `folder/below`. Nothing of it is built.

    pip unpacks the distribution and then makes its metadata, which may need packages that are
    missing here. The unpacked files are kept, even if making the metadata fails.
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
    """The packages' files below one root, as if they were installed there."""

    def make(part: Path) -> None:
        what = f"apt-get download {' '.join(packages)}"
        # As root, apt would become a user who may not write here, and would warn.
        options = ["-o", "APT::Sandbox::User=root"]
        run_tool(["apt-get", "download", *options, *packages], what, folder=part)
        for file in part.glob("*.deb"):
            run_tool(["dpkg-deb", "-x", str(file), str(part)], f"unpacking {file.name}")
            file.unlink()

    return made_once(folder, " ".join(packages), make)
