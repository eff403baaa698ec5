"""Jobs on hosts: ranks started one by one as a placement says, or by torchrun.

A program of `programs/` runs on every rank and writes events with the time of CLOCK_MONOTONIC,
which all hosts share. A job that exceeds its limit, or does not end as it must, fails and shows
every rank's events and output.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepspeed_comm._plugin import load_extension
from tests.cases.forked_ranks import ForkedRank, RankStarter
from tests.cluster.hosts import ROOT, Host, HostProcess, Hosts, base_environment

BACKEND = os.environ.get("TEST_CLUSTER_BACKEND", "dscomm")
# "openmpi" or "mpich": the MPI that dscomm uses between hosts.
MPI = os.environ.get("TEST_CLUSTER_MPI", "openmpi")
PROGRAMS = Path(__file__).with_name("programs")
# Well above what a loaded machine needs; a job that takes this long hangs.
LIMIT_S = 120.0
# How long the other ranks may take to end once one has failed.
_GRACE_AFTER_FAILURE_S = 10.0
_FIRST_PORT = 29500


def has_mpich() -> bool:
    """tools/setup installs it if a package index has it."""
    return Path(load_extension().__file__).with_name("libdscomm_mpich.so").exists()


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    at_s: float  # CLOCK_MONOTONIC
    attempt: int  # earlier starts of the rank
    facts: dict[str, Any]


class JobFailure(AssertionError):
    """A job failed: the events and output of every rank."""


def _python_path() -> dict[str, str]:
    """For programs that import tests.cases. Packages that a test names come before this folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))}


@functools.cache
def _rank_starter(library_path: str | None) -> RankStarter:
    """For all jobs with the same LD_LIBRARY_PATH, which is read when a process starts."""
    libraries = {} if library_path is None else {"LD_LIBRARY_PATH": library_path}
    starter = RankStarter(base_environment() | _python_path() | libraries)
    atexit.register(starter.close)
    return starter


def fork_rank(
    host: Host, program: Path, arguments: Sequence[str], env: dict[str, str], output: Path
) -> ForkedRank:
    """Runs a program in a host, without the seconds that importing torch takes."""
    own = base_environment() | env
    starter = _rank_starter(own.get("LD_LIBRARY_PATH"))
    return starter.fork([str(program), *arguments], own, output, host_pid=host.pid)


class Job:
    """Context manager: ranks on hosts. At its end all of its processes are ended."""

    def __init__(self, hosts: Hosts, placement: Sequence[int], limit_s: float) -> None:
        self.hosts = hosts
        self.placement = list(placement)
        self.size = len(placement)
        self.processes: dict[str, HostProcess | ForkedRank] = {}
        self.number = len(list(hosts.folder.glob("job-*")))
        self.folder = hosts.folder / f"job-{self.number}"
        self.folder.mkdir()
        self._keeper: ForkedRank | None = None
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    # --- for launchers

    @property
    def port(self) -> int:
        return _FIRST_PORT + self.number

    def environment(self) -> dict[str, str]:
        return {
            "TEST_CLUSTER_BACKEND": BACKEND,
            "TEST_CLUSTER_FOLDER": str(self.folder),
            "TEST_CLUSTER_LIMIT_S": str(self._limit_s),
            "TEST_CLUSTER_PLACEMENT": json.dumps(self.placement),
            **_python_path(),
            # torch's own cache, which would be left in /tmp.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }

    def start_rank(self, rank: int, program: str, arguments: Sequence[str], env: Any) -> None:
        host = self.hosts[self.placement[rank]]
        output = self.folder / f"output-{rank}"
        process = fork_rank(host, PROGRAMS / program, arguments, self.environment() | env, output)
        self.processes[f"rank {rank} on {host.name}"] = process

    def start_launcher(self, host: Host, argv: Sequence[str], env: dict[str, str]) -> None:
        self.processes[f"launcher on {host.name}"] = host.start(argv, self.environment() | env)

    def start_keeper(self, host: Host) -> None:
        """Starts a keeper of the store, as torchrun is one; it runs until the ranks have ended."""
        arguments, output = [str(self.port)], self.folder / "output-store"
        self._keeper = fork_rank(host, PROGRAMS / "store.py", arguments, {}, output)

    # --- the run of a job

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hosts.kill_all()

    def exit_codes(self) -> dict[str, int | None]:
        """By process; None while it runs, -9 after SIGKILL."""
        return {label: process.exit_code() for label, process in self.processes.items()}

    def finish(self, limit_s: float | None = None) -> None:
        """Waits until all processes have ended; once one has failed, not for long."""
        deadline = self._limit(limit_s)
        while None in (codes := self.exit_codes()).values():
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
            if time.monotonic() > deadline:
                running = [label for label, code in self.exit_codes().items() if code is None]
                raise JobFailure(f"{', '.join(running)} does not end\n{self.report()}")
            time.sleep(0.01)
        if self._keeper is not None:
            os.kill(self._keeper.pid, signal.SIGKILL)
            self._keeper = None

    def results(self, limit_s: float | None = None, attempt: int = 0) -> list[dict[str, Any]]:
        """Finishes the job, which must succeed; returns the facts of every rank's "done"."""
        self.finish(limit_s)
        if any(self.exit_codes().values()):
            raise JobFailure(f"not every process ended well\n{self.report()}")
        return [event.facts for event in self.wait_for("done", limit_s=0.0, attempt=attempt)]

    # --- events

    def events(self, rank: int) -> list[Event]:
        path = self.folder / f"events-{rank}"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        return [Event(**json.loads(line)) for line in whole.splitlines()]

    def first(self, rank: int, name: str, attempt: int = 0) -> Event | None:
        said = (e for e in self.events(rank) if e.name == name and e.attempt == attempt)
        return next(said, None)

    def wait_for(
        self,
        name: str,
        ranks: Iterable[int] | None = None,
        limit_s: float | None = None,
        attempt: int = 0,
    ) -> list[Event]:
        """Every rank's first event of this name; fails when one cannot come any more, or at a
        limit."""
        ranks = range(self.size) if ranks is None else list(ranks)
        deadline = self._limit(limit_s)
        while True:
            # Read before the events: a rank that has ended has written all of its events.
            ended = self._ended()
            found = {rank: self.first(rank, name, attempt) for rank in ranks}
            missing = [rank for rank, event in found.items() if event is None]
            if not missing:
                return [event for event in found.values() if event is not None]
            if gone := [rank for rank in missing if rank in ended]:
                raise JobFailure(f"rank {gone[0]} ended before '{name}'\n{self.report()}")
            if time.monotonic() > deadline:
                raise JobFailure(f"rank {missing[0]} did not say '{name}'\n{self.report()}")
            time.sleep(0.01)

    def _ended(self) -> set[int]:
        """Ranks that will write no more events."""
        codes = self.exit_codes()
        if None not in codes.values():
            return set(range(self.size))
        return {
            rank
            for rank, number in enumerate(self.placement)
            if codes.get(f"rank {rank} on {self.hosts[number].name}") is not None
        }

    def _limit(self, limit_s: float | None) -> float:
        return min(self._deadline, time.monotonic() + (LIMIT_S if limit_s is None else limit_s))

    # --- actions on ranks

    def name(self, rank: int, attempt: int = 0) -> str:
        """The name of a rank in messages, with its pid within its host."""
        started = self.first(rank, "started", attempt)
        assert started is not None, self.report()
        host = self.hosts[self.placement[rank]].name
        return f"rank {rank} (pid {started.facts['pid']} on host {host})"

    def kill(self, rank: int, number: int = signal.SIGKILL, attempt: int = 0) -> float:
        """Sends a signal; returns the time just before it."""
        started = self.first(rank, "started", attempt)
        assert started is not None, self.report()
        pid = self.hosts[self.placement[rank]].pid_here(started.facts["pid"])
        at_s = time.monotonic()
        os.kill(pid, number)
        return at_s

    def report(self) -> str:
        lines = []
        for label, process in self.processes.items():
            code = process.exit_code()
            lines.append(f"--- {label}: {'running' if code is None else f'exit code {code}'}")
            lines.append(process.output().strip()[-6000:])
        for rank in range(self.size):
            lines.append(f"--- events of rank {rank}")
            lines += [f"{e.at_s:.3f} {e.name} {e.attempt} {e.facts}" for e in self.events(rank)]
        for host in self.hosts:
            lines += [f"--- left on {host.name}: {thing}" for thing in host.leftovers()]
        return "\n".join(lines)


def start_ranks(
    hosts: Hosts,
    placement: Sequence[int],
    program: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    env_of: dict[int, dict[str, str]] | None = None,
    store_apart: bool = False,
    limit_s: float = LIMIT_S,
) -> Job:
    """Starts a program on ranks; placement: each rank's host; env_of: variables of single ranks.

    With store_apart another process on the first host keeps the store, as torchrun does, instead of
    rank 0: then any rank can die and leave the others their store.
    """
    job = Job(hosts, placement, limit_s)
    keeper = hosts[0 if store_apart else placement[0]]
    common = {
        "WORLD_SIZE": str(job.size),
        "MASTER_ADDR": keeper.address,
        "MASTER_PORT": str(job.port),
        **(env or {}),
    }
    if store_apart:
        job.start_keeper(keeper)
        # From this torch knows that a launcher keeps the store.
        common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    of_host: collections.Counter[int] = collections.Counter()
    for rank, number in enumerate(placement):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(of_host[number]),
            "LOCAL_WORLD_SIZE": str(list(placement).count(number)),
        }
        of_host[number] += 1
        own |= (env_of or {}).get(rank, {})
        job.start_rank(rank, program, arguments, common | own)
    return job


def torchrun(
    hosts: Hosts,
    nproc: int,
    program: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    max_restarts: int = 0,
    rendezvous: str = "static",
    limit_s: float = LIMIT_S,
) -> Job:
    """Starts a program on nproc ranks of every host, by torchrun on each."""
    job = Job(hosts, [host.number for host in hosts for _ in range(nproc)], limit_s)
    first = hosts[0].address
    for host in hosts:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
        launcher += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        if rendezvous == "static":
            launcher += [f"--node-rank={host.number}", f"--master-addr={first}"]
            launcher += [f"--master-port={job.port}"]
        else:
            # Nodes are ordered by their addresses.
            launcher += [f"--rdzv-backend={rendezvous}", f"--rdzv-endpoint={first}:{job.port}"]
            launcher += ["--rdzv-id=job", f"--local-addr={host.address}"]
        # Otherwise torchrun leaves a folder in /tmp.
        launcher += [f"--log-dir={job.folder / host.name}"]
        job.start_launcher(host, [*launcher, str(PROGRAMS / program), *arguments], env or {})
    return job


def slurm(hosts: Hosts, nproc: int, program: str, *arguments: str) -> Job:
    """Starts a program on nproc ranks of every host, in an environment like srun's."""
    job = Job(hosts, [host.number for host in hosts for _ in range(nproc)], LIMIT_S)
    common = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(job.size),
        "SLURM_NNODES": str(len(hosts)),
        # Slurm would not write host-[a-b], since its ranges are of numbers.
        "SLURM_JOB_NODELIST": ",".join(host.name for host in hosts),
    }
    for rank in range(job.size):
        job.start_rank(rank, program, arguments, common | {"SLURM_PROCID": str(rank)})
    return job


class MpiJob(Job):
    """mpirun on the first host. It reaches the others through a stand-in for ssh: this process
    starts the requested commands, when it checks the job."""

    def exit_codes(self) -> dict[str, int | None]:
        for order in sorted(self.folder.glob("order-*.json")):
            name, *argv = json.loads(order.read_text())
            order.unlink()
            host = next(host for host in self.hosts if host.name == name)
            self.processes[f"orted on {name}"] = host.start(["sh", "-c", " ".join(argv)])
        codes = super().exit_codes()
        for label, code in codes.items():
            if label.startswith("orted") and code is not None:
                (self.folder / f"ended-{label.split()[-1]}").write_text(str(code))
        return codes


def mpirun(
    hosts: Hosts,
    nproc: int,
    program: str,
    *arguments: str,
    limit_s: float = LIMIT_S,
) -> Job:
    """Starts a program on nproc ranks of every host, by mpirun on the first."""
    job = MpiJob(hosts, [host.number for host in hosts for _ in range(nproc)], limit_s)
    places = ",".join(f"{host.name}:{nproc}" for host in hosts)
    launcher = ["mpirun", "--allow-run-as-root", "-np", str(job.size), "--host", places]
    launcher += ["--mca", "plm_rsh_agent", f"{sys.executable} {PROGRAMS / 'remote_shell.py'}"]
    # Hosts share the machine's cores, which mpirun cannot know.
    launcher += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    for name in [*job.environment(), "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"]:
        launcher += ["-x", name]
    launcher += [sys.executable, str(PROGRAMS / program), *arguments]
    job.start_launcher(hosts[0], launcher, {})
    return job


def check_results(job: Job, at_least: int) -> list[dict[str, Any]]:
    """Checks that programs/checks.py ran every kind of check on every rank, `at_least` this many,
    that the members of a group got the same bits, and that the job has left nothing behind."""
    results = job.results()
    of_group: dict[str, set[str]] = {}
    for rank, result in enumerate(results):
        for group, digest in result["digests"].items():
            of_group.setdefault(group, set()).add(digest)
        counts = result["counts"]
        assert len(counts) == 11 and min(counts.values()) > 0, (rank, counts)
        assert sum(counts.values()) >= at_least, (rank, counts)
    assert [group for group, digests in of_group.items() if len(digests) != 1] == []
    left = job.hosts.leftovers(limit_s=5.0)
    assert left == {}, left
    return results
