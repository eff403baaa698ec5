"""Bring-up of MPI among ranks started directly or by mpirun; and clean-up when they die.

All ranks run on this machine; a rank's host is only a number. Needs mpi_bring_up_rank and
dscomm-pmix, which the CMake presets build.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0


def build_folder() -> Path:
    wish = os.environ.get("MPI_TEST_BUILD")
    folders = [Path(wish)] if wish else sorted((ROOT / "build").glob("*"))
    built = [folder for folder in folders if (folder / "mpi_bring_up_rank").exists()]
    if not built:
        pytest.fail("mpi_bring_up_rank is not built: cmake --preset release; cmake --build ...")
    return max(built, key=lambda folder: (folder / "mpi_bring_up_rank").stat().st_mtime)


def helpers(temporary: Path) -> list[int]:
    """The pids of dscomm-pmix processes with this TMPDIR."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "comm").read_text() != "dscomm-pmix\n":
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            if f"TMPDIR={temporary}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def shared_folders(pids: list[int]) -> list[Path]:
    return [path for pid in pids for path in Path("/dev/shm").glob(f"dscomm-pmix.{pid}.*")]


def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Job:
    """Ranks, each a process, with their own store and TMPDIR."""

    def __init__(self, folder: Path, hosts: str) -> None:
        self.build = build_folder()
        self.program = str(self.build / "mpi_bring_up_rank")
        self.folder, self.hosts = folder, hosts
        self.size = len(hosts.split(","))
        self.store, self.temporary = folder / "store", folder / "tmp"
        self.store.mkdir(parents=True)
        self.temporary.mkdir()
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.helper_pids: list[int] = []
        self.environment = {"TMPDIR": str(self.temporary)}

    def options(self, **options: object) -> list[str]:
        options = {"helper": self.build / "package" / "dscomm-pmix", **options}
        return [f"{name}={value}" for name, value in options.items() if value is not None]

    def start(self, rank: int, **options: object) -> None:
        environment = {**os.environ, **self.environment}
        if "initialise" in options:
            # Single-rank MPIs that start together race for Open MPI's session folder.
            own = self.folder / f"session{rank}"
            own.mkdir()
            environment["OMPI_MCA_orte_tmpdir_base"] = str(own)
        with open(self.folder / f"output{rank}", "wb") as output:
            self.ranks.append(
                subprocess.Popen(
                    [self.program, self.store, str(rank), self.hosts, *self.options(**options)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def start_all(self, **options: object) -> None:
        for rank in range(self.size):
            self.start(rank, **options)

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text(errors="replace")

    def report(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self.ranks)))

    def tell(self, file: str) -> None:
        (self.store / file).touch()

    def wait_for(self, text: str, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            assert until(
                lambda rank=rank: text in self.output(rank) or self.ranks[rank].poll() is not None
            ), self.report()
            assert text in self.output(rank), self.report()
        self.helper_pids = sorted({*self.helper_pids, *helpers(self.temporary)})

    def codes(self) -> list[int]:
        deadline = time.monotonic() + LIMIT_S
        for process in self.ranks:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"a rank does not end\n{self.report()}")
        return [process.returncode for process in self.ranks]

    def left(self) -> list[object]:
        folders = [path for path in self.temporary.iterdir() if not path.name.startswith("ompi.")]
        return [*helpers(self.temporary), *folders, *shared_folders(self.helper_pids)]

    def nothing_left(self) -> None:
        assert until(lambda: not self.left(), 10), self.left()

    def close(self) -> None:
        # A killed helper leaves its folder; a failed test may not have seen it.
        self.helper_pids = sorted({*self.helper_pids, *helpers(self.temporary)})
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in helpers(self.temporary):
            os.kill(pid, signal.SIGKILL)
        for path in shared_folders(self.helper_pids):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    jobs: list[Job] = []

    def make(hosts: str) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), hosts))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize(
    "hosts",
    [
        *("0,0", "0,0,1,1", "0,1,2,3"),
        *(pytest.param(hosts, marks=pytest.mark.drill) for hosts in ("0,1", "0,0,0,0", "0,1,0,1")),
    ],
)
def test_mpi_starts_on_every_placement_of_ranks(make_job: Callable[[str], Job], hosts: str) -> None:
    job = make_job(hosts)
    job.start_all(children="yes")
    assert job.codes() == [0] * job.size, job.report()
    world = "".join(f" {rank}" for rank in range(job.size))
    for rank in range(job.size):
        lines = job.output(rank).splitlines()
        assert re.fullmatch(
            rf"up after .*: dscomm-pmix, rank {rank} of {job.size}, world ranks{world}", lines[0]
        ), job.report()
        assert lines[1:] == ["child sees:", "sum right", "left, finalised 0"], job.report()
    job.nothing_left()


def test_mpi_starts_on_hosts_with_equal_or_unusual_names(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1,2")
    job.start_all(name="node_01,a b")
    assert job.codes() == [0, 0, 0], job.report()


def test_files_of_mpi_are_in_folders_of_dscomm_pmix(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    assert len(job.helper_pids) == 2
    assert len(list(job.temporary.glob("dscomm-pmix.*"))) == 2
    assert list(job.temporary.iterdir()) == list(job.temporary.glob("dscomm-pmix.*"))
    segments = [path for path in shared_folders(job.helper_pids) for path in path.iterdir()]
    assert any(path.name.startswith("vader_segment") for path in segments)
    job.tell("go")
    assert job.codes() == [0, 0, 0], job.report()
    job.nothing_left()


def test_shared_memory_folder_set_by_user_is_kept(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0")
    chosen = job.folder / "chosen"
    chosen.mkdir()
    job.environment["OMPI_MCA_btl_vader_backing_directory"] = str(chosen)
    job.start_all(hold="go", children="yes")
    job.wait_for("sum right")
    assert len(list(chosen.glob("vader_segment*"))) == 2
    assert "child sees: OMPI_MCA_btl_vader_backing_directory\n" in job.output(0)
    job.tell("go")
    assert job.codes() == [0, 0]
    job.nothing_left()
    assert list(chosen.iterdir()) == []


def test_pmix_server_ignores_job_signals(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    for pid in job.helper_pids:
        assert os.getsid(pid) == os.getpgid(pid) != os.getsid(job.ranks[0].pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        descriptors = {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()}
        assert descriptors >= {"0", "1", "2", "3"}
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert not [variable for variable in variables if variable.startswith(b"PMIX_")]
    job.tell("go")
    assert job.codes() == [0, 0], job.report()
    job.nothing_left()


def test_pmix_server_keeps_no_descriptor_of_a_rank(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    for rank in range(2):
        job.ranks.append(
            subprocess.Popen(
                [job.program, job.store, str(rank), job.hosts, *job.options(hold="go")],
                env={**os.environ, **job.environment},
                stdout=open(job.folder / f"output{rank}", "wb"),
                stderr=writing,
                pass_fds=[writing],
            )
        )
    os.close(writing)
    job.wait_for("sum right")
    for process in job.ranks:
        process.kill()
        process.wait()
    started = time.monotonic()
    while os.read(reading, 4096):
        pass
    os.close(reading)
    assert time.monotonic() - started < 5
    job.nothing_left()


@pytest.mark.parametrize(
    "victims",
    [
        *([0], [0, 1, 2, 3]),
        *(pytest.param(victims, marks=pytest.mark.drill) for victims in ([1], [2], [0, 1])),
    ],
)
def test_killed_ranks_leave_no_pmix_server_or_folder_of_it(
    make_job: Callable[[str], Job], victims: list[int]
) -> None:
    job = make_job("0,0,1,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    for victim in victims:
        job.ranks[victim].kill()
    # The survivors are not killed: their own deadline ends them, and they end in order.
    expected = [-signal.SIGKILL if rank in victims else 9 for rank in range(4)]
    assert job.codes() == expected, job.report()
    for rank in set(range(4)) - set(victims):
        assert job.output(rank).endswith("no all-reduce in 5 s\nleft, finalised 0\n"), job.report()
    job.nothing_left()


def test_ranks_survive_a_killed_pmix_server_and_clean_up(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    on_host_0 = next(pid for pid in job.helper_pids if serves(pid, job.ranks[0].pid))
    os.kill(on_host_0, signal.SIGKILL)
    assert until(lambda: "has ended before them" in job.output(0) + job.output(1)), job.report()
    job.tell("go")
    assert job.codes() == [0, 0, 0], job.report()
    job.nothing_left()


def test_stopped_pmix_server_ends_with_its_ranks(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    for pid in job.helper_pids:
        os.kill(pid, signal.SIGSTOP)
    job.tell("go")
    assert job.codes() == [0, 0, 0], job.report()
    job.nothing_left()


def test_files_of_a_killed_host_are_removed_by_the_next_job(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(hold="go")
    job.wait_for("sum right")
    on_host_0 = next(pid for pid in job.helper_pids if serves(pid, job.ranks[0].pid))
    for pid in (job.ranks[0].pid, job.ranks[1].pid, on_host_0):
        os.kill(pid, signal.SIGKILL)
    job.tell("go")
    job.codes()
    mark = f"dscomm-pmix.{on_host_0}."
    assert until(lambda: all(mark in str(path) for path in job.left()), 10), job.left()
    assert job.left()
    # The files of another live job stay.
    other = make_job("0,0")
    other.environment["TMPDIR"] = str(job.temporary)
    other.start_all(hold="go")
    other.wait_for("sum right")
    third = make_job("0,1")
    third.environment["TMPDIR"] = str(job.temporary)
    third.start_all()
    assert third.codes() == [0, 0], third.report()
    other.tell("go")
    assert other.codes() == [0, 0], other.report()
    job.nothing_left()


def serves(helper: int, rank: int) -> bool:
    """Whether the helper holds a pidfd of the rank."""
    for entry in Path(f"/proc/{helper}/fdinfo").iterdir():
        if re.search(rf"^Pid:\s+{rank}$", entry.read_text(), re.M):
            return True
    return False


def test_child_that_outlives_its_rank_keeps_no_files(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.start_all(fork="yes")
    assert job.codes() == [0, 0], job.report()
    assert until(lambda: not job.left(), 1.5), job.left()


def test_mpi_abort_ends_only_the_caller(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(abort=1)
    codes = job.codes()
    assert codes[1] == 9 and codes[0] == 0 and codes[2] == 0, job.report()
    job.nothing_left()


def test_program_may_call_mpi_finalize(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(finalise="yes")
    assert job.codes() == [0, 0, 0], job.report()
    assert all("MPI_Finalize 0" in job.output(rank) for rank in range(3))
    job.nothing_left()


def test_second_start_reuses_mpi(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1")
    job.start_all(twice="yes")
    assert job.codes() == [0, 0, 0], job.report()
    assert all(job.output(rank).count("up after") == 2 for rank in range(3))
    assert all("the program, rank" in job.output(rank) for rank in range(3))


# --- failures during the bring-up


def errors(job: Job, code: str) -> list[str]:
    assert job.codes() == [7] * job.size, job.report()
    found = []
    for rank in range(job.size):
        match = re.search(rf"^error {code} after (\S+) s: (.*)$", job.output(rank), re.M)
        assert match, job.report()
        assert float(match[1]) < 30, job.report()
        found.append(match[2])
    return found


def test_missing_pmix_server_is_reported_to_all(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1,1")
    for rank in range(4):
        job.start(rank, helper="/nonexistent/dscomm-pmix" if rank == 2 else job_helper(job))
    for message in errors(job, "unsupported"):
        assert "starting dscomm-pmix failed on rank 2 (pid" in message, job.report()
        assert "on host host1)" in message and "libpmix" in message
    job.nothing_left()


def job_helper(job: Job) -> Path:
    return job.build / "package" / "dscomm-pmix"


def test_failure_of_the_pmix_server_is_reported_to_all(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.environment["TMPDIR"] = str(job.folder / "nowhere")
    job.start_all()
    for message in errors(job, "resource"):
        assert "starting dscomm-pmix failed on rank" in message and "set TMPDIR" in message


def test_pmix_server_that_ends_early_is_named(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.start_all(helper="/bin/false")
    for message in errors(job, "internal"):
        assert "starting dscomm-pmix failed on rank" in message and "status 1" in message


def test_missing_rank_is_named(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1,1")
    job.start(0, limit_ms=2000)
    job.start(1, limit_ms=2000)
    assert [process.wait(30) for process in job.ranks] == [7, 7]
    assert "waiting for rank 2 (pid" in job.output(0), job.report()
    assert "waiting for rank 2 (pid" in job.output(1), job.report()


@pytest.mark.parametrize(
    "victim", [None, 1, *(pytest.param(rank, marks=pytest.mark.drill) for rank in (0, 2))]
)
def test_host_that_does_not_enter_mpi_init_times_out(
    make_job: Callable[[str], Job], victim: int | None
) -> None:
    job = make_job("0,0,1")
    for rank in range(3):
        job.start(rank, limit_ms=6000, stall="go" if rank == 2 else None)
    assert until(lambda: list(job.store.glob("*fence+all+0+0"))), job.report()
    if victim is not None:
        job.ranks[victim].kill()
    for rank in range(2):
        if rank == victim:
            continue
        assert until(lambda rank=rank: job.ranks[rank].poll() is not None, 20), job.report()
        assert job.ranks[rank].returncode == 7, job.report()
        assert re.search(r"^error timeout after [67]\.", job.output(rank), re.M), job.report()
    if victim is None:
        assert "it waits for the ranks of host1" in job.output(0), job.report()
    job.tell("go")
    job.codes()
    job.nothing_left()


def names_silent_helper(job: Job, pid: int, host: int, state: str) -> None:
    """Every rank names it, at its timeout."""
    for rank in range(job.size):
        match = re.search(r"^error timeout after (\S+) s: (.*)$", job.output(rank), re.M)
        assert match, job.report()
        assert float(match[1]) < 8, job.report()
        sentence = f"dscomm-pmix (pid {pid} on host host{host}) does not answer, {state}"
        assert sentence in match[2], job.report()


@pytest.mark.parametrize("host", [0, 1])
def test_pmix_server_stopped_in_mpi_init_is_named_by_all(
    make_job: Callable[[str], Job], host: int
) -> None:
    job = make_job("0,0,1,1")
    stopped = helper_in_mpi_init(job, host)
    os.kill(stopped, signal.SIGSTOP)
    job.tell("go")
    assert job.codes() == [7] * 4, job.report()
    names_silent_helper(job, stopped, host, "stopped (state T)")
    job.nothing_left()


def test_pmix_server_with_stuck_libpmix_is_named_by_all(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,0,1,1")
    stuck = helper_in_mpi_init(job, 1)
    # Stops all its threads except the main one.
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(stuck)], stdout=subprocess.PIPE, text=True
    )
    assert tracer.stdout.readline() == "stopped\n"
    job.tell("go")
    assert job.codes() == [7] * 4, job.report()
    tracer.kill()
    tracer.wait()
    names_silent_helper(job, stuck, 1, "sleeping (state S)")
    job.nothing_left()


def test_pmix_server_resumed_before_the_timeout_raises_nothing(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,0,1,1")
    stopped = helper_in_mpi_init(job, 0)
    os.kill(stopped, signal.SIGSTOP)
    assert until(lambda: list(job.store.glob("*fence+silent"))), job.report()
    os.kill(stopped, signal.SIGCONT)
    job.tell("go")
    assert job.codes() == [0] * 4, job.report()
    assert list(job.store.glob("*fence*")) == []
    job.nothing_left()


TRACER = """
import ctypes, os, sys, time
process, stopped = int(sys.argv[1]), set()
while new := {int(name) for name in os.listdir(f"/proc/{process}/task")} - stopped - {process}:
    for thread in new:  # one may start another one meanwhile
        assert ctypes.CDLL(None).ptrace(16, thread, None, None) == 0  # PTRACE_ATTACH
        os.waitpid(thread, 0x40000000)  # __WALL
    stopped |= new
assert stopped
print("stopped", flush=True)
time.sleep(100)
"""


def helper_in_mpi_init(job: Job, host: int) -> int:
    """Starts two ranks on each of two hosts. One rank of the other host waits before MPI_Init."""
    late = 3 - 2 * host
    for rank in range(4):
        job.start(rank, limit_ms=6000, stall="go" if rank == late else None)
    assert until(lambda: list(job.store.glob(f"*fence+all+0+{host}"))), job.report()
    job.helper_pids = helpers(job.temporary)
    return next(pid for pid in job.helper_pids if serves(pid, job.ranks[2 * host].pid))


def test_errors_of_all_ranks_name_a_pmix_server_that_never_answers(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,1")
    helper = job.folder / "dscomm-pmix"
    helper.write_text("#!/bin/sh\nkill -STOP $$\n")
    helper.chmod(0o755)
    job.start(0, limit_ms=5000)
    job.start(1, limit_ms=5000, helper=helper)
    assert job.codes() == [7, 7], job.report()
    for rank in range(2):
        assert "dscomm-pmix (on host host1) does not answer" in job.output(rank), job.report()
    job.nothing_left()


# --- ranks that a launcher has started


def mpirun(job: Job, *command: object, ranks: int) -> str:
    line = ["mpirun", "--oversubscribe", "-np", str(ranks), *map(str, command)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(
        line,
        env={**os.environ, **job.environment, **root},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_ranks_of_mpirun_need_no_pmix_server(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    command = [job.program, job.store, -1, job.hosts, *job.options(helper="/nonexistent")]
    output = mpirun(job, *command, ranks=2)
    assert len(re.findall("the launcher, rank [01] of 2, world ranks 0 1", output)) == 2, output
    assert output.count("sum right") == 2
    assert output.count("left, finalised 1") == 2


def test_mpi_initialised_by_the_program_is_used_and_not_finalised(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,1")
    command = [job.program, job.store, -1, job.hosts]
    output = mpirun(job, *command, *job.options(initialise=3, finalise="yes"), ranks=2)
    assert len(re.findall("the program, rank [01] of 2", output)) == 2, output
    assert output.count("MPI_Finalize 0") == 2


def test_some_ranks_of_a_launcher_form_a_separate_job(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    script = 'if [ $OMPI_COMM_WORLD_RANK = 2 ]; then sleep 3; else "$@"; fi'
    command = ["bash", "-c", script, "bash", job.program, job.store, -1, job.hosts]
    output = mpirun(job, *command, *job.options(), ranks=3)
    assert len(re.findall("dscomm-pmix, rank [01] of 2", output)) == 2, output
    assert output.count("sum right") == 2
    job.nothing_left()


def test_workers_that_inherit_one_rank_form_a_separate_job(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,1")
    # Not `wait -n`, which forgets a worker that ended at the same moment as another.
    script = '"$0" "$1" 0 "${@:2}" & first=$!; "$0" "$1" 1 "${@:2}" && wait $first'
    command = ["bash", "-c", script, job.program, job.store, job.hosts, *job.options()]
    output = mpirun(job, *command, ranks=1)
    assert len(re.findall("dscomm-pmix, rank [01] of 2", output)) == 2, output
    assert output.count("sum right") == 2
    job.nothing_left()


def test_workers_of_torchrun_ignore_the_rank_of_mpirun(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,1")
    job.environment["TORCHELASTIC_RUN_ID"] = "none"
    command = [job.program, job.store, -1, job.hosts, *job.options()]
    output = mpirun(job, *command, ranks=2)
    assert len(re.findall("dscomm-pmix, rank [01] of 2", output)) == 2, output
    assert output.count("sum right") == 2
    job.nothing_left()


# --- parameters that an administrator has set


def parameter_file(job: Job, text: str) -> None:
    file = job.folder / "openmpi-mca-params.conf"
    file.write_text(text)
    job.environment["OMPI_MCA_mca_base_param_files"] = str(file)
    job.environment["LOG_LEVEL"] = "info"


def test_exclude_list_in_parameter_file_overrides_ifname(
    make_job: Callable[[str], Job],
) -> None:
    """With both an include list and an exclude list, Open MPI uses no network at all."""
    job = make_job("0,1")
    parameter_file(job, "# Loopback is included.\nbtl_tcp_if_exclude = none0\n")
    job.start_all(network="127.0.0.N/8", ifname="lo", limit_ms=20000)
    assert job.codes() == [0, 0], job.report()
    for rank in range(2):
        assert "MPI is not told of DSCOMM_IFNAME=lo" in job.output(rank), job.report()
        assert "btl_tcp_if_exclude = none0" in job.output(rank), job.report()


def test_include_list_in_parameter_file_is_kept(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    parameter_file(job, "btl_tcp_if_include = lo\nmtl = ^ofi\n")
    job.start_all(network="10.255.0.N/24", limit_ms=20000)
    assert job.codes() == [0, 0], job.report()
    for rank in range(2):
        assert "over TCP MPI uses lo;" in job.output(rank), job.report()


def test_mpi_without_thread_support_is_refused(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.start_all(initialise=1)
    for message in errors(job, "unsupported"):
        assert "MPI_THREAD_MULTIPLE" in message and "mpi4py.rc" in message


def test_mpi_worlds_of_one_rank_are_refused(
    make_job: Callable[[str], Job],
) -> None:
    job = make_job("0,1")
    job.start_all(initialise=3)
    for message in errors(job, "unsupported"):
        assert "rank 0 of 1 in MPI_COMM_WORLD" in message and "mpi4py.rc" in message


def test_mpi_initialised_in_only_some_ranks_is_refused(make_job: Callable[[str], Job]) -> None:
    job = make_job("0,1")
    job.start(0, initialise=3)
    job.start(1)
    for message in errors(job, "unsupported"):
        assert "MPI has been initialised already in rank 0 (pid" in message
