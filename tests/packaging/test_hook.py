"""The hook that torch calls at every import: it never raises, costs little, and says what is wrong
with an installation only when the backend is used."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Environment

ENTRY_POINTS = "[torch.backends]\ndscomm = deepspeed_comm._plugin:_autoload\n"

# Creates a group of one rank and prints the error that comes of it.
USE_BACKEND = """
import torch.distributed as dist
try:
    dist.init_process_group("dscomm", rank=0, world_size=1, store=dist.HashStore())
except RuntimeError as error:
    print("error:", error)
else:
    print("no error")
"""

IS_REGISTERED = 'print("registered", hasattr(dist.Backend, "DSCOMM"))'


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A folder as pip leaves it, with the package's Python files and no native code."""
    shutil.copytree(
        ROOT / "deepspeed_comm",
        tmp_path / "deepspeed_comm",
        ignore=shutil.ignore_patterns("_native", "__pycache__", "*.so"),
    )
    information = tmp_path / "deepspeed_comm-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed_comm\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def native_folder(installation: Path, version: str) -> Path:
    name = "torch_" + "".join(letter if letter.isalnum() else "_" for letter in version)
    folder = installation / "deepspeed_comm" / "_native" / name
    folder.mkdir(parents=True)
    return folder


def add_build(folder: Path, built_against: str, native_code: bytes) -> None:
    (folder / "_build_info.py").write_text(f'torch_version = "{built_against}"\n')
    (folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(native_code)


def run(
    environment: Environment, installation: Path, program: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return environment.run("-c", program, PYTHONPATH=str(installation), **variables)


@pytest.mark.parametrize(
    "imports, autoload, expected",
    [
        ("import torch", "1", True),
        ("import torch, deepspeed_comm", "1", True),
        ("import deepspeed_comm, torch", "1", True),
        ("import deepspeed_comm", "1", True),
        ("import torch", "0", False),
        ("import torch, deepspeed_comm", "0", True),
        ("import deepspeed_comm, torch", "0", True),
        ("import deepspeed_comm._plugin, torch, deepspeed_comm", "0", True),
    ],
)
def test_backend_is_registered_in_every_import_order(
    environment: Environment, installation: Path, imports: str, autoload: str, expected: bool
) -> None:
    result = run(
        environment,
        installation,
        f"{imports}\nimport torch.distributed as dist\n{IS_REGISTERED}",
        TORCH_DEVICE_BACKEND_AUTOLOAD=autoload,
    )
    assert result.stdout == f"registered {expected}\n"
    assert result.stderr == ""


def test_import_works_without_native_code_and_use_names_the_remedy(
    environment: Environment, installation: Path
) -> None:
    output = run(environment, installation, USE_BACKEND).stdout
    assert re.search(r"error: deepspeed_comm in \S+ has no native code: build it for torch", output)
    assert "pip install --no-build-isolation" in output


def test_native_code_for_another_torch_raises_with_the_remedy(
    environment: Environment, installation: Path
) -> None:
    add_build(native_folder(installation, "1.12.9"), "1.12.9", b"")
    output = run(environment, installation, USE_BACKEND).stdout
    version = torch.__version__
    assert f"was built against torch 1.12.9, but torch {version} is installed: rebuild it" in output
    assert "pip install --no-build-isolation" in output


def test_build_record_of_another_torch_raises_with_the_remedy(
    environment: Environment, installation: Path
) -> None:
    version = torch.__version__
    add_build(native_folder(installation, version), "9.9.9", b"")
    output = run(environment, installation, USE_BACKEND).stdout
    assert f"was built against torch 9.9.9, but torch {version} is installed: rebuild it" in output


def test_broken_native_code_raises_with_the_remedy(
    environment: Environment, installation: Path
) -> None:
    version = torch.__version__
    add_build(native_folder(installation, version), version, b"no shared library")
    output = run(environment, installation, USE_BACKEND).stdout
    assert f"built against torch {version}, cannot be loaded" in output
    assert "rebuild it with" in output


def test_error_for_a_missing_library_names_its_package(
    environment: Environment, installation: Path, tmp_path: Path
) -> None:
    version = torch.__version__
    folder = native_folder(installation, version)
    add_build(folder, version, b"")
    library = tmp_path / "libhwloc.so.99"
    empty = ["c++", "-shared", "-nostdlib", "-x", "c++", "/dev/null", "-x", "none"]
    subprocess.run([*empty, f"-Wl,-soname,{library.name}", "-o", str(library)], check=True)
    [extension] = folder.glob("_C*.so")
    needs = ["-Wl,--no-as-needed", str(library), "-o", str(extension)]
    subprocess.run([*empty, *needs], check=True)
    library.unlink()
    output = run(environment, installation, USE_BACKEND).stdout
    assert "libhwloc.so.99: cannot open shared object file" in output
    assert "run `apt-get install libhwloc15 libhwy1`" in output


def test_wheel_serves_every_torch_of_a_minor_version(
    environment: Environment, installation: Path
) -> None:
    version = torch.__version__
    minor = ".".join(version.split(".")[:2])
    add_build(native_folder(installation, minor), minor, b"no shared library")
    add_build(native_folder(installation, "9.8"), "9.8", b"")
    output = run(environment, installation, USE_BACKEND).stdout
    assert f"built against torch {minor}, cannot be loaded" in output


def test_wheel_without_this_torch_names_the_supported_ones(
    environment: Environment, installation: Path
) -> None:
    for minor in ("9.10", "9.8"):
        add_build(native_folder(installation, minor), minor, b"")
    output = run(environment, installation, USE_BACKEND).stdout
    version = torch.__version__
    assert (
        f"is for torch 9.8, 9.10, but torch {version} is installed: install one of those" in output
    )


def test_native_code_of_another_python_cannot_be_loaded(
    environment: Environment, installation: Path
) -> None:
    version = torch.__version__
    folder = native_folder(installation, version)
    (folder / "_build_info.py").write_text(f'torch_version = "{version}"\n')
    (folder / "_C.cpython-27-other.so").write_bytes(b"")
    output = run(environment, installation, USE_BACKEND).stdout
    assert "cannot be loaded" in output


@pytest.mark.parametrize("changed", [False, True])
def test_checkout_without_native_code_uses_an_equal_installed_package(
    environment: Environment, installation: Path, tmp_path_factory, changed: bool
) -> None:
    """It uses the native code of the installed package where both have the same Python files, and
    names both packages where they differ."""
    checkout = tmp_path_factory.mktemp("checkout")
    shutil.copytree(installation / "deepspeed_comm", checkout / "deepspeed_comm")
    if changed:
        with (checkout / "deepspeed_comm" / "comm.py").open("a") as file:
            file.write("# changed\n")
    version = torch.__version__
    add_build(native_folder(installation, version), version, b"no shared library")
    program = "import sys\nsys.path.insert(0, sys.argv[1])\n" + USE_BACKEND
    output = environment.run(
        "-c",
        program,
        str(checkout),
        PYTHONPATH=str(installation),
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    ).stdout
    if changed:
        assert f"{checkout}/deepspeed_comm has no native code for torch " in output
        assert f"The installed package {installation}/deepspeed_comm has it" in output
        assert "pip install --no-build-isolation" in output
    else:
        assert "cannot be loaded" in output
        assert f"{installation}/deepspeed_comm/_native/" in output


@pytest.mark.parametrize(
    "fault",
    [
        'dist.Backend.register_backend = None',
        'dist.is_available = lambda: 1 / 0',
        'sys.modules["torch.distributed"] = None',
        'sys.modules["torch"] = None',
        'del dist.Backend',
    ],
)  # fmt: skip
def test_the_hook_never_raises(environment: Environment, installation: Path, fault: str) -> None:
    program = f"""
import sys, torch, torch.distributed as dist
from importlib.metadata import entry_points
[hook] = entry_points(group="torch.backends")
hook = hook.load()
if hasattr(dist.Backend, "DSCOMM"):
    del dist.Backend.DSCOMM
{fault}
hook()
print("alive")
"""
    for arguments in ((), ("-W", "error")):
        result = environment.run(
            *arguments,
            "-c",
            program,
            PYTHONPATH=str(installation),
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
        assert result.stdout == "alive\n"


def test_failed_registration_is_reported(environment: Environment, installation: Path) -> None:
    program = """
import torch, torch.distributed as dist
dist.Backend.register_backend = None
import deepspeed_comm
"""
    result = run(environment, installation, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "the backend dscomm could not be registered" in result.stderr


def test_torch_without_distributed_registers_nothing(
    environment: Environment, installation: Path
) -> None:
    program = f"""
import torch, torch.distributed as dist
dist.is_available = lambda: False
import deepspeed_comm
{IS_REGISTERED}
"""
    result = run(environment, installation, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (result.stdout, result.stderr) == ("registered False\n", "")


def test_registration_with_torch_1_13_passes_no_devices(
    environment: Environment, installation: Path
) -> None:
    program = """
import torch, torch.distributed as dist
def register_backend(name, func, extended_api=False):
    print(name, callable(func), extended_api)
dist.Backend.register_backend = register_backend
import deepspeed_comm
"""
    result = run(environment, installation, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (result.stdout, result.stderr) == ("dscomm True True\n", "")


def test_backend_serves_cpu_and_gloo_stays_the_default(
    environment: Environment, installation: Path
) -> None:
    program = """
import torch.distributed as dist
print(dist.Backend.backend_capability["dscomm"], dist.Backend.default_device_backend_map["cpu"])
"""
    assert run(environment, installation, program).stdout == "['cpu'] gloo\n"


def test_the_hook_loads_no_native_code_and_starts_no_thread(
    environment: Environment, installation: Path
) -> None:
    version = torch.__version__
    add_build(native_folder(installation, version), version, b"would fail if it were loaded")
    program = """
import os, sys, torch, torch.distributed
threads = len(os.listdir("/proc/self/task"))
from deepspeed_comm import _plugin
_plugin._autoload()
print(len(os.listdir("/proc/self/task")) - threads, "deepspeed_comm._C" in sys.modules)
"""
    result = run(environment, installation, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout == "0 False\n"


def test_the_hook_reads_only_its_own_two_modules(
    environment: Environment, installation: Path
) -> None:
    """Every program that imports torch pays for the hook, so it imports and opens nothing else."""
    program = """
import sys, torch, torch.distributed
modules, read, folders = set(sys.modules), [], set()
def note(event, arguments):
    if event == "open":
        read.append(str(arguments[0]))
    elif event in ("os.listdir", "os.scandir"):
        folders.add(str(arguments[0]))
sys.addaudithook(note)
from deepspeed_comm import _plugin
_plugin._autoload()
read, folders = tuple(read), tuple(folders)  # what the rest of the program opens does not count
print(*sorted(set(sys.modules) - modules))
print(*folders)
print(*read, sep="\\n")
"""
    result = run(environment, installation, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    modules, folders, *files = result.stdout.splitlines()
    assert modules == "deepspeed_comm deepspeed_comm._plugin"
    assert set(folders.split()) <= {str(installation), str(installation / "deepspeed_comm")}
    package = re.escape(str(installation / "deepspeed_comm"))
    of_a_module = rf"{package}/(__init__|_plugin)\.py|{package}/__pycache__/(__init__|_plugin)\.\S+"
    assert files and all(re.fullmatch(of_a_module, file) for file in files), files


def test_import_works_without_torch_and_use_names_the_remedy(
    make_environment, installation: Path
) -> None:
    program = """
import deepspeed_comm
from deepspeed_comm import _plugin
try:
    _plugin.load_extension()
except RuntimeError as error:
    print(error)
"""
    bare = make_environment(with_torch=False)
    output = run(bare, installation, program).stdout
    assert output.count("\n") == 1
    assert "pip install torch==2.13.0" in output
