"""The compared peers: how each is fetched and built, and how its ranks are started.

Everything lies below build/peers, which git ignores. An unavailable peer raises Unavailable.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed_comm
from benchmarks.one_host.fetch import Unavailable, debian_packages, run_tool, source, wheels

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "peers"

INTEL_MPI = ("impi-rt==2021.19.0", "impi-devel==2021.19.0")
ONECCL = ("oneccl-devel==2022.2.0", "intel-cmplr-lib-rt==2026.2.0")
DEEPSPEED = "deepspeed==0.19.8"
VLLM = "vllm==0.33.0"
MPICH = ("mpich", "libmpich12", "libmpich-dev", "libslurm38")

# The flags of a rank.
Flags = Callable[[int], list[str]]


@dataclasses.dataclass
class Peer:
    """Ready to run. `commands` returns the commands to start, from the ranks' flags and number."""

    version: str
    commands: Callable[[Flags, int], list[list[str]]]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    folder: Path = ROOT  # in which it runs


def one_process_per_rank(*program: str) -> Callable[[Flags, int], list[list[str]]]:
    return lambda flags, ranks: [[*program, *flags(rank)] for rank in range(ranks)]


def one_launcher(*launcher: str, program: Path) -> Callable[[Flags, int], list[list[str]]]:
    """mpiexec, with separate flags for each rank."""

    def commands(flags: Flags, ranks: int) -> list[list[str]]:
        command = list(launcher)
        for rank in range(ranks):
            command += [*([":"] if rank else []), "-n", "1", str(program), *flags(rank)]
        return [command]

    return commands


def compiled(name: str, sources: list[Path], *flags: str) -> Path:
    """The program, compiled again if a source of ours is newer."""
    program = FOLDER / "bin" / name
    newest = max(file.stat().st_mtime for file in [*sources, *HERE.glob("*.h")])
    if program.exists() and program.stat().st_mtime > newest:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++20", "-O3", "-march=native", *map(str, sources)]
    run_tool([*command, *flags, "-o", str(program)], f"compiling {name}")
    return program


@functools.cache
def own_programs(root: Path = ROOT) -> Path:
    """The folder of one_host_dscomm and one_host_probe of this checkout, built by CMake."""
    build = root / "build" / "release"
    run_tool(["cmake", "--preset", "release", "-DDSCOMM_BENCHMARKS=ON"], "CMake", folder=root)
    targets = ["--target", "one_host_dscomm", "one_host_probe"]
    jobs = str(len(os.sched_getaffinity(0)))
    run_tool(["cmake", "--build", str(build), "-j", jobs, *targets], "building dscomm")
    return build


def dscomm(*options: str) -> Peer:
    program = str(own_programs() / "one_host_dscomm")
    version = f"deepspeed_comm {deepspeed_comm.__version__}"
    return Peer(version, one_process_per_rank(program, *options))


def through_torch(backend: str, python: str = sys.executable, root: Path = ROOT) -> Peer:
    """The calls of programs in Python: torch.distributed, and for dscomm also the direct call."""
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return Peer(
        f"torch {importlib.metadata.version('torch')}",
        one_process_per_rank(python, "-m", "benchmarks.one_host.torch_rank", backend),
        {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path},
        root,
    )


def in_checkout(root: Path, name: str) -> Peer:
    """The peer dscomm, pool or torch of another checkout, in which `make setup` has run."""
    if name == "torch":
        return through_torch("dscomm", str(root / ".venv" / "bin" / "python"), root)
    options = ("--memory", "pool") if name == "pool" else ()
    program = str(own_programs(root) / "one_host_dscomm")
    version = run_tool(["git", "describe", "--always", "--dirty"], "git", folder=root).strip()
    return Peer(version, one_process_per_rank(program, *options), folder=root)


def open_mpi() -> Peer:
    compiler, launcher = shutil.which("mpicxx.openmpi"), shutil.which("mpiexec.openmpi")
    if compiler is None or launcher is None:
        raise Unavailable("libopenmpi-dev and openmpi-bin of Debian are not installed")
    flags = [
        word
        for kind in ("compile", "link")
        for word in run_tool([compiler, f"--showme:{kind}"], "mpicxx.openmpi").split()
    ]
    program = compiled("open_mpi", [HERE / "mpi_rank.cc"], "-DOMPI_SKIP_MPICXX", *flags)
    # Ranks bind themselves.
    options = ("--oversubscribe", "--bind-to", "none")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    version = run_tool([launcher, "--version"], launcher).splitlines()[0]
    return Peer(version, one_launcher(launcher, *options, program=program), root)


def mpich() -> Peer:
    """Debian's, unpacked and not installed, because it and Open MPI share names of commands."""
    root = debian_packages(FOLDER / "mpich", *MPICH)
    library = next(root.glob("usr/lib/*/libmpich.so.12"), None)
    headers = next(root.glob("usr/include/*/mpich"), None)
    if library is None or headers is None:
        raise Unavailable("Debian's packages of MPICH do not have what they had")
    program = compiled(
        "mpich",
        [HERE / "mpi_rank.cc"],
        "-DMPICH_SKIP_MPICXX", f"-I{headers}", str(library), f"-Wl,-rpath,{library.parent}",
    )  # fmt: skip
    launcher = str(root / "usr" / "bin" / "mpiexec.hydra")
    return Peer(
        f"MPICH, {library.resolve().name}",
        one_launcher(launcher, "-launcher", "fork", "-bind-to", "none", program=program),
        {"LD_LIBRARY_PATH": str(library.parent)},
    )


def _intel_mpi() -> tuple[Path, list[str], dict[str, str], str]:
    """Its root, flags for the compiler, its environment, and its launcher."""
    root = wheels(FOLDER / "intel_mpi", *INTEL_MPI)
    libraries = root / "lib"
    flags = [f"-I{root / 'include'}", str(libraries / "libmpi.so.12"), f"-Wl,-rpath,{libraries}"]
    # Shared memory alone: networks would need libfabric. Ranks bind themselves.
    environment = {"I_MPI_ROOT": str(root), "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
    return root, ["-DMPICH_SKIP_MPICXX", *flags], environment, str(root / "bin" / "mpiexec.hydra")


def intel_mpi() -> Peer:
    _, flags, environment, launcher = _intel_mpi()
    program = compiled("intel_mpi", [HERE / "mpi_rank.cc"], *flags)
    commands = one_launcher(launcher, "-launcher", "fork", program=program)
    return Peer(INTEL_MPI[0], commands, environment)


def oneccl() -> Peer:
    """Over Intel MPI, and without oneCCL's worker thread, which would take another core."""
    _, of_mpi, environment, launcher = _intel_mpi()
    root = wheels(FOLDER / "oneccl", *ONECCL)
    # The static library for CPUs: the shared one needs the runtime of SYCL.
    program = compiled(
        "oneccl",
        [HERE / "oneccl_rank.cc"],
        f"-I{root / 'include'}", str(root / "lib/ccl/cpu/lib/libccl.a"), *of_mpi,
        str(root / "lib/libintlc.so.5"), f"-Wl,-rpath,{root / 'lib'}", "-lhwloc", "-ldl",
    )  # fmt: skip
    wanted = {"CCL_WORKER_OFFLOAD": "0", "CCL_ATL_TRANSPORT": "mpi", "CCL_LOG_LEVEL": "error"}
    commands = one_launcher(launcher, "-launcher", "fork", program=program)
    return Peer(ONECCL[0], commands, environment | wanted)


def _torch_flags() -> list[str]:
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise Unavailable(f"it is compiled against torch: {error}") from None
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in library_paths()),
        *(f"-Wl,-rpath,{path}" for path in library_paths()),
        *("-fopenmp", "-ltorch_cpu", "-lc10"),
    ]


def _needs(feature: str) -> None:
    text = Path("/proc/cpuinfo").read_text()
    if feature not in text.split():
        raise Unavailable(f"its kernels need {feature}, which this processor does not have")


def deepspeed() -> Peer:
    _needs("avx512bw")
    folder = source(FOLDER / "deepspeed", DEEPSPEED, "csrc/cpu/comm") / "csrc/cpu/comm"
    # DeepSpeed includes torch's header for extensions of Python, and uses only types.
    stand_in = FOLDER / "without_python" / "torch" / "extension.h"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text("#include <torch/types.h>\n")
    program = compiled(
        "deepspeed",
        [HERE / "deepspeed_rank.cc", folder / "shm.cpp"],
        f"-I{stand_in.parents[1]}", f"-I{folder}", *_torch_flags(),
    )  # fmt: skip
    return Peer(DEEPSPEED, one_process_per_rank(str(program)), {"OMP_NUM_THREADS": "1"})


def vllm() -> Peer:
    _needs("avx512bw")
    folder = source(FOLDER / "vllm", VLLM, "csrc/cpu") / "csrc"
    program = compiled(
        "vllm",
        [HERE / "vllm_rank.cc", folder / "cpu" / "shm.cpp"],
        f"-I{folder}", *_torch_flags(),
    )  # fmt: skip
    return Peer(VLLM, one_process_per_rank(str(program)), {"OMP_NUM_THREADS": "1"})


# By the names of --peers, in the order of a round. "torch" is dscomm through torch, in two ways.
PEERS: dict[str, Callable[[], Peer]] = {
    "dscomm": dscomm,
    "pool": functools.partial(dscomm, "--memory", "pool"),
    "torch": functools.partial(through_torch, "dscomm"),
    "gloo": functools.partial(through_torch, "gloo"),
    "openmpi": open_mpi,
    "mpich": mpich,
    "intelmpi": intel_mpi,
    "oneccl": oneccl,
    "deepspeed": deepspeed,
    "vllm": vllm,
}
# dscomm in three ways. With --before, those of another checkout have this prefix.
OURS = ("dscomm", "pool", "torch")
BEFORE = "before "
# The peers with messages, in the order of a round.
OF_MESSAGES = ("dscomm", "pool", "torch", "gloo", "openmpi", "mpich", "intelmpi")
TITLES = {
    "pool": "dscomm pool",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "oneccl": "oneCCL",
    "deepspeed": "DeepSpeed",
    "vllm": "vLLM",
}


def kind_of(name: str) -> str:
    """The key of PEERS and TITLES: "torch" of "before torch"."""
    return name.removeprefix(BEFORE)


def title_of(name: str) -> str:
    """The column: "dscomm pool" of "pool", "before dscomm pool" of "before pool"."""
    prefix = BEFORE if name.startswith(BEFORE) else ""
    return prefix + TITLES.get(kind_of(name), kind_of(name))
