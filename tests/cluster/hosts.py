"""Hosts for tests, all on this machine: sets of namespaces, linked by a switch.

A host has its own network, mount, UTS, IPC and PID namespaces: its own name (host-a, host-b, ...),
address (10.77.0.1, ...), processes, and an empty /tmp and /dev/shm. The rest of the file system is
the machine's, so the same Python runs there. Hosts reach each other over a bridge in another
network namespace, and nothing else: none has a route to the outside.

Nothing here has a name that other users could see or that could be left behind. A host lives as
long as its process 1, and that lives as long as a pipe of the test process: however the test
process ends, the kernel removes the host's processes, links and files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.cluster.host_init import EMPTIED

ROOT = Path(__file__).resolve().parents[2]
_INIT = Path(__file__).with_name("host_init.py")
_NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid"]
# Longer than any command here takes on a loaded machine.
_COMMAND_LIMIT_S = 20.0


class HostsFailure(AssertionError):
    """Hosts cannot be made, or a command on a host fails."""


@functools.cache
def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts on this machine need root"
    for command in ("ip", "unshare", "nsenter"):
        if shutil.which(command, path=_path()) is None:
            return f"hosts on this machine need the command {command} (iproute2 and util-linux)"
    attempt = "ip link add name v0 type veth peer name v1 && ip link add name b0 type bridge"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", attempt],
        capture_output=True,
        text=True,
        env={"PATH": _path()},
        timeout=_COMMAND_LIMIT_S,
    )
    if tried.returncode != 0:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"namespaces or bridges are not allowed here: {reason}"
    return ""


def _path() -> str:
    """The search path for commands; networking commands may be outside of a user's PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _kept_folders(more: Iterable[Path]) -> list[str]:
    """The folders below /tmp and /dev/shm that the tests' own programs need."""
    wanted = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *more}
    wanted |= {Path(entry) for entry in sys.path if entry and Path(entry).is_dir()}
    below = {
        str(path.resolve())
        for path in wanted
        if any(Path(place) in path.resolve().parents for place in EMPTIED)
    }
    return sorted(path for path in below if not any(str(p) in below for p in Path(path).parents))


def base_environment() -> dict[str, str]:
    """This process's environment, without the variables of an outer launcher."""
    launchers = ("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "DSCOMM_", "GLOO_", "SLURM_")
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launchers) and name not in (*own, "MASTER_PORT")
    }
    python = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    mpi = {"DSCOMM_MPI": os.environ.get("TEST_CLUSTER_MPI", "openmpi")}
    return {**kept, **python, **mpi, "PATH": _path(), "OMP_NUM_THREADS": "1"}


class HostProcess:
    """A command that runs in a host, with its pid on this machine and its output."""

    def __init__(self, entered: subprocess.Popen[bytes], argv: Sequence[str], output: Path) -> None:
        self.argv = list(argv)
        self.output_path = output
        self._entered = entered  # nsenter, which waits for the command and then exits

    @functools.cached_property
    def pid(self) -> int:
        """The pid on this machine, for signals."""
        deadline = time.monotonic() + _COMMAND_LIMIT_S
        while time.monotonic() < deadline:
            if children := _children(self._entered.pid):
                return children[0]
            if self._entered.poll() is not None:
                break
            time.sleep(0.002)
        raise HostsFailure(f"{self.argv} is not running\n{self.output()}")

    def exit_code(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return self._entered.poll()

    def wait(self, limit_s: float) -> int | None:
        try:
            return self._entered.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def close(self) -> None:
        """Call it when the host is empty. nsenter ends, and stops, with its command."""
        for number, limit_s in ((signal.SIGCONT, 5.0), (signal.SIGKILL, 5.0)):
            if self._entered.poll() is None:
                self._entered.send_signal(number)
                self.wait(limit_s)


@dataclasses.dataclass
class Host:
    number: int
    name: str
    address: str
    folder: Path  # for its processes' output
    kept: list[str]

    def __post_init__(self) -> None:
        self.pid = 0  # its process 1's pid on this machine
        self._init: subprocess.Popen[bytes] | None = None
        self._processes: list[HostProcess] = []
        self._started = 0

    def boot(self, names: str) -> None:
        settings = json.dumps({"name": self.name, "kept": self.kept, "names": names})
        init = [sys.executable, "-I", "-S", str(_INIT), settings]
        self._init = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", *init],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt goes to the test only, which then ends the host
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"ready\n":
            self._init.kill()
            raise HostsFailure(f"{self.name} does not start: {self._init.stdout.read().decode()}")
        self.pid = _children(self._init.pid)[0]
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")

    def start(self, argv: Sequence[str], env: dict[str, str] | None = None) -> HostProcess:
        """Runs a command in the host, in a new session."""
        self._started += 1
        output = self.folder / f"{self.name}-{self._started}.txt"
        with output.open("wb") as file:
            entered = subprocess.Popen(
                [*self._enter(), *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=base_environment() | (env or {}),
                start_new_session=True,
            )
        process = HostProcess(entered, argv, output)
        self._processes.append(process)
        return process

    def run(self, *argv: str, limit_s: float = _COMMAND_LIMIT_S) -> str:
        """Runs a short command, which must succeed, and returns its output."""
        process = self.start(argv)
        if (code := process.wait(limit_s)) != 0:
            raise HostsFailure(f"{argv} on {self.name} gave {code}: {process.output()}")
        return process.output()

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *(namespaces or _NAMESPACES), "--"]

    def processes(self) -> dict[int, str]:
        """All processes of the host except process 1, by their pids on this machine."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                if os.readlink(entry / "ns" / "pid") != self._namespace:
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(entry.name)] = words or (entry / "comm").read_text().strip()
            except OSError:
                continue  # the process has ended
        return found

    def pid_here(self, pid_there: int) -> int:
        """The pid on this machine of a process, given its pid within the host."""
        for pid in self.processes():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if int(numbers.split()[-1]) == pid_there:
                return pid
        raise HostsFailure(f"{self.name} has no process {pid_there}: {self.processes()}")

    def files(self) -> list[str]:
        """The files in /tmp and /dev/shm, outside of the kept folders."""
        on_the_way = {str(parent) for path in self.kept for parent in Path(path).parents}
        found = []

        def look(folder: str) -> None:
            for entry in os.scandir(f"/proc/{self.pid}/root{folder}"):
                path = f"{folder}/{entry.name}"
                if path in on_the_way:
                    look(path)
                elif path not in self.kept:
                    found.append(path)

        for place in EMPTIED:
            look(place)
        return sorted(found)

    def leftovers(self, limit_s: float = 0.0) -> list[str]:
        """Processes and files; with a limit, those that remain after it."""
        deadline = time.monotonic() + limit_s
        while True:
            left = [f"process {pid}: {words}" for pid, words in self.processes().items()]
            left += [f"file {path}" for path in self.files()]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Kills all processes of the host."""
        deadline = time.monotonic() + _COMMAND_LIMIT_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in self._processes:
                process.exit_code()  # reaps it
            time.sleep(0.01)
        for process in self._processes:
            process.close()
        self._processes.clear()

    def shut_down(self) -> None:
        if self._init is None:
            return
        assert self._init.stdin is not None and self._init.stdout is not None
        try:
            if self.pid != 0:
                self.kill_all()
        finally:
            self._init.stdin.close()
            try:
                self._init.wait(_COMMAND_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._init.kill()  # and thereby process 1 of the host
                self._init.wait()
            self._init.stdout.close()
            self._init, self.pid = None, 0

    def set_network(self, *lines: str) -> None:
        """Runs ip(8) commands in the host's network namespace."""
        _batch(self._enter("--net"), ["ip", "-batch", "-"], lines)

    def set_rate(self, *lines: str) -> None:
        _batch(self._enter("--net"), ["tc", "-batch", "-"], lines)


class _Switch:
    """The bridge, in a network namespace that lives as long as a pipe of this process."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(b"there\n")
        self._holder.stdin.flush()
        if self._holder.stdout.readline() != b"there\n":
            raise HostsFailure("unshare --net does not start")
        self.set_network("link add name bridge0 type bridge", "link set bridge0 up")

    def set_network(self, *lines: str) -> None:
        _batch(self._enter(), ["ip", "-batch", "-"], lines)

    def set_rate(self, *lines: str) -> None:
        _batch(self._enter(), ["tc", "-batch", "-"], lines)

    def forward(self) -> None:
        """Routes packets between subnets."""
        _batch(self._enter(), ["tee", "/proc/sys/net/ipv4/ip_forward"], ["1"])

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--"]

    def close(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(_COMMAND_LIMIT_S)
        self._holder.stdout.close()


class Hosts:
    """Context manager: `count` hosts that reach each other.

    With is_routed each host has its own subnet (10.78.1.0/24, ...), and the switch routes between
    them. With is_ipv6 the hosts have only IPv6 addresses (fd77::1, ...).
    """

    def __init__(
        self, count: int, folder: Path, is_routed: bool = False, is_ipv6: bool = False
    ) -> None:
        if why_not():
            raise HostsFailure(why_not())
        kept = _kept_folders([folder])
        self._hosts = [
            Host(
                k,
                f"host-{'abcdefgh'[k]}",
                f"fd77::{k + 1}"
                if is_ipv6
                else f"10.78.{k + 1}.2"
                if is_routed
                else f"10.77.0.{k + 1}",
                folder,
                kept,
            )
            for k in range(count)
        ]
        self.folder = folder
        self._is_routed = is_routed
        self._switch: _Switch | None = None
        self._stack = contextlib.ExitStack()  # closes each, even if another fails

    def __enter__(self) -> Hosts:
        names = "127.0.0.1 localhost\n"
        names += "".join(f"{host.address} {host.name}\n" for host in self._hosts)
        try:
            self._switch = _Switch()
            self._stack.callback(self._switch.close)
            for host in self._hosts:
                self._stack.callback(host.shut_down)
                host.boot(names)
                self._connect(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _connect(self, host: Host) -> None:
        port = f"port{host.number}"
        self.switch.set_network(
            f"link add name {port} type veth peer name eth0 netns {host.pid}",
            f"link set {port} up" if self._is_routed else f"link set {port} master bridge0 up",
        )
        # Without duplicate address detection, an IPv6 address is usable at once.
        network = f"{host.address}/64 nodad" if ":" in host.address else f"{host.address}/24"
        host.set_network("link set lo up", f"addr add {network} dev eth0", "link set eth0 up")
        if self._is_routed:
            router = host.address.removesuffix(".2") + ".1"
            self.switch.set_network(f"addr add {router}/24 dev {port}")
            self.switch.forward()
            host.set_network(f"route add default via {router}")

    @property
    def switch(self) -> _Switch:
        assert self._switch is not None, "the hosts are not up"
        return self._switch

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    # --- the network

    def link_down(self, number: int) -> None:
        """Unplugs a host's cable: its interface has no carrier."""
        self.switch.set_network(f"link set port{number} down")

    def link_up(self, number: int) -> None:
        self.switch.set_network(f"link set port{number} up")

    def drop_packets(self, number: int) -> None:
        """Drops a host's packets in both directions; its interface does not notice."""
        self.switch.set_network(f"link set port{number} nomaster")

    def pass_packets(self, number: int) -> None:
        self.switch.set_network(f"link set port{number} master bridge0")

    def limit(self, mbit: float) -> None:
        """Limits the rate of every link, separately in each direction."""
        shape = f"root tbf rate {mbit}mbit burst 128kb latency 50ms"
        for host in self._hosts:
            host.set_rate(f"qdisc replace dev eth0 {shape}")
            self.switch.set_rate(f"qdisc replace dev port{host.number} {shape}")

    def add_same_bridge(self, numbers: Iterable[int] | None = None) -> None:
        """Adds a bridge with the same address to every host, as container engines do."""
        for number in range(len(self)) if numbers is None else numbers:
            self[number].set_network(
                "link add name docker0 type bridge",
                "addr add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
                # An attached interface, without which the bridge would be down.
                "link add name container type veth peer name engine",
                "link set engine master docker0 up",
                "link set container up",
            )

    # --- leftovers

    def leftovers(self, limit_s: float = 0.0) -> dict[str, list[str]]:
        """The leftovers of every host that has any."""
        deadline = time.monotonic() + limit_s
        left = {h.name: h.leftovers(max(0.0, deadline - time.monotonic())) for h in self._hosts}
        return {name: things for name, things in left.items() if things}

    def kill_all(self) -> None:
        for host in self._hosts:
            host.kill_all()


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _batch(enter: list[str], command: list[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*enter, *command],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        env={"PATH": _path()},
        timeout=_COMMAND_LIMIT_S,
    )
    if done.returncode != 0:
        raise HostsFailure(f"{command[0]} refused {list(lines)}: {done.stderr.strip()}")
