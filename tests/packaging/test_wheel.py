"""The wheel of tools/wheels: what is in it, and that it works without a compiler and a network.

A wheel for this torch is built, unless WHEEL names one, as `make test-wheel` and the drill do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from conftest import ROOT, Environment, clean_environment, link_packages

pytestmark = [
    pytest.mark.timeout(1200),
    # `make test TORCH=debian` runs this folder too. Debian's 1.13 has another ABI of std::string.
    pytest.mark.skipif(
        torch.__version__.startswith("1."), reason="wheels are for torch 2.9 and later"
    ),
]
MINOR = ".".join(torch.__version__.split(".")[:2])
SMOKE = Path(__file__).parent / "wheel_smoke.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "WHEEL" in os.environ:
        return ROOT / os.environ["WHEEL"]
    folder = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "wheels"), "--torches", MINOR, "--out", str(folder)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1100,
    )
    # pip's words if no index answers, and only then: of a release that is missing it lists others.
    if result.returncode != 0 and "(from versions: none)" in result.stdout:
        pytest.skip("auditwheel is not installed, and no index can be reached")
    assert result.returncode == 0, result.stdout
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(
    wheel: Path,
    make_environment: Callable[..., Environment],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Environment, set[Path]]]:
    """An environment with the wheel and what the demo needs; the files that were there before."""
    packages = tmp_path_factory.mktemp("packages")
    link_packages({"torch", "numpy", "scikit-learn"}, packages)
    environment = make_environment(packages=packages)
    # Before Python 3.12 venv brings one that is too old for torch, which is found before torch's.
    environment.pip("uninstall", "-q", "-y", "setuptools")
    before = set(environment.path.rglob("*"))
    # Some torches require extras of CUDA's packages, which link_packages() does not follow.
    environment.pip("install", "-q", "--no-index", "--no-deps", str(wheel))
    yield environment, before


def run_cut_off(environment: Environment, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs it without a network but loopback, and with a PATH on which there is nothing but this
    environment: no compiler, no MPI. (Only root can take the network away.)"""
    prefix: list[str] = []
    if os.geteuid() == 0:
        ip, unshare = shutil.which("ip"), shutil.which("unshare")
        assert ip and unshare, "iproute2 and util-linux are needed"
        prefix = [unshare, "-n", "/bin/sh", "-c", f'{ip} link set lo up && exec "$@"', "sh"]
    return subprocess.run(
        [*prefix, *command],
        cwd=environment.working_directory,
        env=clean_environment(PATH=str(environment.path / "bin"), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_wheel_lists_its_requirements_and_is_small(wheel: Path) -> None:
    assert re.search(r"-cp\d+-cp\d+-manylinux_2_35_x86_64\.whl$", wheel.name)
    assert wheel.stat().st_size < 15_000_000
    archive = ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    fields = Parser().parsestr(archive.read(metadata).decode())
    assert set(fields.get_all("Requires-Dist") or []) == {"torch", "numpy"}
    assert fields["License-Expression"] or fields["License"] == "BSD-3-Clause"
    names = {Path(name).name for name in archive.namelist()}
    assert {"libdscomm_openmpi.so", "libdscomm_mpich.so", "dscomm-pmix"} <= names
    bundled = {name.split("-")[0] for name in names if "/" not in name and ".so" in name}
    assert {"libhwloc", "libhwy"} <= bundled
    assert not any(name.startswith(("libtorch", "libc10", "libmpi", "libpmix")) for name in names)


def test_rpaths_in_the_wheel_name_no_build_folder(wheel: Path, tmp_path: Path) -> None:
    ZipFile(wheel).extractall(tmp_path)
    checked = 0
    for file in tmp_path.rglob("*"):
        if not file.is_file() or file.read_bytes()[:4] != b"\x7fELF":
            continue
        checked += 1
        told = subprocess.run(
            ["readelf", "-d", str(file)], check=True, capture_output=True, text=True
        ).stdout
        for folders in re.findall(r"R(?:UN)?PATH.*\[(.*)\]", told):
            for folder in folders.split(":"):
                assert folder.startswith(("$ORIGIN", "/usr/lib/")), f"{file}: {folder}"
    assert checked >= 6


def test_collectives_without_compiler_and_network_are_correct(
    installed: tuple[Environment, set[Path]],
) -> None:
    environment, _ = installed
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = run_cut_off(environment, environment.python, *launcher, str(SMOKE))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("all collectives are right") == 1
    assert f"{environment.path}/" in result.stdout  # the native code that was loaded


def test_program_and_demo_of_the_readme_run(
    installed: tuple[Environment, set[Path]], tmp_path: Path
) -> None:
    environment, _ = installed
    [program] = re.findall(
        r"^```python\n(.*?init_process_group.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.M | re.S,
    )
    example = tmp_path / "example.py"
    example.write_text(program)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = run_cut_off(environment, environment.python, *launcher, str(example))
    assert sorted(result.stdout) == sorted("1.0\n1.0\n"), result.stdout + result.stderr
    demo = ("-m", "deepspeed_comm.demo", "--epochs", "1", "--sizes", "8", "--rounds", "3")
    result = run_cut_off(environment, environment.python, *launcher, *demo)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every result was checked" in result.stdout


def test_doctor_of_the_wheel_finds_no_problem(installed: tuple[Environment, set[Path]]) -> None:
    environment, _ = installed
    result = run_cut_off(environment, str(environment.path / "bin" / "dscomm"), "doctor")
    assert result.returncode == 0, result.stdout + result.stderr


def test_unknown_torch_names_the_supported_ones(installed: tuple[Environment, set[Path]]) -> None:
    environment, _ = installed
    script = (
        "import torch; torch.__version__ = '9.9.0'\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('dscomm', store=dist.HashStore(), rank=0, world_size=1)"
    )
    result = environment.run("-c", script, check=False)
    assert result.returncode != 0
    expected = rf"is for torch .*\b{MINOR}\b.*, but torch 9\.9\.0 is installed: install one"
    assert re.search(expected, result.stderr), result.stderr


def test_mpi_module_of_the_wheel_loads_mpi_of_this_host(
    installed: tuple[Environment, set[Path]],
) -> None:
    environment, _ = installed
    script = (
        "import ctypes, os\n"
        "from deepspeed_comm import _plugin\n"
        "folder = os.path.dirname(os.path.dirname(_plugin.load_extension().__file__))\n"
        "ctypes.CDLL(folder + '/libdscomm_openmpi.so', mode=ctypes.RTLD_GLOBAL)\n"
        "print(os.access(folder + '/dscomm-pmix', os.X_OK))\n"
    )
    assert environment.run("-c", script).stdout.strip() == "True"


def test_uninstalled_wheel_leaves_nothing(installed: tuple[Environment, set[Path]]) -> None:
    environment, before = installed
    environment.pip("uninstall", "-q", "-y", "deepspeed_comm")
    left = {
        path
        for path in set(environment.path.rglob("*")) - before
        if "deepspeed" in path.name or "dscomm" in path.name
    }
    assert left == set()
