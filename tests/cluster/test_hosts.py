"""The harness itself: hosts are isolated, their network works as configured, and failures are
reported."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Hosts, HostsFailure
from tests.cluster.jobs import JobFailure, fork_rank, start_ranks

MakeHosts = Callable[[int], Hosts]
LISTEN = """
import socket
server = socket.create_server(("", 4000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    got = 0
    while data := connection.recv(1 << 16):
        got += len(data)
    connection.sendall(str(got).encode())
    connection.close()
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4000), timeout=1)
began_s = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(100).decode() == sys.argv[2]
print(time.monotonic() - began_s)
"""


def listen(hosts: Hosts, number: int) -> None:
    process = hosts[number].start([sys.executable, "-c", LISTEN])
    deadline = time.monotonic() + 20
    while "listening" not in process.output():
        assert process.exit_code() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.01)


def send(hosts: Hosts, sender: int, receiver: int, count: int = 1000) -> float:
    """Returns the seconds that it took; raises HostsFailure if the data does not arrive."""
    words = [hosts[receiver].name, str(count)]
    return float(hosts[sender].run(sys.executable, "-c", SEND, *words))


def test_hosts_share_no_namespace_and_no_file(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    for host in hosts:
        host.run("sh", "-c", "echo $$ > /tmp/mine; touch /dev/shm/mine")
    assert [host.run("hostname").strip() for host in hosts] == ["host-a", "host-b"]
    for what in ("net", "mnt", "uts", "ipc", "pid"):
        seen = [host.run("readlink", f"/proc/self/ns/{what}") for host in hosts]
        assert len({*seen, os.readlink(f"/proc/self/ns/{what}") + "\n"}) == 3, what
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()
    found = {host.name: ["file /dev/shm/mine", "file /tmp/mine"] for host in hosts}
    assert hosts.leftovers() == found
    # It sees only its own processes.
    assert hosts[0].run("sh", "-c", "ls -d /proc/[0-9]* | wc -l").strip() in ("2", "3", "4")
    assert socket.gethostname() not in ("host-a", "host-b")


def test_host_has_no_route_outside(make_hosts: MakeHosts) -> None:
    for host in make_hosts(2):
        routes = host.run("ip", "route").splitlines()
        assert [line.split()[0] for line in routes] == ["10.77.0.0/24"]
        with pytest.raises(HostsFailure, match="Network is unreachable"):
            connect = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
            host.run(sys.executable, "-c", connect)


@pytest.mark.parametrize(
    ("cut", "mend"), [("link_down", "link_up"), ("drop_packets", "pass_packets")]
)
def test_network_cut_stops_traffic_until_mended(make_hosts: MakeHosts, cut: str, mend: str) -> None:
    hosts = make_hosts(3)
    listen(hosts, 1)
    send(hosts, 0, 1)
    getattr(hosts, cut)(1)
    carrier = hosts[1].run("ip", "link", "show", "eth0")
    assert ("NO-CARRIER" in carrier) == (cut == "link_down")
    for sender in (0, 2):
        with pytest.raises(HostsFailure, match=r"timed out|No route to host"):
            send(hosts, sender, 1)
    getattr(hosts, mend)(1)
    for sender in (0, 2):
        send(hosts, sender, 1)


def test_transfer_at_limited_rate_takes_longer(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    listen(hosts, 1)
    free_s = send(hosts, 0, 1, 4_000_000)
    hosts.limit(40)
    # 32 Mbit, of which a burst passes at once.
    assert max(0.6, free_s) < send(hosts, 0, 1, 4_000_000) < 5.0


def test_bridge_with_same_address_keeps_hosts_connected(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    hosts.add_same_bridge()
    listen(hosts, 1)
    send(hosts, 0, 1)
    for host in hosts:
        shown = host.run("ip", "-brief", "address")
        assert re.search(r"docker0 .*172\.17\.0\.1/16", shown), shown
        assert re.search(r"eth0\S* .*10\.77\.0\.\d/24", shown), shown


def test_orphans_are_found_and_ended(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    process = hosts[1].start(["sh", "-c", "sleep 1000 & exec sleep 2000"])
    deadline = time.monotonic() + 20
    while len(hosts[1].processes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10.0) == -signal.SIGKILL
    (left,) = hosts.leftovers(limit_s=0.2)["host-b"]
    assert left.endswith("sleep 1000")
    pid = int(left.split()[1].rstrip(":"))
    hosts.close()
    assert not Path(f"/proc/{pid}").exists()


def test_death_of_the_test_process_ends_all_hosts(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Even if it is killed, and can do nothing about it."""
    make_hosts(1)  # skips if hosts cannot be made
    script = f"""
        import os, signal
        from pathlib import Path
        from tests.cluster.hosts import Hosts
        hosts = Hosts(2, Path({str(tmp_path)!r})).__enter__()
        hosts[1].start(["sleep", "1000"]).pid
        inits = [host.pid for host in hosts]
        print(*inits, *hosts[1].processes(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stdout
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


# --- jobs


def test_failing_rank_fails_the_job_with_its_output(make_hosts: MakeHosts) -> None:
    job = start_ranks(make_hosts(2), [0, 1], "misbehaves.py", "fails")
    with job, pytest.raises(JobFailure, match="not every process ended well") as caught:
        job.results()
    text = str(caught.value)
    assert "ValueError: on purpose" in text
    assert all(f"rank {rank} was here" in text for rank in (0, 1))


def test_hanging_rank_is_named_and_ended(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    with start_ranks(hosts, [0, 1], "misbehaves.py", "hangs") as job:
        job.wait_for("done", [0])
        with pytest.raises(JobFailure, match=r"rank 1 on host-b does not end"):
            job.results(limit_s=2.0)
        assert len(hosts[1].processes()) == 1
    assert hosts.leftovers() == {}


def test_rank_that_ends_without_result_fails_the_job(make_hosts: MakeHosts) -> None:
    job = start_ranks(make_hosts(2), [0, 1], "misbehaves.py", "silent")
    with job, pytest.raises(JobFailure, match="rank 1 ended before 'done'"):
        job.results()


def test_forked_rank_is_a_process_of_its_host(make_hosts: MakeHosts, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, os, socket, sys\n"
        "atexit.register(lambda: print('at its end'))\n"
        "print(sys.argv[1:], os.environ['COLOUR'], socket.gethostname(), os.listdir('/dev/shm'))\n"
        "print(os.getpid(), os.getppid(), os.getcwd(), 'PATH' in os.environ)\n"
        "sys.exit(3)\n"
    )
    hosts = make_hosts(2)
    hosts[1].run("touch", "/dev/shm/there")
    rank = fork_rank(hosts[1], program, ["a", "b c"], {"COLOUR": "blue"}, tmp_path / "output")
    deadline = time.monotonic() + 60
    while rank.exit_code() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lines = rank.output().splitlines()
    assert lines[0] == "['a', 'b c'] blue host-b ['there']"
    pid, parent, folder, has_path = lines[1].split()
    assert int(pid) < 10 and (parent, folder, has_path) == ("0", "/", "True")
    assert lines[2:] == ["at its end"] and rank.exit_code() == 3
