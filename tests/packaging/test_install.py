"""Installing in every way that pip has: editable and as a wheel, isolated and not, old pip and new.

What is installed is built in this very source tree and its build directory, where nothing is left
to compile after `make setup`: that is also what a developer is promised. Builds that are meant to
fail, of a changed source, or that look only at the configuration, happen in a copy.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import NEW_PIP, OLD_PIP, ROOT, Environment, clean_environment, quick_build

WHERE_IS_IT = """
import importlib.metadata as metadata
import deepspeed_comm, torch
from deepspeed_comm import _plugin
[hook] = metadata.entry_points(group="torch.backends", name="dscomm")
[later_hook] = metadata.entry_points(group="torch.distributed.backends", name="dscomm")
print(hook.value, later_hook.value, sep=",")
print(deepspeed_comm.__file__)
print(_plugin.load_extension().__file__)
"""

HOOKS = "deepspeed_comm._plugin:_autoload,deepspeed_comm._plugin:_register"

# Uses the backend and prints every file that was loaded or mapped for it.
LOADED_FILES = """
import sys, torch.distributed as dist
dist.init_process_group("dscomm", rank=0, world_size=1, store=dist.HashStore())
for module in list(sys.modules.values()):
    print(getattr(module, "__file__", None))
print(open("/proc/self/maps").read())
"""


def with_pip(usual: str) -> pytest.MarkDecorator:
    """Runs a test with this pip and isolation; the drill has all pairs."""
    pairs = itertools.product(
        {"old-pip": OLD_PIP, "new-pip": NEW_PIP}.items(), ("isolated", "no-build-isolation")
    )
    return pytest.mark.parametrize(
        ("pip_environment", "isolation"),
        [
            pytest.param(pip, isolation, id=pair, marks=() if pair == usual else pytest.mark.drill)
            for (name, pip), isolation in pairs
            for pair in [f"{name}-{isolation}"]
        ],
        indirect=["pip_environment"],
    )


@pytest.fixture(scope="module")
def pip_environment(
    request: pytest.FixtureRequest, make_environment: Callable[..., Environment]
) -> Environment:
    """An environment with this pip, and with what a build without isolation needs."""
    environment = make_environment()
    environment.use_pip(request.param)
    environment.pip("install", "-q", "setuptools>=70.1", "wheel")
    return environment


@pytest.fixture(scope="module", autouse=True)
def own_build_directory() -> Iterator[None]:
    """Gives the build directory back to the Python that runs the tests."""
    yield
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=590,
    )


def installed_files(environment: Environment) -> list[str]:
    """(entry point, package, native code) of an installation that imports."""
    return environment.run("-c", WHERE_IS_IT).stdout.split()


def uninstall(environment: Environment, outer_packages: Path) -> None:
    """Leaves the environment as it was; the install must not have pulled a torch of its own."""
    torch_file = environment.run("-c", "import torch; print(torch.__file__)").stdout
    assert torch_file.startswith(str(outer_packages))
    environment.pip("uninstall", "-q", "-y", "deepspeed_comm")
    missing = environment.run("-c", "import torch, deepspeed_comm", check=False)
    assert "No module named 'deepspeed_comm'" in missing.stderr


@pytest.mark.timeout(900)
@with_pip("new-pip-isolated")
def test_editable_install_works_and_uninstalls(
    pip_environment: Environment, outer_packages: Path, tmp_path: Path, isolation: str
) -> None:
    options = [] if isolation == "isolated" else ["--no-build-isolation"]
    pip_environment.pip("install", *options, "-e", str(ROOT))
    hooks, package, native_code = installed_files(pip_environment)
    assert hooks == HOOKS
    assert package.startswith(str(ROOT))
    assert native_code.startswith(str(ROOT / "deepspeed_comm" / "_native"))
    pip_environment.all_reduce_works(tmp_path / "store")
    uninstall(pip_environment, outer_packages)


@pytest.mark.timeout(900)
@with_pip("old-pip-no-build-isolation")
def test_wheel_runs_outside_source_tree_and_uninstalls(
    pip_environment: Environment, outer_packages: Path, tmp_path: Path, isolation: str
) -> None:
    options = [] if isolation == "isolated" else ["--no-build-isolation"]
    wheels = tmp_path / "wheels"
    pip_environment.pip("wheel", *options, "--no-deps", "-w", str(wheels), str(ROOT))
    [wheel] = wheels.iterdir()
    natives = [name for name in ZipFile(wheel).namelist() if "_native/" in name]
    assert len({Path(name).parent for name in natives}) == 1, natives
    pip_environment.pip("install", "--no-index", str(wheel))
    hooks, package, native_code = installed_files(pip_environment)
    assert hooks == HOOKS
    assert package.startswith(str(pip_environment.path))
    assert native_code.startswith(str(pip_environment.path))
    loaded = pip_environment.run("-c", LOADED_FILES).stdout
    assert native_code in loaded
    told = pip_environment.script("dscomm", "info").stdout
    assert native_code in told and f", {package.removesuffix('/__init__.py')}\n" in told
    for folder in ("deepspeed_comm", "build", "csrc"):
        assert f"{ROOT / folder}/" not in loaded
    pip_environment.all_reduce_works(tmp_path / "store")
    uninstall(pip_environment, outer_packages)


@pytest.mark.timeout(900)
def test_changed_core_file_recompiles_only_its_folder(source_tree: Path) -> None:
    def build() -> str:
        return subprocess.run(
            [sys.executable, "setup.py", "build_ext"],
            cwd=source_tree,
            env=clean_environment(CMAKE_ARGS=quick_build()),
            check=True,
            capture_output=True,
            text=True,
            timeout=590,
        ).stdout

    build()
    assert "no work to do" in build()
    (source_tree / "csrc" / "core" / "base" / "status.cc").touch()
    compiled = re.findall(r"Building CXX object (\S+)", build())
    assert len(compiled) == 1 and compiled[0].endswith("/core_base.cc.o"), compiled


def configure(source_tree: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", str(source_tree), "-B", str(build), "-G", "Ninja", "-DDSCOMM_TORCH=ON",
         "-DDSCOMM_TESTS=OFF", f"-DPython_EXECUTABLE={sys.executable}", *options],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip


def test_configuring_without_mpi_headers_leaves_mpi_out(source_tree: Path, tmp_path: Path) -> None:
    blind = tmp_path / "pkg-config"
    blind.write_text('#!/bin/sh\ncase "$*" in *ompi*) exit 1 ;; esac\nexec pkg-config "$@"\n')
    blind.chmod(0o755)
    result = configure(source_tree, tmp_path, f"-DPKG_CONFIG_EXECUTABLE={blind}")
    assert result.returncode == 0, result.stderr
    assert 'open_mpi_version = ""' in (tmp_path / "package" / "_build_info.py").read_text()
    commands = (tmp_path / "compile_commands.json").read_text()
    assert "DSCOMM_HAVE_MPI=0" in commands
    assert "openmpi" not in commands

    result = configure(
        source_tree, tmp_path / "on", f"-DPKG_CONFIG_EXECUTABLE={blind}", "-DDSCOMM_MPI=ON"
    )
    assert result.returncode != 0
    assert "libopenmpi-dev" in result.stderr


def test_compiler_searches_pybind11_of_torch_first(source_tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    result = configure(source_tree, tmp_path / "build", f"-DCMAKE_CXX_FLAGS=-isystem {other}")
    assert result.returncode == 0, result.stderr
    [first] = (tmp_path / "build").glob("torch_*/pybind11_of_torch")
    assert (first / "pybind11" / "pybind11.h").exists()
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    glue = [entry["command"] for entry in commands if "/_C.dir/" in entry["command"]]
    assert glue
    for command in glue:
        # The compiler searches all of -I before all of -isystem, and each in the order given.
        include = re.findall(r"-I(\S+)", command)
        assert include[0] == str(first)


def test_failed_build_names_the_remedy(
    environment: Environment, source_tree: Path, tmp_path: Path
) -> None:
    def build(**variables: str) -> str:
        result = subprocess.run(
            [environment.python, "setup.py", "build_ext"],
            cwd=source_tree,
            env=clean_environment(**variables),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode != 0
        return result.stderr

    without_cmake = build(PATH=str(tmp_path))
    assert "needs cmake, which was not found: run `apt-get install" in without_cmake
    assert "Traceback" not in without_cmake

    without_headers = build(CMAKE_ARGS="-DDSCOMM_TORCH_ROOT=/nonexistent")
    assert "Configuring deepspeed_comm failed; its last lines:" in without_headers
    assert "torch's headers were not found in /nonexistent" in without_headers
    assert "apt-get install g++" in without_headers
    assert "Traceback" not in without_headers


@pytest.mark.parametrize(
    "isolation", ["isolated", pytest.param("no-build-isolation", marks=pytest.mark.drill)]
)
def test_build_without_torch_names_the_remedy_in_one_line(
    make_environment: Callable[..., Environment], source_tree: Path, isolation: str
) -> None:
    environment = make_environment(with_torch=False)
    environment.pip("install", "-q", "setuptools>=70.1", "wheel")
    options = [] if isolation == "isolated" else ["--no-build-isolation"]
    result = environment.pip("install", *options, "-e", str(source_tree), check=False)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert output.count("run `pip install torch==2.13.0` first") == 1
    assert "Traceback" not in output
