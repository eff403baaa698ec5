"""Builds and installs deepspeed_comm: CMake compiles the extension, setuptools packs it.

torch is never a requirement of the build or of the package. pip would answer by fetching another
torch than the one in use, and the extension fits exactly one. It is built against the torch that
the environment's own Python imports, seen also from inside pip's isolated build environment. The
wheels of tools/wheels, which fit several torches, do require one.

The build directory, build/<torch>-<python>, stays between calls, so that a change of one source
file costs the compilation of that file.
"""

from __future__ import annotations

import collections
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TESTED_TORCH = ("1.13.", "2.13.")
# Of tools/wheels: a folder of native code, built for several torches, to be packed as it is.
WHEEL_NATIVE = os.environ.get("DSCOMM_WHEEL_NATIVE")
# Of tools/setup: a terminal to show progress on, as pip hides what a build prints.
PROGRESS_TERMINAL = os.environ.get("DSCOMM_PROGRESS_TERMINAL")
DEBIAN_PACKAGES = "g++ cmake ninja-build pkg-config python3-dev libhwloc-dev libhwy-dev libfmt-dev"

ASK_TORCH = """
import json, os, torch
facts = dict(
    version=str(torch.__version__),
    root=os.path.dirname(os.path.realpath(torch.__file__)),
    cxx11_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
)
print("torch-facts:" + json.dumps(facts))
"""


def ask_torch(environment: dict[str, str]) -> tuple[dict[str, object] | None, str]:
    """Asks a fresh interpreter what torch it imports; answers (facts, "") or (None, why not)."""
    # The autoload of torch's plugins is off: another plugin's fault is no reason not to build.
    environment = dict(environment, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    answer = subprocess.run(
        [sys.executable, "-c", ASK_TORCH],
        env=environment,
        cwd=os.path.dirname(sys.executable),
        capture_output=True,
        text=True,
    )
    for line in answer.stdout.splitlines():
        if line.startswith("torch-facts:"):
            return json.loads(line.removeprefix("torch-facts:")), ""
    error_lines = answer.stderr.strip().splitlines()
    return None, error_lines[-1] if error_lines else f"exit status {answer.returncode}"


@functools.cache
def find_torch() -> dict[str, object]:
    """The torch to build against. Ends with one sentence where there is none."""
    facts, reason = ask_torch(dict(os.environ))
    if facts is None:
        # pip's build isolation hides site-packages through PYTHONPATH alone. Without it, the same
        # interpreter shows the environment that the package is being installed into.
        environment = dict(os.environ)
        for name in ("PYTHONPATH", "PYTHONNOUSERSITE"):
            environment.pop(name, None)
        facts, reason = ask_torch(environment)
    if facts is None:
        raise SystemExit(
            f"deepspeed_comm is built against the torch of its environment, and {sys.executable} "
            f"imports none ({reason}): run `pip install torch==2.13.0` first, then this again."
        )
    if not str(facts["version"]).startswith(TESTED_TORCH):
        print(
            f"deepspeed_comm: torch {facts['version']} has not been tested, 1.13.1 and 2.13 have",
            file=sys.stderr,
        )
    return facts


def torch_tag() -> str:
    """The torch version as a folder name; deepspeed_comm/__init__.py spells it the same way."""
    return "torch_" + re.sub(r"\W", "_", str(find_torch()["version"]))


def build_directory() -> Path:
    return ROOT / "build" / f"{torch_tag()}-{sys.implementation.cache_tag}"


def cpu_count() -> int:
    wish = os.environ.get("MAX_JOBS") or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
    return int(wish) if wish else len(os.sched_getaffinity(0))


def run_tool(command: list[str], what: str) -> None:
    """Runs a build tool, showing its output; a failure ends with its last lines and advice."""
    print("+", " ".join(command), flush=True)
    last_lines: collections.deque[str] = collections.deque(maxlen=30)
    terminal = open(PROGRESS_TERMINAL, "w") if PROGRESS_TERMINAL else None
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise SystemExit(
            f"{what} needs {command[0]}, which was not found: run `apt-get install "
            f"{DEBIAN_PACKAGES}` (or `pip install cmake ninja` for these two alone)."
        ) from None
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        last_lines.append(line)
        if terminal and (step := re.match(r"\[\d+/\d+\]", line)):  # ninja's
            print(f"\r{what}: {step[0]}", end="", file=terminal, flush=True)
    if terminal:
        print("\r\033[K", end="", file=terminal, flush=True)  # clears the line
    if process.wait() == 0:
        return
    raise SystemExit(
        f"{what} failed; its last lines:\n\n{''.join(last_lines)}\n"
        "Most often a package is missing or the build directory is from another machine:\n"
        f"  apt-get install {DEBIAN_PACKAGES}\n"
        f"  rm -r {build_directory()}"
    )


class CMakeBuild(build_ext):
    """Builds _C with CMake and puts it, with its build record, where its torch will look for it."""

    def run(self) -> None:
        if WHEEL_NATIVE:
            for source, destination in self.built_files(self.inplace):
                install_file(source, destination)
            return
        directory = build_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Two builds at once would corrupt each other.
            self.configure(directory)
            run_tool(
                [
                    "cmake",
                    "--build",
                    str(directory),
                    "--target",
                    "python_package",
                    "-j",
                    str(cpu_count()),
                ],
                "Compiling deepspeed_comm",
            )
            for source, destination in self.built_files(self.inplace):
                install_file(source, destination)

    def configure(self, directory: Path) -> None:
        torch = find_torch()
        run_tool(
            [
                "cmake", "-S", str(ROOT), "-B", str(directory), "-G", "Ninja",
                f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
                "-DDSCOMM_TORCH=ON",
                "-DDSCOMM_TESTS=OFF",
                f"-DDSCOMM_TORCH_VERSION={torch['version']}",
                f"-DDSCOMM_TORCH_ROOT={torch['root']}",
                f"-DDSCOMM_TORCH_CXX11_ABI={torch['cxx11_abi']}",
                f"-DPython_EXECUTABLE={sys.executable}",
                *os.environ.get("CMAKE_ARGS", "").split(),
            ],
            "Configuring deepspeed_comm",
        )  # fmt: skip

    def built_files(self, in_place: bool) -> list[tuple[Path, Path]]:
        """(file in the build directory, file in the package), in the source tree or the wheel's."""
        target = (ROOT if in_place else Path(self.build_lib)) / "deepspeed_comm" / "_native"
        if WHEEL_NATIVE:
            native = Path(WHEEL_NATIVE)
            files = sorted(each for each in native.rglob("*") if each.is_file())
            return [(each, target / each.relative_to(native)) for each in files]
        package = build_directory() / "package"
        names = [f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_build_info.py"]
        # Transports between hosts: a text for each, and its module if what it needs was found.
        for text in sorted(package.glob("libdscomm_*.txt")):
            names += [each.name for each in (text, text.with_suffix(".so")) if each.exists()]
        names += [each.name for each in package.glob("dscomm-pmix")]
        return [(package / name, target / torch_tag() / name) for name in names]

    def get_outputs(self) -> list[str]:
        return [str(destination) for _, destination in self.built_files(self.inplace)]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        packed = [destination for _, destination in self.built_files(False)]
        in_tree = [destination for _, destination in self.built_files(True)]
        return {str(target): str(source) for target, source in zip(packed, in_tree, strict=True)}


def install_file(source: Path, destination: Path) -> None:
    """Replaces destination in one step: a process that has the old file mapped keeps that."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}")
    shutil.copyfile(source, temporary)
    shutil.copymode(source, temporary)
    os.replace(temporary, destination)


class BuildPython(build_py):
    """Packs the Python files into an empty folder, so that a wheel holds no file since removed."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Build(build):
    """Keeps setuptools' own files below the build directory: they too depend on the torch."""

    def finalize_options(self) -> None:
        if self.build_base == "build":
            directory = Path(WHEEL_NATIVE).parent if WHEEL_NATIVE else build_directory()
            self.build_base = str(directory / "setuptools")
        super().finalize_options()


def read_version() -> str:
    text = (ROOT / "deepspeed_comm" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


setup(
    name="deepspeed_comm",
    version=read_version(),
    description="A torch.distributed backend for CPU tensors, with the API of deepspeed.comm: "
    "shared memory within a host, MPI between hosts",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="the deepspeed_comm developers",
    keywords=["pytorch", "torch.distributed", "collectives", "shared memory", "mpi", "deepspeed"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["torch", "numpy"] if WHEEL_NATIVE else [],
    packages=find_packages(include=["deepspeed_comm", "deepspeed_comm.*"]),
    package_data={"deepspeed_comm": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("deepspeed_comm._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "build_py": BuildPython},
    entry_points={
        "torch.backends": ["dscomm = deepspeed_comm._plugin:_autoload"],
        # torch 2.14 and later ask here for a backend that they do not know.
        "torch.distributed.backends": ["dscomm = deepspeed_comm._plugin:_register"],
        "console_scripts": ["dscomm = deepspeed_comm.__main__:main"],
    },
    zip_safe=False,
)
