"""The wheel that tools/wheels cross-compiles for aarch64: its files, some of them under qemu."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from conftest import ROOT, clean_environment

pytestmark = [pytest.mark.drill, pytest.mark.timeout(2400)]
MINOR = ".".join(torch.__version__.split(".")[:2])
SYSROOT = ROOT / "build" / "aarch64_sysroot"
PYTHON = "python3.11"  # Debian 12's, for which apt has a build for aarch64
# What no index, or no mirror of Debian, has answered.
NOT_FETCHED = ("torch_headers: torch", "aarch64_sysroot: apt found no", "(from versions: none)")


def files_of(wheel: Path, folder: Path) -> list[Path]:
    """The native files of the wheel, which is unpacked there."""
    ZipFile(wheel).extractall(folder)
    found = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in found if file.read_bytes()[:4] == b"\x7fELF"]


def readelf(option: str, file: Path) -> str:
    command = ["readelf", option, "--wide", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The cross compiler and qemu exist for few systems; no part of make test needs them.
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "apt-get"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: see 'Build for aarch64' in CONTRIBUTING.md")
    # There is nothing foreign to cross-compile for.
    if platform.machine() == "aarch64":
        pytest.skip(
            "this machine is aarch64: tests/packaging/test_wheel.py builds and uses the wheel"
        )
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "tools" / "wheels"), "--machine", "aarch64"]
    result = subprocess.run(
        [*command, "--torches", MINOR, "--out", str(folder)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=2300,
    )
    # Offline there are no headers and libraries to build with. Any other failure is one.
    if result.returncode != 0 and any(text in result.stderr for text in NOT_FETCHED):
        pytest.skip(f"a part of the build could not be fetched: {result.stderr[-500:]}")
    assert result.returncode == 0, result.stdout + result.stderr
    [built] = folder.iterdir()
    return built


def test_wheel_for_aarch64_has_modules_and_libraries(wheel: Path) -> None:
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    assert re.search(rf"-cp{python}-cp{python}-manylinux_2_35_aarch64\.whl$", wheel.name)
    assert wheel.stat().st_size < 15_000_000
    names = {Path(name).name for name in ZipFile(wheel).namelist()}
    assert {f"_C.cpython-{python}-aarch64-linux-gnu.so", "_build_info.py"} <= names
    assert {"libdscomm_openmpi.so", "libdscomm_mpich.so", "dscomm-pmix"} <= names
    assert {"libhwloc", "libhwy"} <= {name.split("-")[0] for name in names if ".so" in name}
    assert not any(name.startswith(("libtorch", "libc10", "libmpi", "libpmix")) for name in names)


def test_aarch64_files_need_no_newer_system_than_manylinux_tag(wheel: Path, tmp_path: Path) -> None:
    files = files_of(wheel, tmp_path)
    assert len(files) >= 6
    for file in files:
        assert re.search(r"Machine:\s+AArch64", readelf("-h", file)), file
        for folders in re.findall(r"R(?:UN)?PATH.*\[(.*)\]", readelf("-d", file)):
            for folder in folders.split(":"):
                assert folder.startswith(("$ORIGIN", "/usr/lib/aarch64-linux-gnu")), (
                    f"{file}: {folder}"
                )
        needed = readelf("-V", file)
        for name, newest in (("GLIBC", (2, 35)), ("GLIBCXX", (3, 4, 30))):
            for version in re.findall(rf"\b{name}_([0-9.]+)", needed):
                assert tuple(map(int, version.split("."))) <= newest, f"{file}: {name}_{version}"


def test_aarch64_mpi_module_loads_under_qemu(wheel: Path, tmp_path: Path) -> None:
    """With Debian's MPI and Python. The extension would need half a gigabyte of torch."""
    files_of(wheel, tmp_path)
    subprocess.run([str(ROOT / "tools" / "aarch64_sysroot"), PYTHON], check=True, timeout=600)
    module = tmp_path / "deepspeed_comm" / "_native" / "libdscomm_openmpi.so"
    script = (
        "import ctypes, platform\n"
        f"module = ctypes.CDLL({str(module)!r}, mode=ctypes.RTLD_GLOBAL)\n"
        "print(platform.machine(), hasattr(module, 'dscomm_transport_module'))"
    )
    emulated = ["qemu-aarch64-static", "-L", str(SYSROOT), str(SYSROOT / "usr" / "bin" / PYTHON)]
    result = subprocess.run(
        [*emulated, "-c", script],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.split() == ["aarch64", "True"], result.stdout + result.stderr
