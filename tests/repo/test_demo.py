"""The demo trains, says what it did, and times both backends."""

from __future__ import annotations

import re
import subprocess
import sys

from launch import torchrun, torchrun_on_a_terminal
from source_tree import ROOT

QUICK = ("--epochs", "1", "--sizes", "8", "64K", "--rounds", "3")


def run_demo(*options: str) -> str:
    result = torchrun("-m", "deepspeed_comm.demo", *QUICK, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def accuracy(output: str) -> float:
    [found] = re.findall(r"held-out accuracy ([\d.]+) on 360 digits", output)
    return float(found)


def losses(output: str) -> list[str]:
    return re.findall(r"epoch +\d+ +loss ([\d.]+)", output)


def timed(output: str) -> dict[int, list[float]]:
    """By bytes: the times on dscomm and on gloo, and the ratio."""
    [table] = re.findall(r"^ +bytes +dscomm +gloo +gloo/dscomm\n((?: +[\d. ]+\n)+)", output, re.M)
    rows = [line.split() for line in table.splitlines()]
    return {int(row[0]): [float(cell) for cell in row[1:]] for row in rows}


def check_table(output: str) -> None:
    table = timed(output)
    assert list(table) == [8, 65536]
    for dscomm, gloo, ratio in table.values():
        assert dscomm > 0 and gloo > 0
        assert abs(gloo / dscomm - ratio) <= 0.01 + 0.1 * ratio
    assert "every result was checked" in output


def test_demo_trains_on_dscomm() -> None:
    output = run_demo()
    assert accuracy(output) > 0.8
    check_table(output)
    for rank in range(2):
        [line] = re.findall(rf"^  rank {rank}: (.*)$", output, re.M)
        assert "dscomm, shared memory, 2 ranks, reductions on" in line
        assert re.search(r"cpus [\d,-]+ \(", line)

    # DDP reduces every gradient once a step: 22 steps of 301066 float32.
    [(calls, megabytes)] = re.findall(r"^  all_reduce +(\d+) calls +([\d.]+) MB", output, re.M)
    assert int(calls) >= 22
    assert 26.49 <= float(megabytes) < 27
    # No bar and no control characters away from a terminal.
    assert "\x1b" not in output

    # Two addends have one order, so gloo gets the same bits.
    other = run_demo("--backend", "gloo")
    assert losses(other) == losses(output) and len(losses(output)) == 1
    assert accuracy(other) == accuracy(output)
    check_table(other)


def test_demo_with_three_ranks_on_a_terminal_shows_a_progress_bar() -> None:
    status, output = torchrun_on_a_terminal("-m", "deepspeed_comm.demo", *QUICK, ranks=3)
    assert status == 0, output
    assert "\x1b[" in output
    output = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output).replace("\r\n", "\n")
    check_table(output)
    assert len(re.findall(r"^  rank \d: ", output, re.M)) == 3
    assert re.search(r"training .*\b100%", output)
    assert accuracy(output) > 0.8
    assert len(losses(output)) == 1


def test_demo_without_launcher_names_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deepspeed_comm.demo"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "torchrun --nproc-per-node=2 -m deepspeed_comm.demo" in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_refuses_size_that_is_no_multiple_of_an_element() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deepspeed_comm.demo", "--sizes", "6"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "expected a multiple of 4 bytes, got 6" in result.stderr
