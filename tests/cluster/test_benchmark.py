"""make bench-hosts: a small run measures every contender, and unavailable libraries are reported.

The figures of a small run mean nothing, so the test does not check them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import libraries, runs, tables
from benchmarks.one_host.fetch import Unavailable
from tests.cluster.hosts import ROOT
from tests.cluster.jobs import has_mpich


def run(tmp_path: Path, flags: str) -> tuple[dict[str, Any], str]:
    """Returns the figures and the output."""
    path = tmp_path / "hosts.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.hosts", *flags.split(), "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text()), result.stdout


@pytest.mark.usefixtures("make_hosts")  # skips if hosts cannot be made
def test_small_run_measures_every_competitor(tmp_path: Path) -> None:
    flags = "--layouts 2x1 --wires 0 --collectives all_reduce --sizes 4096 --rounds 3 --passes 1 "
    flags += "--overlap-wires --bring-ups 0 --mpis debian mpich"
    found, said = run(tmp_path, flags)
    expected = {"debian": "Open MPI v", "mpich": "MPICH Version: "}
    if not has_mpich():
        assert "mpich is left out: dscomm was built without" in said
        del expected["mpich"]
    assert list(found["versions"]) == list(expected) and found["ours"] == "debian"
    for name, beginning in expected.items():
        assert found["versions"][name].startswith(beginning)
        assert f"{name}: {beginning}" in said
    [table] = found["times"]
    times = table["medians_us"]["all_reduce"]["4096"]
    columns = {f"{who} {name}" for who in ("dscomm", "mpi") for name in expected}
    assert set(times) == columns | {"gloo"} and all(us > 0 for us in times.values())


@pytest.mark.drill
@pytest.mark.usefixtures("make_hosts")  # skips if hosts cannot be made
def test_overlap_is_measured_for_dscomm_and_gloo(tmp_path: Path) -> None:
    flags = "--collectives --bring-ups 0 --mpis debian --overlap-wires 0 --overlap-rounds 1"
    found, said = run(tmp_path, flags)
    assert found["times"] == [] and "communication beside compute" in said
    calls = {"all_reduce", "matmul", "all_reduce beside matmul"}
    calls |= {"buckets", "step without them", "step"}
    [overlap] = found["overlap"]
    assert overlap["wire_mbit"] == 0 and set(overlap["medians_s"]) == {"dscomm", "gloo"}
    for seconds in overlap["medians_s"].values():
        assert set(seconds) == calls and min(seconds.values()) > 0


def test_unavailable_library_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> libraries.Library:
        raise Unavailable("no index was reached")

    monkeypatch.setitem(libraries.LIBRARIES, "openmpi5", missing)
    monkeypatch.setitem(libraries.LIBRARIES, "mpich", lambda: libraries.Library("MPICH 5", {}))
    assert list(libraries.available(["openmpi5", "mpich"])) == ["mpich"]
    said = capsys.readouterr().out
    assert said == "openmpi5 is left out: no index was reached\nmpich: MPICH 5\n"


def test_dscomm_is_compared_with_fastest_competitor(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"dscomm a": 2.0, "dscomm b": 1.0}
    times: runs.Times = {
        "gather": {
            "8": {**own, "mpi a": 5.0, "mpi b": 4.0, "gloo": 8.0},
            "4096": {**own, "mpi a": 1.0, "mpi b": 4.0, "gloo": 8.0},
            "8192": {**own, "mpi a": 5.0, "mpi b": 4.0, "gloo": 3.0},
        }
    }
    table = runs.Table(2, 1, 300, times)
    ratios = [(cell.mpi, cell.gloo, cell.winner) for cell in tables.cells_of(table, "a")]
    assert ratios == [(2.0, 4.0, "mpi b"), (0.5, 4.0, "mpi a"), (2.0, 1.5, "gloo")]
    tables.print_summaries([table], "a")
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[3] == ["gather", "0.50", "1.00", "1.50"]
    assert said[8] == ["gather", "2.00", "2.00", "2.00", "4.00", "4.00", "4.00"]
    assert " ".join(said[-1]) == "2 hosts x 1, wire 300 Mbit/s gather 4096 0.50 mpi a"
