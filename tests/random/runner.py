"""Runs random programs: forks the ranks from a warm process, injects timed faults, collects
reports.

`python runner.py` is such a warm process: it has imported torch, but has made no group and started
no thread. It reads a program as a JSON line from standard input and answers with a JSON line of
problems. A fork takes milliseconds, an import of torch more than a second. `Runner` is its client.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from program import PLAIN_TIMEOUT_S, Program

HERE = Path(__file__).resolve().parent


class Runner:
    """One warm process; runs one program at a time."""

    def __init__(self, nice: int = 0) -> None:
        self.nice = nice
        self.process: subprocess.Popen[str] | None = None

    def run(self, program: Program) -> dict[str, Any]:
        """Returns the problems, the seconds, and the texts that explain them."""
        self.send(program)
        return self.receive()

    def send(self, program: Program) -> None:
        if self.process is None or self.process.poll() is not None:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("DSCOMM_")}
            environment.update(OMP_NUM_THREADS="1")
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "runner.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                preexec_fn=(lambda: os.nice(self.nice)) if self.nice else None,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"the walker's warm process ended with {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def fileno(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.fileno()

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self.process = None


# --- the warm process


def _files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("*dscomm*")}


def _files_of(pids: list[int]) -> set[str]:
    """dscomm's files that name one of these processes; other tests may run at the same time."""
    return {file for file in _files() if not set(file.split(".")).isdisjoint(map(str, pids))}


def _session_members(sessions: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _enter(number: int) -> None:
    """Enters the network and host name of a host, given by a process of WALK_HOSTS."""
    pid = os.environ["WALK_HOSTS"].split(",")[number]
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("net", "uts"):
        descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def hard_limit_s(program: Program) -> float:
    """Each group may cost its timeout once when it is made, and once more afterwards."""
    groups = sum(step["do"] in ("world", "group") for step in program["steps"])
    sleeps = sum(step.get("ms", 0) for step in program["steps"]) / 1000
    if program["faults"] and program["timeout_s"] < PLAIN_TIMEOUT_S:
        return float(program["timeout_s"] * (2 * groups + 2) + sleeps + 20)
    return float(program["timeout_s"] + sleeps + 30)


class _Job:
    """The processes of one program."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.pids: list[int] = []
        self.pidfds: list[int] = []
        self.exits: list[int | None] = []
        self.owner = {rank: n for n, ranks in enumerate(program["processes"]) for rank in ranks}

    def start(self, serve: Any) -> None:
        parent = os.getpid()
        for ranks in self.program["processes"]:
            pid = os.fork()
            if pid == 0:
                if hosts := self.program.get("hosts"):
                    _enter(hosts[ranks[0]])
                serve(self.program, ranks, self.folder, parent)
            self.pids.append(pid)
            self.pidfds.append(os.pidfd_open(pid))
            self.exits.append(None)

    def events(self) -> list[tuple[float, int, int]]:
        """Timed signals: seconds, process, signal."""
        found = []
        for fault in self.program["faults"]:
            if "after_ms" not in fault:
                continue
            every = range(len(self.pids))
            targets = [self.owner[fault["rank"]]] if "rank" in fault else list(every)
            after = fault["after_ms"] / 1000
            for target in targets:
                if fault["kind"] == "kill_at":
                    found.append((after, target, signal.SIGKILL))
                else:
                    found.append((after, target, signal.SIGSTOP))
                    found.append((after + fault["for_ms"] / 1000, target, signal.SIGCONT))
        return sorted(found)

    def wait(self, limit_s: float) -> str:
        """Waits until all have ended; at the limit returns the stacks of those that have not."""
        events = self.events()
        deadline = time.monotonic() + limit_s
        ready_at: float | None = None
        poll = select.poll()
        for pidfd in self.pidfds:
            poll.register(pidfd, select.POLLIN)
        running = set(range(len(self.pids)))
        while running and time.monotonic() < deadline:
            wait_s = deadline - time.monotonic()
            if events:
                if ready_at is None:
                    ready = (self.folder / f"ready{rank}" for rank in self.owner)
                    if all(path.exists() for path in ready):
                        ready_at = time.monotonic()
                    wait_s = 0.001
                if ready_at is not None:
                    wait_s = ready_at + events[0][0] - time.monotonic()
                    if wait_s <= 0:
                        _, target, number = events.pop(0)
                        if target in running:
                            _signal(self.pids[target], number)
                        continue
            for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000):
                index = self.pidfds.index(descriptor)
                _, status = os.waitpid(self.pids[index], 0)
                self.exits[index] = os.waitstatus_to_exitcode(status)
                running.discard(index)
                poll.unregister(descriptor)
        return self.stacks(running) if running else ""

    def stacks(self, running: set[int]) -> str:
        for index in running:
            _signal(self.pids[index], signal.SIGCONT)
            _signal(self.pids[index], signal.SIGUSR1)
        time.sleep(0.5)
        found = []
        for index in sorted(running):
            ranks = self.program["processes"][index]
            path = self.folder / f"stack{ranks[0]}"
            found.append(f"ranks {ranks}:\n" + (path.read_text() if path.exists() else ""))
        return "\n".join(found)

    def end(self) -> None:
        for index, pid in enumerate(self.pids):
            if self.exits[index] is None:
                _signal(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(self.pidfds[index])


def _run(program: Program) -> dict[str, Any]:
    import rank
    import reference

    # Short, because it is part of the names of Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="dscomm-test-walk-"))
    began = time.monotonic()
    known = _files()  # one of them may name an earlier process with a reused id
    job = _Job(program, folder)
    job.start(rank.serve)
    hung = job.wait(hard_limit_s(program))
    exits = list(job.exits)
    left = [str(pid) for pid in _session_members(set(job.pids)) if pid not in job.pids]
    job.end()
    left += sorted(_files_of(job.pids) - known)

    def text(name: str) -> str:
        path = folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    observed = reference.Observed(
        reports=[reference.parse_report(text(f"report{n}")) for n in range(program["size"])],
        exits=exits,
        pids=job.pids,
        outputs=[
            text(f"output{ranks[0]}") + text(f"stack{ranks[0]}") for ranks in program["processes"]
        ],
        left_behind=", ".join(left),
        hung=hung,
        seconds=time.monotonic() - began,
    )
    problems = reference.judge(program, observed)
    answer: dict[str, Any] = {"problems": problems, "seconds": round(observed.seconds, 3)}
    if problems:
        answer["outputs"] = observed.outputs
        answer["reports"] = [text(f"report{n}") for n in range(program["size"])]
    shutil.rmtree(folder, ignore_errors=True)
    return answer


def _serve() -> None:
    import rank  # noqa: F401
    import torch
    from torch.testing._internal.distributed import multi_threaded_pg  # noqa: F401

    import deepspeed_comm  # noqa: F401 - imported before the forks

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _run(json.loads(line))
        except Exception as error:
            import traceback

            answer = {"problems": [f"WALKER: {error!r}\n{traceback.format_exc()}"], "seconds": 0.0}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
