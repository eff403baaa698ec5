"""The command `dscomm`: its words lead to the programs, and what it shows of this host is true."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_comm import __main__ as command
from deepspeed_comm import _plugin
from deepspeed_comm._plugin import native_folder

LIMIT_S = 120
ROOT = Path(__file__).resolve().parents[2]
# The module itself is not loaded: ranks of other tests are forks of this process, and look at that.
NATIVE = Path(native_folder(torch.__version__))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DSCOMM_")}
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_comm", *words],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_every_subcommand_has_module_and_usage() -> None:
    usage = command.__doc__ or ""
    for word, module in command.PROGRAMS.items():
        assert importlib.util.find_spec(module) is not None and f"    dscomm {word} " in usage


def test_unknown_subcommand_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["wat"]) == 2
    assert "expected one of info, config, doctor, bench, plot, records, got 'wat'" in (
        capsys.readouterr().err
    )
    assert command.main(["--help"]) == 0 and command.main([]) == 2
    assert capsys.readouterr().out.count("dscomm info") == 2


def test_info_of_sound_host_matches_torch_and_extension() -> None:
    mpi = "mpich" if (NATIVE / "libdscomm_mpich.so").exists() else "auto"
    result = run("info", "--json", DSCOMM_MPI=mpi)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["torch"] == f"{torch.__version__}, {torch.__file__}"
    built = facts["native module"]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert built.startswith(f"built against torch {minor}.")
    assert " computes with " in built and f", {NATIVE}/_C" in built
    assert facts["inside a host"] == "shared memory"
    named = {"mpich": "MPICH (built with ", "auto": ("Open MPI (built with ", "nothing: ")}[mpi]
    assert facts["between hosts"].startswith(named)
    for name, text in facts.items():
        assert name and text and "\n" not in text


def test_config_shows_each_setting_and_its_origin() -> None:
    result = run("config", "--json", DSCOMM_YIELD_US="100", DSCOMM_MPI="")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    rows = {row["name"]: row for row in shown["settings"]}
    page = (ROOT / "docs" / "settings.md").read_text()
    assert list(rows) == re.findall(r"^\| `(DSCOMM_\w+)`", page, re.M)
    assert (rows["DSCOMM_YIELD_US"]["value"], rows["DSCOMM_YIELD_US"]["origin"]) == (
        "100",
        "environment",
    )
    assert (rows["DSCOMM_MPI"]["value"], rows["DSCOMM_MPI"]["origin"]) == ("auto", "default")
    assert shown["mistakes"] == []


def test_config_with_mistakes_names_each() -> None:
    result = run("config", "--changed", DSCOMM_YIELD_US="fast", DSCOMM_YELD_US="3")
    assert result.returncode == 1
    assert result.stdout == "DSCOMM_YIELD_US  fast us  environment  default 200\n"
    assert "mistake: DSCOMM_YIELD_US=" in result.stderr
    assert "mistake: DSCOMM_YELD_US is not a setting" in result.stderr


def test_arguments_after_subcommand_reach_the_program() -> None:
    result = run("config", "--wat")
    assert result.returncode == 2 and "dscomm config: error" in result.stderr


def test_closed_output_ends_without_traceback() -> None:
    words = ("-m", "deepspeed_comm", "config")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        result = subprocess.run(
            [sys.executable, *words], stdout=output, stderr=subprocess.PIPE, timeout=LIMIT_S
        )
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m deepspeed_comm.doctor --json", True),
        ("python -m deepspeed_comm info", True),
        ("python -I -m deepspeed_comm doctor", True),
        ("python /opt/env/bin/dscomm config", True),
        ("python /opt/env/bin/dscomm bench doctor", False),
        ("python -m deepspeed_comm bench", False),
        ("python -m deepspeed_comm.bench doctor", False),
        ("python train.py doctor", False),
        ("python train.py --backend dscomm config", False),
        ("python train.py -m deepspeed_comm info", False),
        ("python -X faulthandler -u /opt/env/bin/dscomm info", True),
        ("python /src/dscomm", False),
        ("python -um deepspeed_comm.doctor", True),
        ("python", False),
    ],
)
def test_diagnostic_command_is_recognised(
    monkeypatch: pytest.MonkeyPatch, words: str, expected: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words.split())
    assert _plugin.only_examines() is expected
