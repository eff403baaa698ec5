"""Throw-away environments for the packaging tests.

torch is never installed again: each environment sees the packages of the one that runs pytest
through a folder of links, in which everything is found except deepspeed_comm itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tests.repo.source_tree import tracked_files

ROOT = Path(__file__).resolve().parents[2]
OLD_PIP = "23.2.1"
NEW_PIP = "26.3"

# Two ranks add 1 and 2; run with the path of the store's file and the rank.
ALL_REDUCE = """
import sys, torch, torch.distributed as dist
store_path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("dscomm", init_method="file://" + store_path, rank=rank, world_size=2)
tensor = torch.full((1000,), rank + 1.0)
dist.all_reduce(tensor)
assert bool((tensor == 3.0).all()), tensor
dist.destroy_process_group()
"""


def clean_environment(**changes: str) -> dict[str, str]:
    """The variables for a process that shall know nothing of the environment pytest runs in."""
    foreign = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "CMAKE_CXX_COMPILER_LAUNCHER",  # a cache may know no paths but those of this tree
    )
    variables = {name: value for name, value in os.environ.items() if name not in foreign}
    return dict(variables, PIP_DISABLE_PIP_VERSION_CHECK="1", **changes)


@dataclass
class Environment:
    """A virtual environment with the torch of the running one, or without any."""

    path: Path
    working_directory: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def run(
        self, *arguments: str, check: bool = True, timeout_s: int = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return self._run(self.python, *arguments, check=check, timeout_s=timeout_s, **variables)

    def script(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command that a package has installed, as a user calls it."""
        return self._run(str(self.path / "bin" / name), *arguments)

    def _run(
        self, *command: str, check: bool = True, timeout_s: int = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            command,
            cwd=self.working_directory,
            env=clean_environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and result.returncode != 0:
            pytest.fail(f"{command} ended with {result.returncode}:\n{result.stdout[-6000:]}\n"
                        f"{result.stderr[-6000:]}")  # fmt: skip
        return result

    def pip(self, *arguments: str, check: bool = True, **variables: str):
        return self.run("-m", "pip", *arguments, check=check, timeout_s=590, **variables)

    def use_pip(self, version: str) -> None:
        """Installs this pip; where no index can be reached, the test is skipped and says so."""
        if self.pip("--version").stdout.split()[1] == version:
            return
        result = self.pip("install", "-q", f"pip=={version}", check=False)
        # What pip says offline: other versions of pip cannot be tried there, the installed one is.
        if "(from versions: none)" in result.stderr:
            pytest.skip(f"pip {version}: no index can be reached")
        assert result.returncode == 0, result.stderr

    def all_reduce_works(self, store_path: Path) -> None:
        """Two ranks do a real all-reduce, far from the source tree."""
        ranks = [
            subprocess.Popen(
                [self.python, "-c", ALL_REDUCE, str(store_path), str(rank)],
                cwd=self.working_directory,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def quick_build() -> str:
    """CMAKE_ARGS of a build that is tested for its files, not its speed. With ccache it compiles as
    the set-up did, and finds the results."""
    if shutil.which("ccache"):
        return os.environ.get("CMAKE_ARGS", "")
    return "-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0"


def with_requirements(names: set[str]) -> set[str]:
    """These installed packages, and all that they require."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of an extra, or of another platform
            continue
        found.add(name)
        names |= {re.match(r"[\w.-]+", each)[0] for each in requirements if "extra ==" not in each}
    return found


def link_packages(names: set[str], folder: Path) -> None:
    """Makes a folder in which these installed packages are found, with all that they require, and
    nothing else."""
    folder.mkdir(exist_ok=True)
    for name in with_requirements(names):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="session")
def outer_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to every installed package except deepspeed_comm."""
    import torch

    folder = tmp_path_factory.mktemp("outer_packages")
    site_packages = {
        Path(sysconfig.get_path("purelib")),
        Path(sysconfig.get_path("platlib")),
        Path(torch.__file__).parents[1],
    }
    ours = ("deepspeed_comm", "__editable__", "__pycache__", "pip", "setuptools", "wheel")
    for site in site_packages:
        for entry in site.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(ours) and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    return folder


@pytest.fixture(scope="session")
def make_environment(
    tmp_path_factory: pytest.TempPathFactory, outer_packages: Path
) -> Callable[..., Environment]:
    def make(with_torch: bool = True, packages: Path | None = None) -> Environment:
        """With the packages of one folder, or with torch and all else, or with nothing."""
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run(
            [sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120
        )
        (folder / "elsewhere").mkdir()
        environment = Environment(folder / "venv", folder / "elsewhere")
        if with_torch or packages:
            site_packages = environment.run(
                "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
            ).stdout.strip()
            (Path(site_packages) / "outer_packages.pth").write_text(
                f"{packages or outer_packages}\n"
            )
        return environment

    return make


@pytest.fixture(scope="session")
def environment(make_environment: Callable[..., Environment]) -> Environment:
    """An environment with torch and without deepspeed_comm, which no test installs into."""
    return make_environment()


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone, with what is not committed yet: builds in it leave no trace in this tree."""
    copy = tmp_path_factory.mktemp("sources") / "deepspeed_comm"
    for file in tracked_files():
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    return copy
