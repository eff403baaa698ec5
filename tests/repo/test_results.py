"""The kept results of benchmarks/ and the figures made of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# By file of results, the command that draws its figures.
DRAWN_BY = {
    "end_to_end.json": [str(ROOT / "benchmarks" / "end_to_end" / "bars.py")],
    "one_host.json": ["-m", "benchmarks.one_host.plot"],
    "one_host_ping_pong.json": ["-m", "benchmarks.one_host.plot"],
}


def test_every_results_file_has_figures() -> None:
    assert set(DRAWN_BY) == {file.name for file in RESULTS.glob("*.json")}


@pytest.mark.parametrize("name", DRAWN_BY)
def test_figures_are_drawn_from_the_kept_results(name: str, tmp_path: Path) -> None:
    shutil.copy(RESULTS / name, tmp_path)
    subprocess.run(
        [sys.executable, *DRAWN_BY[name], str(tmp_path / name)], cwd=ROOT, check=True, timeout=120
    )
    drawn = {file.name for file in tmp_path.glob("*.png")}
    assert drawn and drawn <= {file.name for file in RESULTS.glob("*.png")}
    assert all((tmp_path / file).read_bytes().startswith(b"\x89PNG") for file in drawn)


def test_speedups_on_the_benchmarks_page_match_the_results() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = json.loads((RESULTS / "end_to_end.json").read_text())["rows"]
    compared = {
        (row["workload"], row["metric"]): row["times_gloo"]
        for row in rows
        if row["contender"] == "dscomm" and row["times_gloo"] and row["workload"] != "overlap"
    }
    assert len(compared) == 10
    for ratio in compared.values():
        assert f" {ratio:.3g} x" in page or f" {ratio:.2f} x" in page or f" {ratio:.2g} x" in page
