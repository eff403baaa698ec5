"""The doctor: a sound host has no problem; what is broken on purpose is named, with what to do."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_comm
from deepspeed_comm import _machine
from deepspeed_comm._launcher_variables import spans_hosts
from deepspeed_comm._plugin import native_folder
from deepspeed_comm.doctor import child, host, installation, job, mpi, report
from deepspeed_comm.doctor.checks import CHECKS, examine
from deepspeed_comm.doctor.examination import Examination, MpiLibrary
from deepspeed_comm.doctor.report import Finding, Outcome

PACKAGE = Path(deepspeed_comm.__file__).parent
HAS_MPI = Path(native_folder(torch.__version__), "libdscomm_openmpi.so").exists()
HAS_MPICH = Path(native_folder(torch.__version__), "libdscomm_mpich.so").exists()
OUTCOMES = {"ok", "warning", "problem"}
# Above what a loaded machine needs for a whole run.
RUN_LIMIT_S = 300
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MPI_", "DSCOMM_")


def bare_environment(**variables: str) -> dict[str, str]:
    """Without a launcher's variables and settings, and with these."""
    rest = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join(filter(None, [rest.get("PYTHONPATH"), str(PACKAGE.parent)]))
    return {**rest, "PYTHONPATH": path, **variables}


def in_front(name: str, folder: Path) -> str:
    """A search path with this folder before what it has, for a new process."""
    return os.pathsep.join(filter(None, [str(folder), bare_environment().get(name)]))


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    return monkeypatch


def doctor(
    *options: str, folder: Path | None = None, prefix: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs it as a user does."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "deepspeed_comm.doctor", *options],
        cwd=folder,
        env=bare_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )


def read(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The checks of --json by name, once the whole has been looked at."""
    assert "Traceback" not in result.stderr, result.stderr
    whole = json.loads(result.stdout)
    assert set(whole) == {"schema", "deepspeed_comm", "host", "outcome", "checks"}
    assert whole["schema"] == report.SCHEMA
    assert whole["deepspeed_comm"] == deepspeed_comm.__version__
    assert [check["name"] for check in whole["checks"]] == list(CHECKS)
    order = ["ok", "warning", "problem"]
    for check in whole["checks"]:
        assert set(check) == {"name", "outcome", "found", "troubles", "facts"}
        assert isinstance(check["facts"], dict)
        assert all(isinstance(text, str) and text for text in check["found"])
        for trouble in check["troubles"]:
            assert set(trouble) == {"outcome", "wrong", "advice"}
            assert trouble["outcome"] in ("warning", "problem")
            assert trouble["wrong"] and trouble["advice"]
        outcomes = [trouble["outcome"] for trouble in check["troubles"]]
        assert check["outcome"] == max(outcomes, default="ok", key=order.index)
    outcomes = [check["outcome"] for check in whole["checks"]]
    assert whole["outcome"] == max(outcomes, key=order.index)
    assert result.returncode == (1 if "problem" in outcomes else 0)
    return {check["name"]: check for check in whole["checks"]}


def look(name: str, limit_s: float = 60.0, hosts: bool = True) -> Finding:
    """One check, in this process."""
    [finding] = examine(limit_s, {name: CHECKS[name]}, hosts)
    return finding


def troubles(finding: Finding) -> str:
    return "\n".join(f"{each.outcome.word}: {each.wrong}" for each in finding.troubles)


# --- whole runs


def test_checks_of_sound_host_are_ok() -> None:
    checks = read(doctor("--json"))
    for name in ("versions", "extension", "settings", "sharing", "two ranks"):
        assert checks[name]["outcome"] == "ok", checks[name]
    assert checks["versions"]["facts"]["torch"] == str(torch.__version__)
    assert checks["extension"]["facts"]["build"]["torch_version"] == str(torch.__version__)
    assert Path(checks["extension"]["facts"]["path"]).is_relative_to(PACKAGE)
    assert checks["instruction set"]["facts"]["target"]
    assert checks["processors"]["facts"]["cpus"] == sorted(os.sched_getaffinity(0))
    assert checks["memory"]["facts"]["available_bytes"] > 0
    assert checks["two ranks"]["facts"]["steps"] == ["destroy_process_group"] * 2
    is_plugin = checks["extension"]["facts"]["is_plugin"]
    assert checks["two ranks"]["facts"]["imported"] is not is_plugin
    if HAS_MPI:
        facts = checks["MPI"]["facts"]
        assert checks["MPI"]["outcome"] == checks["PMIx helper"]["outcome"] == "ok", checks["MPI"]
        assert facts["version"].startswith("Open MPI") and facts["thread_level"] == 3
        assert os.path.exists(facts["library"])
    else:
        assert checks["MPI"]["outcome"] == "warning"


def test_all_mistaken_settings_are_named() -> None:
    """All of them are named, though the core names one at a time; as text, with exit status 1."""
    result = doctor(DSCOMM_TIMEOUT="3", DSCOMM_SPIN_PAUSE="5", DSCOMM_YIELD_US="soon")
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    [first] = [line for line in lines if line.startswith("problem  settings: ")]
    assert "DSCOMM_TIMEOUT=3" in first
    for mistake in (
        "problem: DSCOMM_TIMEOUT is not a setting of dscomm; did you mean DSCOMM_",
        "problem: DSCOMM_SPIN_PAUSE is not a setting of dscomm; did you mean DSCOMM_SPIN_PAUSES?",
        "problem: DSCOMM_YIELD_US=soon: expected a whole number from 0 to 1000000",
    ):
        assert sum(mistake in line for line in lines if "rank" not in line) == 1, result.stdout
    # What the ranks of a job would say.
    assert "problem: rank 0, at init_process_group: ended with status 1" in result.stdout
    assert "problem: rank 1, at init_process_group: ended with status 1" in result.stdout
    assert lines[-1].endswith(" ok") and " problems, " in lines[-1]
    assert "\x1b" not in result.stdout and "Traceback" not in result.stdout + result.stderr


def test_checks_beyond_time_limit_are_problems() -> None:
    """No wait without end: what runs in a process is ended at the limit, and that is said."""
    checks = read(doctor("--json", "--limit", "0.05"))
    for name in ("versions", "extension", "two ranks"):
        assert checks[name]["outcome"] == "problem"
        assert "did not end in time" in checks[name]["troubles"][0]["wrong"]
    assert checks["sharing"]["outcome"] != "problem"


def test_terminal_output_is_styled_if_rich_is_installed() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "deepspeed_comm.doctor", "--limit", "0.05"],
        env=bare_environment(TERM="xterm", COLUMNS="100"),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # how the end of a terminal is told
            pass
        finally:
            os.close(ours)
        assert process.wait(RUN_LIMIT_S) == 1, output
    text = output.decode()
    assert "two ranks" in text and "did not end in time" in text and "Traceback" not in text
    assert ("\x1b[" in text) == (importlib.util.find_spec("rich") is not None)


@pytest.mark.parametrize("options", [("--nonsense",), ("--limit", "-1"), ("--limit", "soon")])
def test_invalid_options_print_usage(options: tuple[str, ...]) -> None:
    result = doctor(*options)
    assert (result.returncode, result.stdout) == (2, "")
    assert "usage: dscomm doctor" in result.stderr


# --- what is installed


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the package's Python files, and no native code."""
    ignored = shutil.ignore_patterns("_native", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "deepspeed_comm", ignore=ignored)
    return tmp_path


def add_build(folder: Path, built_against: str, native_code: bytes) -> None:
    native = folder / "deepspeed_comm/_native" / Path(native_folder(torch.__version__)).name
    native.mkdir(parents=True)
    (native / "_build_info.py").write_text(f'torch_version = "{built_against}"\n')
    (native / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(native_code)


def broken(copy: Path) -> dict[str, dict[str, Any]]:
    checks = read(doctor("--json", folder=copy, PYTHONPATH=in_front("PYTHONPATH", copy)))
    assert checks["versions"]["facts"]["deepspeed_comm_folder"] == str(copy / "deepspeed_comm")
    assert checks["extension"]["outcome"] == checks["two ranks"]["outcome"] == "problem"
    assert "deepspeed_comm" in checks["two ranks"]["troubles"][0]["wrong"]
    # What could not be looked at is no success.
    assert checks["instruction set"]["outcome"] == checks["MPI"]["outcome"] == "warning"
    return checks


def test_missing_native_code_is_a_problem(copy: Path) -> None:
    with (copy / "deepspeed_comm/comm.py").open("a") as file:
        file.write("# not as installed\n")
    [trouble] = broken(copy)["extension"]["troubles"]
    assert f"{copy}/deepspeed_comm has no native code" in trouble["wrong"]
    assert str(PACKAGE) in trouble["wrong"] and "pip install" in trouble["wrong"]


def test_copy_without_native_code_uses_installed_package(copy: Path) -> None:
    checks = read(doctor("--json", folder=copy, PYTHONPATH=in_front("PYTHONPATH", copy)))
    assert checks["versions"]["facts"]["deepspeed_comm_folder"] == str(copy / "deepspeed_comm")
    assert checks["extension"]["outcome"] == "ok"
    assert checks["extension"]["facts"]["path"].startswith(f"{PACKAGE}/_native/")
    assert checks["extension"]["facts"]["build"]["torch_version"] == str(torch.__version__)


def test_native_code_for_another_torch_is_a_problem(copy: Path) -> None:
    add_build(copy, "9.9.9", b"")
    [trouble] = broken(copy)["extension"]["troubles"]
    assert (
        f"built against torch 9.9.9, but torch {torch.__version__} is installed" in trouble["wrong"]
    )


def test_broken_native_code_is_a_problem(copy: Path) -> None:
    add_build(copy, str(torch.__version__), b"no shared library")
    [trouble] = broken(copy)["extension"]["troubles"]
    assert "cannot be loaded" in trouble["wrong"]


@pytest.mark.parametrize(
    ("torch_source", "shown"),
    [
        ("raise ImportError('broken on purpose')", "broken on purpose"),
        ("raise OSError('broken on purpose')", "broken on purpose"),
        # As torch does where another package's plugin fails.
        ("raise RuntimeError('broken on purpose')", "broken on purpose"),
        ("import os; os.abort()", "SIGABRT"),
        ("import time; time.sleep(1000)", "did not end in time"),
    ],
)
def test_torch_that_cannot_be_imported_is_a_problem(
    tmp_path: Path, torch_source: str, shown: str
) -> None:
    (tmp_path / "torch.py").write_text(torch_source)
    path = in_front("PYTHONPATH", tmp_path)
    checks = read(doctor("--json", "--limit", "3", PYTHONPATH=path))
    for name in ("versions", "extension"):
        assert shown in checks[name]["troubles"][0]["wrong"]
    assert checks["sharing"]["outcome"] != "problem"


def test_instruction_set_below_that_of_cpu_is_reported(bare: pytest.MonkeyPatch) -> None:
    facts = {"target": "SSE2", "torch": "2"}
    bare.setattr(Examination, "extension", child.Answer(facts, "", ""))
    bare.setattr("deepspeed_comm.doctor.installation._best_target", lambda: "AVX2")
    assert "supports AVX2" in troubles(look("instruction set"))
    bare.setattr("deepspeed_comm.doctor.installation._best_target", lambda: "SSE2")
    assert look("instruction set").outcome is Outcome.OK


# --- the host


def look_under(prelude: str, name: str) -> dict[str, Any]:
    """One check in a process of its own, after this has been done there."""
    program = (
        f"import json, resource\nfrom deepspeed_comm.doctor.checks import CHECKS, examine\n"
        "from deepspeed_comm.doctor.examination import Examination\n"
        "Examination.transport_file = ''\n"
        f"{prelude}\n"
        f"[finding] = examine(60, {{{name!r}: CHECKS[{name!r}]}})\n"
        "print(json.dumps(finding.as_json()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize(
    ("limit", "outcome", "words"),
    [
        ("RLIMIT_FSIZE, 512 << 10", "problem", "leaves 512.0 KiB for shared memory"),
        ("RLIMIT_FSIZE, 64 << 20", "warning", "leaves 64.0 MiB for a rank's shared memory"),
        ("RLIMIT_AS, 12 << 30", "warning", "of DSCOMM_ARENA_BYTES"),
    ],
)
def test_low_memory_ulimits_are_reported(limit: str, outcome: str, words: str) -> None:
    which, value = limit.split(", ")
    prelude = f"_, hard = resource.getrlimit(resource.{which})\n"
    prelude += f"resource.setrlimit(resource.{which}, ({value}, hard))"
    answer = look_under(prelude, "memory")
    assert answer["outcome"] == outcome
    assert any(words in each["wrong"] for each in answer["troubles"]), answer


def test_low_descriptor_ulimit_is_a_problem() -> None:
    """A whole run under the limit: it says so, and raises nowhere."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    checks = read(doctor("--json", prefix=("prlimit", f"--nofile=16:{hard}")))
    [trouble] = checks["descriptors"]["troubles"]
    assert trouble["outcome"] == "problem" and "ulimit -n" in trouble["advice"]
    assert checks["descriptors"]["facts"]["soft"] == 16


@pytest.mark.parametrize(
    ("soft", "hard", "outcome", "advice"),
    [
        (16, 64, Outcome.PROBLEM, "have the hard limit raised to"),
        (128, 4096, Outcome.WARNING, "raise the limit: ulimit -n"),
        (4096, 4096, Outcome.OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Outcome.OK, ""),
    ],
)
def test_advice_follows_soft_and_hard_descriptor_limits(
    bare: pytest.MonkeyPatch, soft: int, hard: int, outcome: Outcome, advice: str
) -> None:
    bare.setenv("LOCAL_WORLD_SIZE", "4")
    bare.setattr(resource, "getrlimit", lambda which: (soft, hard))
    finding = look("descriptors")
    assert finding.outcome is outcome
    assert advice in "".join(trouble.advice for trouble in finding.troubles)


def test_defaults_match_settings_of_the_engine() -> None:
    table = Path(__file__).resolve().parents[2] / "csrc" / "core" / "base" / "settings.h"
    defaults = dict(re.findall(r'"(DSCOMM_\w+)",\s*(\d+)', table.read_text()))
    assert defaults["DSCOMM_STAGING_BYTES"] == str(host._STAGING_BYTES)
    assert defaults["DSCOMM_STAGING_CHUNK_BYTES"] == str(host._CHUNK_BYTES)
    assert defaults["DSCOMM_ARENA_BYTES"] == str(host._ARENA_BYTES)


def test_doctor_reports_too_little_memory_with_needed_bytes(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(Examination, "transport_file", "")
    bare.setattr(host, "memory_room", lambda: host.Room(1 << 20, "memory.max of /job"))
    finding = look("memory")
    assert "2 ranks need 21.0 MiB" in troubles(finding)
    assert finding.found[0] == "1.0 MiB available, limited by memory.max of /job"
    bare.setenv("LOCAL_WORLD_SIZE", "4")
    bare.setenv("DSCOMM_STAGING_CHUNK_BYTES", str(2 << 20))
    assert "4 ranks need 48.0 MiB" in troubles(look("memory"))


def test_failing_memfd_create_is_a_problem(bare: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    bare.setattr(Examination, "transport_file", "")
    bare.setattr(os, "memfd_create", refuse)
    finding = look("memory")
    assert "problem: memfd_create fails: Operation not permitted" in troubles(finding)


def test_little_locked_memory_is_a_warning_with_a_fast_adapter(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    for adapters, outcome in (([], Outcome.OK), (["mlx5_0"], Outcome.WARNING)):
        bare.setattr(host, "fast_adapters", lambda adapters=adapters: adapters)
        finding = Finding("memory")
        host._check_locked_memory(finding)
        assert finding.outcome is outcome, finding
    assert "(ulimit -l) is 64.0 KiB, and MPI locks its data on mlx5_0" in troubles(finding)


def make_cgroups(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def cgroups(bare: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A made-up tree, in which this process is in /job/step of v2 and in /v1 of v1."""
    membership = "0::/job/step\n3:memory:/v1\n4:cpu,cpuacct:/v1\n"
    actual = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if str(path) == "/proc/self/cgroup":
            return membership
        return actual(path, *arguments, **options)

    bare.setattr(host, "_CGROUPS", tmp_path)
    bare.setattr(Path, "read_text", read_text)
    yield tmp_path


def test_available_memory_follows_cgroup_limits(cgroups: Path) -> None:
    statistics = "anon 5\ninactive_file 100\ntotal_inactive_file 40\n"
    make_cgroups(
        cgroups,
        {
            "job/memory.max": "5000",
            "job/memory.current": "1000",
            "job/memory.stat": statistics,
            "job/step/memory.max": "max",
            "job/step/memory.current": "10",
            "job/step/memory.stat": statistics,
        },
    )
    assert host.memory_room() == host.Room(4100, f"memory.max of {cgroups / 'job'}")
    make_cgroups(
        cgroups,
        {
            "memory/v1/memory.limit_in_bytes": "3000",
            "memory/v1/memory.usage_in_bytes": "30",
            "memory/v1/memory.stat": statistics,
        },
    )
    # Of what is used, no more can be dropped than is.
    assert host.memory_room().available_bytes == 3000
    assert host.memory_room().limit == f"memory.limit_in_bytes of {cgroups / 'memory/v1'}"


def test_cpu_quota_follows_cgroup_limits(cgroups: Path) -> None:
    assert math.isinf(host.cpu_quota())
    make_cgroups(cgroups, {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"})
    assert host.cpu_quota() == 1.5
    make_cgroups(
        cgroups,
        {
            "cpu,cpuacct/v1/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/v1/cpu.cfs_period_us": "100000",
        },
    )
    assert host.cpu_quota() == 0.5


def test_threads_of_a_core_count_once(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(_machine, "_siblings", lambda cpu: "" if cpu == 9 else f"{cpu // 2}")
    assert _machine.core_count({0, 1, 2, 9}) == 3
    assert _machine.ranges([0, 1, 2, 5, 8, 9]) == "0-2,5,8-9"


def test_more_ranks_than_cores_is_a_warning(bare: pytest.MonkeyPatch) -> None:
    assert look("processors").outcome is Outcome.OK
    bare.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "100000")
    finding = look("processors")
    assert finding.outcome is Outcome.WARNING
    assert "100000 ranks share" in troubles(finding)


def test_forbidden_sockets_are_a_problem(bare: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    bare.setattr(host.socket, "socket", refuse)
    assert "problem: abstract Unix sockets fail" in troubles(look("sharing"))
    bare.undo()
    bare.delattr(os, "pidfd_open")
    assert look("sharing").outcome is Outcome.WARNING


# --- the job


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({}, ""),
        (dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "1"}, ""),
        ({"RANK": "x"}, "problem: RANK=x is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "problem: RANK=2 is not in a world of 2"),
        ({"MASTER_PORT": "70000"}, "problem: MASTER_PORT=70000 is not a port"),
        ({"WORLD_SIZE": "2"}, "warning: not set: RANK, MASTER_ADDR (set: WORLD_SIZE)"),
        (
            {"MASTER_ADDR": "no.such.invalid"},
            "problem: MASTER_ADDR=no.such.invalid cannot be resolved",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "warning: PMI does not name rank 0's host"),
    ],
)
def test_mistaken_launcher_variables_are_reported(
    bare: pytest.MonkeyPatch, variables: dict[str, str], wrong: str
) -> None:
    for name, text in variables.items():
        bare.setenv(name, text)
    finding = look("launcher")
    assert wrong in troubles(finding) if wrong else not finding.troubles, finding
    assert set(finding.facts["given"]) == set(variables) - {"PMI_RANK", "PMI_SIZE"}


def test_rank_of_mpirun_is_shown(bare: pytest.MonkeyPatch) -> None:
    for name, text in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_SIZE", "4")):
        bare.setenv(f"OMPI_COMM_WORLD_{name}", text)
    finding = look("launcher")
    assert finding.found == ["mpirun: rank 1 of 4, rank 0's host 127.0.0.1"]
    assert (finding.outcome, finding.facts["rank"]) == (Outcome.OK, 1)


def test_ifname_that_matches_no_network_is_a_problem(bare: pytest.MonkeyPatch) -> None:
    interfaces = job.own_interfaces()
    assert all(not network.startswith("127.") for _, network in interfaces)
    bare.setattr(job, "own_interfaces", lambda: [("eth0", "10.1.2.3/16")])
    for wanted in ("", "eth0", "10.1.2.0/24", "10.1.2.3/32", "eth0,10.0.0.0/8"):
        bare.setenv("DSCOMM_IFNAME", wanted)
        assert look("networks").outcome is Outcome.OK, wanted
    for wanted in ("eth1", "10.2.0.0/16", "10.1.2.3", "eth0,none"):
        bare.setenv("DSCOMM_IFNAME", wanted)
        [trouble] = look("networks").troubles
        assert trouble.outcome is Outcome.PROBLEM
        assert f"'{wanted.split(',')[-1]}' is neither" in trouble.wrong
        assert "eth0 (10.1.2.3/16)" in trouble.advice


# What the doctor reads by itself is compared with what that program says; make setup installs it.
@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_own_interfaces_match_output_of_ip() -> None:
    shown = json.loads(subprocess.check_output(["ip", "-json", "-4", "address", "show", "up"]))
    theirs = {
        (each["ifname"], f"{address['local']}/{address['prefixlen']}")
        for each in shown
        for address in each.get("addr_info", [])
        if "LOOPBACK" not in each["flags"] and "NO-CARRIER" not in each["flags"]
    }
    assert set(job.own_interfaces()) == theirs


@pytest.mark.parametrize(
    ("variables", "spans"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, False),
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}, False),
        ({"SLURM_NNODES": "2"}, True),
    ],
)
def test_job_across_hosts_is_recognised(variables: dict[str, str], spans: bool) -> None:
    assert spans_hosts(variables) is spans


# --- the plugin and the folders


@pytest.mark.parametrize(
    ("torch_numbers", "autoload", "installed", "known"),
    [
        ((2, 13), None, True, True),
        ((2, 13), "0", True, False),
        ((2, 13), None, False, False),
        ((2, 14), "0", True, True),
        ((2, 14), None, False, False),
        ((1, 13), None, True, False),
    ],
)
def test_backend_found_by_torch_itself_is_recognised(
    bare: pytest.MonkeyPatch,
    torch_numbers: tuple[int, ...],
    autoload: str | None,
    installed: bool,
    known: bool,
) -> None:
    found = ["an entry point"] if installed else []
    bare.setattr(installation, "entry_points", lambda group, name: found)
    environment = {} if autoload is None else {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    assert installation.is_plugin(torch_numbers, environment) is known


def test_plugins_switched_off_are_a_warning(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    finding = look("extension")
    if torch.__version__.startswith("1."):
        assert finding.outcome is Outcome.OK, finding
        assert any("has no plugins: programs must import" in text for text in finding.found), (
            finding
        )
        return
    assert finding.outcome is Outcome.WARNING, finding
    assert "warning: TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch loads no plugins" in troubles(finding)
    assert "import deepspeed_comm before init_process_group()" in finding.troubles[0].advice


def test_folders_that_cannot_be_used_are_named(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert look("folders").outcome is Outcome.OK
    bare.setenv("TMPDIR", str(tmp_path / "gone"))
    bare.setenv("HOME", str(tmp_path / "nowhere"))
    finding = look("folders")
    assert f"problem: {tmp_path / 'gone'}, the folder for temporary files" in troubles(finding)
    assert f"warning: HOME={tmp_path / 'nowhere'} is not readable" in troubles(finding)


# --- MPI


# Without MPI there is nothing to load; make setup builds with it.
@pytest.mark.skipif(not HAS_MPI, reason="this build has no MPI")
def test_broken_mpi_library_is_a_problem_only_across_hosts(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libmpi.so.40").write_bytes(b"no shared library")
    bare.setenv("LD_LIBRARY_PATH", in_front("LD_LIBRARY_PATH", tmp_path))
    finding = look("MPI")
    assert "problem: Open MPI cannot be loaded" in troubles(finding), finding
    assert "libmpi.so.40" in troubles(finding)
    assert "LD_LIBRARY_PATH" in finding.troubles[0].advice
    # Groups of one host do without.
    finding = look("MPI", hosts=False)
    assert "warning: Open MPI cannot be loaded" in troubles(finding), finding


# Without MPI there is nothing to load; make setup builds with it.
@pytest.mark.skipif(not HAS_MPI, reason="this build has no MPI")
def test_mpi_check_leaves_no_temporary_files(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setattr("tempfile.tempdir", str(tmp_path))
    # As if mpirun had started this process: the probe must not get its variables.
    bare.setenv("OMPI_COMM_WORLD_RANK", "3")
    bare.setenv("PMIX_RANK", "3")
    finding = look("MPI")
    assert finding.outcome is Outcome.OK, finding
    assert list(tmp_path.iterdir()) == []


GOOD_MPI = {"library": "/lib/libmpi.so.40", "version": "Open MPI v4.1.4, package: Debian"}


@pytest.mark.parametrize(
    ("facts", "ended", "wrong"),
    [
        ({}, "ended with status 1", "problem: Open MPI cannot be loaded (ended with status 1"),
        (GOOD_MPI | {"version": "MPICH 4\nMore"}, "", "problem: this is not Open MPI"),
        (GOOD_MPI, "did not end in time", "problem: MPI_Init_thread does not return (did not"),
        (GOOD_MPI, "was ended by SIGSEGV", "problem: MPI_Init_thread ends its process (was ended"),
        (GOOD_MPI | {"init_code": 16, "thread_level": -1}, "", "fails with code 16"),
        (GOOD_MPI | {"init_code": 0, "thread_level": 1}, "", "needs MPI_THREAD_MULTIPLE"),
        (GOOD_MPI | {"init_code": 0, "thread_level": 3}, "was ended by SIGSEGV", "MPI_Finalize"),
        (GOOD_MPI | {"init_code": 0, "thread_level": 3}, "", ""),
    ],
)
def test_mpi_probe_failures_are_reported(facts: dict[str, Any], ended: str, wrong: str) -> None:
    finding = Finding("MPI")
    library = MpiLibrary("openmpi", "Open MPI", "headers", "libraries")
    mpi._judge(finding, child.Answer(facts, ended, ""), library)
    assert len(finding.troubles) == bool(wrong)
    assert wrong in troubles(finding)


def test_examined_mpi_follows_setting_and_build(bare: pytest.MonkeyPatch) -> None:
    for built, wanted, setting in (
        ({"libdscomm_openmpi.so", "libdscomm_mpich.so"}, "auto", "openmpi"),
        ({"libdscomm_openmpi.so", "libdscomm_mpich.so"}, "mpich", "mpich"),
        ({"libdscomm_mpich.so"}, "auto", "mpich"),
        ({"libdscomm_mpich.so"}, "openmpi", "openmpi"),
        (set(), "auto", "openmpi"),
    ):
        bare.setenv("DSCOMM_MPI", wanted)
        bare.setattr(
            Examination, "_built", lambda _, file, built=built: file if file in built else ""
        )
        assert Examination(1).mpi.setting == setting, (built, wanted)


def test_mpich_setting_is_ok_if_built_with_mpich(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("DSCOMM_MPI", "mpich")
    finding = look("MPI")
    if not HAS_MPICH:
        assert "need an MPI, and this build has no MPICH" in troubles(finding), finding
        return
    assert finding.outcome is Outcome.OK, finding
    assert any(text.startswith("built with MPICH 5") for text in finding.found), finding
    assert "ranks start MPICH by themselves" in look("PMIx helper").found[0]


def test_mpi_environment_keeps_user_but_no_launcher_variables() -> None:
    users = {"OMPI_MCA_btl": "tcp,self", "PMIX_MCA_gds": "hash", "PATH": "/bin"}
    launchers = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_MCA_orte_hnp_uri": "x", "OMPI_MCA_ess": "pmi",
        "PMIX_NAMESPACE": "x", "PRTE_LAUNCHED": "1", "PMI_RANK": "1", "SLURM_PROCID": "1",
    }  # fmt: skip
    kept = mpi.environment_for_mpi(users | launchers)
    assert users.items() <= kept.items()
    assert not kept.keys() & launchers.keys()


@pytest.mark.parametrize(
    ("source", "mode", "wrong"),
    [
        ("exit 2", 0o755, ""),
        ("exit 127", 0o755, "problem: it does not run (ended with status 127"),
        ("kill -SEGV $$", 0o755, "problem: it does not run (was ended by SIGSEGV"),
        ("exit 0", 0o755, "problem: it does not run (it ended without a message)"),
        ("exit 2", 0o644, "problem: it cannot be started: Permission denied"),
    ],
)
def test_pmix_helper_that_does_not_run_is_a_problem(
    bare: pytest.MonkeyPatch, tmp_path: Path, source: str, mode: int, wrong: str
) -> None:
    helper = tmp_path / "dscomm-pmix"
    helper.write_text(f"#!/bin/sh\n{source}\n")
    helper.chmod(mode)
    bare.setattr(Examination, "helper_file", str(helper))
    finding = look("PMIx helper")
    assert len(finding.troubles) == bool(wrong), finding
    assert wrong in troubles(finding)


# --- the guard and the children


def test_a_check_that_raises_is_a_problem() -> None:
    def raises(finding: Finding, _: Examination) -> None:
        finding.say("as far as this")
        raise ValueError("on purpose")

    found = list(examine(1, {"first": raises, "second": lambda finding, _: None}))
    assert [finding.outcome for finding in found] == [Outcome.PROBLEM, Outcome.OK]
    assert found[0].found == ["as far as this"]
    assert found[0].troubles[0].wrong == "the check itself failed: ValueError: on purpose"


@pytest.mark.parametrize(
    ("program", "ended", "errors"),
    [
        ("pass", "", ""),
        ("raise ValueError('on purpose')", "ended with status 1", "ValueError: on purpose"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV", ""),
        ("import sys; sys.exit('a sentence')", "ended with status 1", "a sentence"),
    ],
)
def test_answer_of_child_says_how_it_ended(program: str, ended: str, errors: str) -> None:
    said = "from deepspeed_comm.doctor.child import tell; tell(begun=True); "
    answer = child.run([sys.executable, "-c", said + program], 60, bare_environment())
    assert answer == child.Answer({"begun": True}, ended, errors)
    assert answer.reason == ": ".join(filter(None, (ended, errors)))


def test_answer_of_crashed_child_names_the_function() -> None:
    program = (
        "import faulthandler, os, sys; faulthandler.enable()\n"
        "print('doctor: {\"begun\": 1}', flush=True)\n"
        "sys.stdout.write('doctor: {\"half'), sys.stdout.flush()\n"
        "print('before', file=sys.stderr, flush=True)\n"
        "def crash(): os.kill(os.getpid(), 11)\n"
        "crash()"
    )
    answer = child.run([sys.executable, "-c", program], 60)
    assert (answer.facts, answer.ended) == ({"begun": 1}, "was ended by SIGSEGV")
    assert answer.errors.startswith("Fatal Python error: Segmentation fault | ")
    assert "in crash" in answer.errors


def test_hanging_child_is_ended_with_its_descendants(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The child of the child keeps its output open.
    command = [
        "sh",
        "-c",
        f"sleep 600 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait",
    ]
    with child.Child(command) as hanging:
        deadline = time.monotonic() + 60
        while not pid_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        answer = hanging.answer(0.1)
    assert answer == child.Answer({}, "did not end in time", "")
    stat = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    while time.monotonic() < deadline:
        # Gone, or dead and not yet waited for by whoever inherited it.
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("what the child started lives on")
