"""Jobs on hosts: ranks started one by one where a placement puts them, or by torchrun.

A program of `programs/` runs on every rank and writes what happens to it, as events with the time
of CLOCK_MONOTONIC, which all hosts share. A job that outlasts its limit, or ends other than it
must, fails and shows what every rank said and printed.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hosts import Host, HostProcess, Hosts, base_environment

BACKEND = os.environ.get("TEST_CLUSTER_BACKEND", "dscomm")
# "openmpi" or "mpich": what carries dscomm between hosts.
MPI = os.environ.get("TEST_CLUSTER_MPI", "openmpi")
PROGRAMS = Path(__file__).with_name("programs")
# Of the references, cases and workloads that programs take from there.
_MODULES = [str(Path(__file__).parents[1] / folder) for folder in ("torch", "faults")]
# Well above what a loaded machine needs; a job that gets here hangs.
LIMIT_S = 120.0
# What the other ranks have left to end once one has failed.
_AFTERMATH_S = 10.0
_FIRST_PORT = 29500


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    at_s: float  # CLOCK_MONOTONIC
    attempt: int  # how often the rank had been started before
    facts: dict[str, Any]


class JobFailure(AssertionError):
    """A job that did not do what it must: what every rank said and printed."""


class ForkedRank:
    """A rank that the rank starter made; used as a HostProcess is."""

    def __init__(self, output: Path) -> None:
        self.output_path = output

    @functools.cached_property
    def pid(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while (pid := self._said("pid")) is None:
            if self.exit_code() is not None or time.monotonic() > deadline:
                raise JobFailure(f"a rank does not start\n{self.output()}")
            time.sleep(0.002)
        return pid

    def exit_code(self) -> int | None:
        return self._said("code")

    def output(self) -> str:
        path = self.output_path
        return path.read_text(errors="replace") if path.exists() else ""

    def _said(self, what: str) -> int | None:
        path = Path(f"{self.output_path}.{what}")
        return int(path.read_text()) if path.exists() else None


def _python_path() -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*_MODULES, *([given] if given else [])])}


@functools.cache
def _rank_starter(library_path: str | None) -> subprocess.Popen[str]:
    """One for all jobs with the same LD_LIBRARY_PATH, which is read when a process starts; it ends
    with this process."""
    libraries = {} if library_path is None else {"LD_LIBRARY_PATH": library_path}
    starter = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_starter.py"))],
        stdin=subprocess.PIPE,
        text=True,
        env=base_environment() | _python_path() | libraries,
        start_new_session=True,
    )
    atexit.register(starter.communicate)  # which closes its input
    return starter


def fork_rank(
    host: Host, program: Path, arguments: Sequence[str], env: dict[str, str], output: Path
) -> ForkedRank:
    """Runs one of the programs in a host, without the seconds that importing torch takes."""
    own = base_environment() | env
    starter = _rank_starter(own.get("LD_LIBRARY_PATH"))
    order = {"host": host.pid, "argv": [str(program), *arguments], "output": str(output)}
    order["env"] = own
    assert starter.stdin is not None and starter.poll() is None, "the rank starter has ended"
    starter.stdin.write(json.dumps(order) + "\n")
    starter.stdin.flush()
    return ForkedRank(output)


class Job:
    """Ranks on hosts. Use as a context manager: at its end nothing of it runs."""

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

    # --- what launchers use

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
            # torch's own, which would be left in /tmp.
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
        """Of the store, as torchrun is one; it stays until the ranks have ended."""
        arguments, output = [str(self.port)], self.folder / "output-store"
        self._keeper = fork_rank(host, PROGRAMS / "store.py", arguments, {}, output)

    # --- its life

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hosts.kill_all()

    def exit_codes(self) -> dict[str, int | None]:
        """By process; None while it runs, -9 after SIGKILL."""
        return {label: process.exit_code() for label, process in self.processes.items()}

    def finish(self, limit_s: float | None = None) -> None:
        """Until all processes have ended; soon, once one has ended badly."""
        deadline = self._limit(limit_s)
        while None in (codes := self.exit_codes()).values():
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
            if time.monotonic() > deadline:
                running = [label for label, code in self.exit_codes().items() if code is None]
                raise JobFailure(f"{', '.join(running)} does not end\n{self.report()}")
            time.sleep(0.01)
        if self._keeper is not None:
            os.kill(self._keeper.pid, signal.SIGKILL)
            self._keeper = None

    def results(self, limit_s: float | None = None, attempt: int = 0) -> list[dict[str, Any]]:
        """Finishes, and well: what every rank said to be "done"."""
        self.finish(limit_s)
        if any(self.exit_codes().values()):
            raise JobFailure(f"not every process ended well\n{self.report()}")
        return [event.facts for event in self.wait_for("done", limit_s=0.0, attempt=attempt)]

    # --- what ranks say

    def events(self, rank: int) -> list[Event]:
        path = self.folder / f"events-{rank}"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be half written
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
        """The first event of that name of every rank; fails when it cannot come, or at a limit."""
        ranks = range(self.size) if ranks is None else list(ranks)
        deadline = self._limit(limit_s)
        while True:
            # Before the look at the events: what ended has said all of it.
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
        """Ranks that will say no more."""
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

    # --- what is done to ranks

    def name(self, rank: int, attempt: int = 0) -> str:
        """How a message names a rank: with the pid that its own host knows it by."""
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
    """A program on ranks; placement has the host of each, env_of what single ranks have besides.

    With store_apart the store is kept by one more process on the first host, as torchrun keeps it,
    and not by rank 0: then any rank can die and leave the others their store.
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
        # By this torch knows that a launcher keeps the store.
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
    """A program on nproc ranks of every host, started by torchrun on each."""
    job = Job(hosts, [host.number for host in hosts for _ in range(nproc)], limit_s)
    first = hosts[0].address
    for host in hosts:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
        launcher += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        if rendezvous == "static":
            launcher += [f"--node-rank={host.number}", f"--master-addr={first}"]
            launcher += [f"--master-port={job.port}"]
        else:
            # Nodes have the order of their addresses.
            launcher += [f"--rdzv-backend={rendezvous}", f"--rdzv-endpoint={first}:{job.port}"]
            launcher += ["--rdzv-id=job", f"--local-addr={host.address}"]
        # Else it leaves a folder in /tmp.
        launcher += [f"--log-dir={job.folder / host.name}"]
        job.start_launcher(host, [*launcher, str(PROGRAMS / program), *arguments], env or {})
    return job


def slurm(hosts: Hosts, nproc: int, program: str, *arguments: str) -> Job:
    """A program on nproc ranks of every host, in an environment like that of Slurm's srun."""
    job = Job(hosts, [host.number for host in hosts for _ in range(nproc)], LIMIT_S)
    common = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(job.size),
        "SLURM_NNODES": str(len(hosts)),
        # host-[a-b] would be no list of Slurm's, whose ranges are of numbers.
        "SLURM_JOB_NODELIST": ",".join(host.name for host in hosts),
    }
    for rank in range(job.size):
        job.start_rank(rank, program, arguments, common | {"SLURM_PROCID": str(rank)})
    return job


class MpiJob(Job):
    """mpirun on the first host, which reaches the others by a stand-in for ssh: what it asks for is
    started by this process, when it looks at the job."""

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
    """A program on nproc ranks of every host, started by mpirun on the first."""
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
