"""benchmarks/end_to_end: it runs, has a row for everything, and notices where results differ.

The figures of a quick run say nothing, and nothing here looks at them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from over_both import needed

needed("rich")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "end_to_end"
sys.path.append(str(PROGRAM))

from rounds import Found, measure  # noqa: E402
from workload import Measured, Metric, Workload  # noqa: E402

BOTH = {"gloo", "dscomm"}
DIRECT = BOTH | {"dscomm direct"}
# Contenders by workload and metric.
EXPECTED = {
    ("decode_dtensor", "word"): BOTH,
    ("decode_all_reduce", "word"): DIRECT,
    ("train_ddp", "step"): BOTH,
    ("train_fsdp2", "step"): BOTH,
    ("checkpoints", "save"): BOTH,
    ("checkpoints", "load"): BOTH,
    ("objects", "barrier"): BOTH,
    ("objects", "broadcast"): BOTH,
    ("objects", "gather"): BOTH,
    ("overlap", "all_reduce"): BOTH,
    ("overlap", "matmul"): BOTH,
    ("overlap", "together"): BOTH,
    ("overlap", "ratio"): BOTH,
}
OF_DEEPSPEED = {("decode_autotp", "word"): DIRECT}


@pytest.mark.drill
def test_quick_run_has_all_rows_and_no_failures(tmp_path: Path) -> None:
    path = tmp_path / "end_to_end.json"
    result = subprocess.run(
        [sys.executable, str(PROGRAM), "--quick", "--json", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(path.read_text())
    assert found["failures"] == []
    rows: dict[tuple[str, str], set[str]] = {}
    for row in found["rows"]:
        rows.setdefault((row["workload"], row["metric"]), set()).add(row["contender"])
        assert row["median"] > 0 and len(row["rounds"]) == found["rounds"] == 1, row
        assert row["label"] in result.stdout
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    assert rows == (EXPECTED | OF_DEEPSPEED if has_deepspeed else EXPECTED)
    # What was left out is said.
    assert [note.split(":")[0] for note in found["notes"]] == [
        f"decode_autotp, {contender}"
        for contender in ("gloo", "dscomm", "dscomm direct", "DeepSpeed's op")
        if contender == "DeepSpeed's op" or not has_deepspeed
    ]


def _other_result(contender: str, quick: bool) -> Measured:
    return {"call": [1.0]}, contender


def _error(contender: str, quick: bool) -> Measured:
    if contender == "dscomm":
        raise ValueError("a mistake of this test's")
    return {"call": [1.0]}, None


@pytest.mark.parametrize(
    ("case", "message"),
    [(_other_result, "['dscomm', 'dscomm'] instead of ['gloo', 'gloo']"),
     (_error, "a mistake of this test's")],
)  # fmt: skip
def test_wrong_results_are_failures(case: Any, message: str) -> None:
    found = Found()
    measure("wrong", Workload({"call": Metric("a call", "us")}, case), 1, True, found)
    [failure] = found.failures
    assert failure.startswith("wrong, dscomm: ") and message in failure
