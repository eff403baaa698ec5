"""The plugin hook that registers the backend "dscomm" with torch, and the native code's loader.

torch calls _autoload() at the end of every `import torch` in this environment, and an exception
would make that import fail. So the hook never raises, loads no native code and starts no thread,
and this module does not import torch at its top. Faults of the installation are reported when the
backend is first used.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# The folder of the native code: this package's, or the one that _use_installed_build() found.
_native = os.path.join(_PACKAGE, "_native")
# The native module after loading; sys.modules also has it while a thread is still loading it.
_extension: ModuleType | None = None


def _autoload() -> None:
    """Registers "dscomm" with torch. The entry point of the group torch.backends; never raises."""
    try:
        _register()
    except Exception as error:  # an exception would break `import torch`
        try:
            warnings.warn(f"the backend dscomm could not be registered: {error!r}", stacklevel=2)
        except Exception:  # warnings may be errors
            pass


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "DSCOMM"):
        return
    register_backend = dist.Backend.register_backend
    # torch 1.13 has no parameter `devices`; its backends serve all devices.
    takes_devices = "devices" in inspect.signature(register_backend).parameters
    # A list, because torch would iterate over the letters of "cpu".
    devices = {"devices": ["cpu"]} if takes_devices else {}
    register_backend("dscomm", _create_backend, extended_api=True, **devices)
    # Registered this early to run last: exit handlers run in reverse order.
    atexit.register(_end_calls)
    try:
        dist.register_rendezvous_handler("mpi", _rendezvous)
    except RuntimeError:
        pass  # another package has registered the scheme


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """init_method="mpi://"; see _rendezvous.py."""
    from deepspeed_comm._rendezvous import rendezvous

    return rendezvous(url, **options)


def _create_backend(distributed_backend_options: Any, pg_options: Any = None) -> Any:
    """The backend of one process group; torch calls this."""
    native = load_extension()
    _end_with_multiprocessing()
    return native.create_backend(distributed_backend_options, pg_options)


def _end_calls() -> None:
    """The exit handler; see csrc/torch/exit.h."""
    if _extension is not None:
        _extension.end_calls(_unhandled_exception())


_pid_of_finalizer = 0


def _end_with_multiprocessing() -> None:
    """Ends the groups of a multiprocessing child at its exit, because it runs no exit handlers."""
    global _pid_of_finalizer
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    if _pid_of_finalizer == os.getpid():
        return
    _pid_of_finalizer = os.getpid()
    from multiprocessing import util

    # Last, because other finalizers may still call collectives.
    util.Finalize(None, _end_child, exitpriority=-sys.maxsize)


def _end_child() -> None:
    native = load_extension()
    own = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not own and not each.daemon]
    native.end_child(_unhandled_exception(), not others)


def _unhandled_exception() -> str:
    """The type of the exception that ends this process, or "" if none is known."""
    error = sys.exc_info()[1]  # set while a multiprocessing child is ending
    if isinstance(error, SystemExit):
        # torch.multiprocessing raises SystemExit while it handles the exception.
        error = error.__context__ if error.code not in (None, 0) else None
    elif error is None and not hasattr(sys, "ps1"):  # an interactive session keeps old errors
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return type(error).__name__ if error is not None else ""


def loaded_extension() -> ModuleType | None:
    """The native module, or None before it has been loaded."""
    return _extension


def load_extension() -> ModuleType:
    """Loads the native module.

    Raises RuntimeError with the torch that it was built for and the command that rebuilds it.
    """
    global _extension
    if _extension is not None:
        return _extension
    version = torch_version()
    if version is None:
        raise RuntimeError(
            "deepspeed_comm needs torch, which this Python cannot import: `import torch` shows the "
            f"cause. If it is missing, `pip install torch==2.13.0`, then `{rebuild_command()}`."
        )
    try:
        built_against = _torch_of_build(native_folder(version))
        if built_against is None:
            _use_installed_build(version)
            built_against = _torch_of_build(native_folder(version))
    except OSError as error:
        raise RuntimeError(f"the native code of deepspeed_comm cannot be read: {error}") from error
    if not _fits(built_against, version):
        builds = [built_against] if built_against else _torches_of_all_builds()
        raise RuntimeError(_no_build(version, builds))
    try:
        native = importlib.import_module("deepspeed_comm._C")
    except ImportError as error:
        if re.match(r"lib(hwloc|hwy)\.so\S*: cannot open", str(error)):
            raise RuntimeError(
                "the native code of deepspeed_comm needs a library that is not installed "
                f"({error}): run `apt-get install libhwloc15 libhwy1`."
            ) from error
        raise RuntimeError(
            f"the native code of deepspeed_comm, built against torch {built_against}, cannot be "
            f"loaded ({error}). If no limit of this process (ulimit -n, ulimit -v) is the cause, "
            f"rebuild it with `{rebuild_command()}`."
        ) from error
    _keep_when_traced()
    _extension = native
    return native


def _keep_when_traced() -> None:
    """Keeps torch.compile from removing calls with unused results: other ranks make them, too."""
    import torch

    operations = getattr(torch.ops, "dscomm", None)
    for name in ("inference_all_reduce", "inference_all_reduce_"):
        if hasattr(operations, name):  # torch 2
            from torch.fx.node import has_side_effect

            has_side_effect(getattr(operations, name).default)


def torch_version() -> str | None:
    """The version of the torch that this Python can import, or None."""
    try:
        import torch
    # OSError: a library of torch is missing. RuntimeError: another package's plugin failed.
    except (ImportError, OSError, RuntimeError):
        return None
    return str(torch.__version__)


# The programs of `dscomm` that import torch in a child process, because it may crash or hang.
_EXAMINING = ("doctor", "info", "config")


def only_examines() -> bool:
    """Whether this process runs a program of _EXAMINING, which must not import torch itself."""
    program = _program_of(sys.orig_argv[1:])
    if program[:2] == ["-m", "deepspeed_comm.doctor"]:
        return True
    is_command = program[:2] == ["-m", "deepspeed_comm"]
    words = program[2:] if is_command else program[1:]
    is_command |= bool(program) and os.path.basename(program[0]) == "dscomm"
    return is_command and bool(words) and words[0] in _EXAMINING


def _program_of(arguments: list[str]) -> list[str]:
    """The program and its arguments, without the interpreter's options: ["-m", module, ...] or
    [script, ...]."""
    arguments = list(arguments)
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-"):
        if re.fullmatch(r"-[A-Za-z]+m", arguments[0]):  # as in -um
            arguments[0] = "-m"
            break
        takes_value = arguments[0] in ("-X", "-W", "--check-hash-based-pycs")
        del arguments[: 2 if takes_value else 1]
    return arguments


def native_folder(version: str) -> str:
    """The folder of the native code for this torch, which need not exist."""
    return _folder_in(_native, version)


def _folder_in(native: str, version: str) -> str:
    """The folder of setup.py's build, for exactly this torch, or of a wheel's build, for all
    torches of the minor version."""
    own, shared = (
        os.path.join(native, "torch_" + re.sub(r"\W", "_", each))
        for each in (version, _minor(version))
    )
    return shared if not os.path.isdir(own) and os.path.isdir(shared) else own


def _minor(version: str) -> str:
    """The minor version: 2.13 for 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


def _fits(built_against: str | None, version: str) -> bool:
    """Whether a build fits this torch: one for this version, or for all of its minor version."""
    return built_against in (version, _minor(version))


def _no_build(version: str, builds: list[str]) -> str:
    """The error message for a torch without native code."""
    if builds and all(build == _minor(build) for build in builds):  # a wheel
        return (
            f"this deepspeed_comm is for torch {', '.join(builds)}, but torch {version} is "
            "installed: install one of those torch versions, or a newer deepspeed_comm, or build "
            f"it with `{rebuild_command()}`."
        )
    if not builds:
        return (
            f"deepspeed_comm in {_PACKAGE} has no native code: build it for torch {version} with "
            f"`{rebuild_command()}`."
        )
    return (
        f"deepspeed_comm was built against {' and '.join(f'torch {build}' for build in builds)}, "
        f"but torch {version} is installed: rebuild it with `{rebuild_command()}`."
    )


def _use_installed_build(version: str) -> None:
    """Uses the native code of an installed package that this folder shadows.

    A program that runs in a clone imports the clone's Python files, although `pip install .` put
    the native code elsewhere. Raises RuntimeError if the Python files of both differ.
    """
    global _native
    for package in _installed_packages():
        native = os.path.join(package, "_native")
        folder = _folder_in(native, version)
        if os.path.realpath(package) == os.path.realpath(_PACKAGE):
            continue
        if not _fits(_torch_of_build(folder), version):
            continue
        if _python_files(package) != _python_files(_PACKAGE):
            raise RuntimeError(
                f"deepspeed_comm in {_PACKAGE} has no native code for torch {version}. The "
                f"installed package {package} has it, but its Python files differ: run in another "
                f"folder to use that, or build the native code with `{rebuild_command()}`."
            )
        _native = native
        sys.modules["deepspeed_comm"].__path__.append(folder)
        return


def _installed_packages() -> Iterator[str]:
    """The folders of all installed deepspeed_comm, in the order of sys.path."""
    import json
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    for distribution in distributions(name="deepspeed_comm"):
        yield str(distribution.locate_file("deepspeed_comm"))
        try:  # PEP 610: the source folder of an editable install
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            continue
        if origin.get("dir_info", {}).get("editable"):
            yield os.path.join(unquote(urlsplit(origin["url"]).path), "deepspeed_comm")


def _python_files(package: str) -> dict[str, bytes]:
    """The contents of a package's Python files, by path in the package, without _native/."""
    from pathlib import Path

    root = Path(package)
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    return {str(path): (root / path).read_bytes() for path in paths if path.parts[0] != "_native"}


def _torch_of_build(folder: str) -> str | None:
    """The torch of the build in this folder, or None without a build."""
    try:
        with open(os.path.join(folder, "_build_info.py")) as record:
            found = re.search(r'^torch_version = "(.*)"$', record.read(), re.MULTILINE)
    except (FileNotFoundError, NotADirectoryError):
        # Other errors, such as too many open files, do not mean that there is no build.
        return None
    return found.group(1) if found else None


def _torches_of_all_builds() -> list[str]:
    try:
        folders = sorted(os.listdir(_native))
    except OSError:
        return []
    versions = (_torch_of_build(os.path.join(_native, folder)) for folder in folders)
    found = [version for version in versions if version is not None]
    return sorted(found, key=lambda version: [int(each) for each in re.findall(r"\d+", version)])


def rebuild_command() -> str:
    """The pip command that builds this package again, for messages."""
    source_tree = os.path.dirname(_PACKAGE)
    pip = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
    if os.path.exists(os.path.join(source_tree, "setup.py")):
        return f"{pip} -e {source_tree}"
    return f"{pip} SOURCE_TREE_OF_DEEPSPEED_COMM"
