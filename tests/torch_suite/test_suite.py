"""PyTorch's own DistributedTest over dscomm: no test that gloo passes may fail.

Runs the tests that gloo runs to an end, on four ranks: these include all that gloo passes on two.
The drill also runs them on two. With TEST_DRILL=1 it runs all, also those that only find out that
there is no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The baseline is of this torch; another has other tests.
TESTED_TORCH = "2.13."

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith(TESTED_TORCH),
        reason=f"the suite and its baseline are torch {TESTED_TORCH}x's, not {torch.__version__}'s",
    ),
    # A test that hangs ends at its own limit and is named; this is for many that do.
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.drill), 4])
def test_dscomm_passes_every_test_that_gloo_passes(ranks: int, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.torch_suite.run", "--backend", "dscomm"]
    command += ["--ranks", str(ranks), "--json", str(report)]
    if os.environ.get("TEST_DRILL") != "1":
        command.append("--subset")

    # The output is shown with a failure, and by pytest -s as the tests go by.
    with _running(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
        status = process.wait()

    outcomes = json.loads(report.read_text()) if report.exists() else None
    assert outcomes is not None, f"the runner ended with status {status} and no report"
    assert not outcomes["unexpected"], json.dumps(outcomes["unexpected"], indent=1)
    assert status == 0
    passed = [test for test in outcomes["tests"].values() if test["outcome"] == "passed"]
    assert passed, "nothing was run"


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        # The runner takes its ranks with it.
        process.terminate()
        process.wait()
