"""What measures the cost of the log runs, and has all of its columns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_log_cost_benchmark_fills_every_column(tmp_path: Path) -> None:
    found = tmp_path / "cost.json"
    program = str(ROOT / "benchmarks" / "log_cost.py")
    result = subprocess.run(
        [sys.executable, program, "--rounds", "3", "--json", str(found)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(found.read_text())
    assert len(rows) == 4 and len(result.stdout.splitlines()) == 1 + len(rows)
    for times in rows.values():
        assert list(times) == ["backend", "bare", "off", "package", "on", "traced", "log"]
        assert all(times[key] > 0 for key in times if key != "log")
