"""Every program in examples/ runs as its first lines say, and prints what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import torchrun
from source_tree import ROOT

# What each prints, as a regular expression.
PRINTS = {
    "all_reduce": r"the sum of 1 to 2 is 3\n"
    r"the largest rank is 1, and the last square 998001\n"
    r"1 of 2 ranks have an even number\n",
    "ddp_training": r"(epoch \d: loss 0\.0\d+\n|epoch 1: loss [\d.]+\n){5}"
    r"learnt 2\.0\d, -(1\.0|0\.9)\d, 0\.(5|4)\d, (3\.0|2\.9)\d\n",
    "communication_log": r"(?s).*Comm\. Op +Message Size.*all_reduce.*reduce_scatter_tensor.*"
    r"all_gather_into_tensor.*\n60 calls were logged\n",
    "tensor_parallel": r"2 ranks with 262144 weights each, as one of all\n",
}


@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_prints_the_expected_lines(program: Path, tmp_path: Path) -> None:
    # As it is told to be started, but with the torchrun of this environment and a port of its own.
    command = f"torchrun --nproc-per-node=2 examples/{program.name}"
    assert command in [line.strip() for line in program.read_text().splitlines()]
    result = torchrun(str(program), folder=tmp_path, timeout_s=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(PRINTS[program.stem], result.stdout), result.stdout + result.stderr


def test_every_expectation_has_its_example() -> None:
    assert set(PRINTS) == {program.stem for program in (ROOT / "examples").glob("*.py")}
