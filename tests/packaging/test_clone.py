"""What a newcomer does: follows the README in a clone, or installs a source distribution.

Nothing is fetched. An environment has the packages that the README's pip lines name, what they
require, and no others.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Environment, clean_environment, link_packages, quick_build

README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def lines_with(command: str) -> list[str]:
    found = [line for line in "\n".join(blocks("sh")).splitlines() if line.startswith(command)]
    assert found, f"the README has no line that starts with {command}"
    return found


@pytest.fixture
def newcomer(make_environment: Callable[..., Environment], tmp_path: Path) -> Environment:
    """An environment in which `pip install` of what a build needs has been done."""
    [line] = [each for each in lines_with("pip install torch") if "setuptools" in each]
    names = shlex.split(line, comments=True)[2:]
    link_packages({re.match(r"[\w.-]+", name)[0] for name in names}, tmp_path / "packages")
    environment = make_environment(packages=tmp_path / "packages")
    # Which a new environment of an old Python has, and which pip would replace.
    environment.pip("uninstall", "-q", "-y", "setuptools", check=False)
    torchrun = Path(environment.python).with_name("torchrun")
    torchrun.write_text(f'#!/bin/sh\nexec {environment.python} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return environment


def shell(environment: Environment, line: str, folder: Path) -> str:
    """What a line of the README prints there; without an index that pip could ask."""
    result = subprocess.run(
        ["bash", "-ec", line],
        cwd=folder,
        env=clean_environment(
            PATH=f"{environment.path}/bin:{os.environ['PATH']}",
            PIP_NO_INDEX="1",
            CMAKE_ARGS=quick_build(),
            OMP_NUM_THREADS="1",
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=590,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{line}:\n{output[-6000:]}"
    return output


def assert_two_ranks_print_one(output: str) -> None:
    # A rank writes a number and the end of its line one after the other.
    assert sorted(output) == sorted("1.0\n1.0\n"), output


@pytest.mark.timeout(900)
def test_commands_of_the_readme_work_in_a_clone(newcomer: Environment, source_tree: Path) -> None:
    for line in lines_with("pip "):
        if ".whl" not in line:  # test_wheel.py has this one
            shell(newcomer, line, source_tree)
    [program] = [block for block in blocks("python") if "init_process_group" in block]
    (source_tree / "example.py").write_text(program)
    [torchrun] = [line for line in lines_with("torchrun") if "example.py" in line]
    assert_two_ranks_print_one(shell(newcomer, torchrun, source_tree))
    # Had the clone native code of its own, nothing would have been tested.
    assert not (source_tree / "deepspeed_comm" / "_native").exists()

    # A clone that has moved on since is not mixed with what is installed.
    comm = source_tree / "deepspeed_comm" / "comm.py"
    text = comm.read_text()
    comm.write_text(text + "# changed\n")
    try:
        with pytest.raises(AssertionError, match="its Python files differ"):
            shell(newcomer, torchrun, source_tree)
        [install] = [line for line in lines_with("pip ") if "--no-build-isolation" in line]
        shell(newcomer, re.sub(r" \.(?=\s|$)", " -e .", install), source_tree)
        assert_two_ranks_print_one(shell(newcomer, torchrun, source_tree))
    finally:
        comm.write_text(text)


@pytest.mark.timeout(900)
def test_source_distribution_can_be_installed(
    newcomer: Environment, source_tree: Path, tmp_path: Path
) -> None:
    make = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    shell(newcomer, f"python -c {shlex.quote(make)}", source_tree)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "README.md", "CMakeLists.txt"} <= names
    shell(newcomer, f"pip install --no-build-isolation --no-deps {archive}", tmp_path)
    found = newcomer.run(
        "-c",
        "from deepspeed_comm import _plugin; print(_plugin.load_extension().__file__)\n"
        "from importlib.metadata import distribution, metadata\n"
        "about = metadata('deepspeed_comm')\n"
        "assert about['Author'] == 'the deepspeed_comm developers', about['Author']\n"
        "assert '# deepspeed_comm' in (about.get_payload() or about['Description'])\n"
        "files = distribution('deepspeed_comm').files\n"
        "print(next(file.locate() for file in files if file.name == 'LICENSE').read_text())",
    ).stdout
    assert found.startswith(str(newcomer.path))
    assert found.endswith((ROOT / "LICENSE").read_text() + "\n")
    newcomer.all_reduce_works(tmp_path / "store")
