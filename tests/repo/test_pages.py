"""What the pages tell people to type works: programs run, commands exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import torchrun
from source_tree import ROOT, name_of, tracked_files

from deepspeed_comm.__main__ import PROGRAMS
from tests.cases.rank_processes import Job, World

PAGES = [file for file in tracked_files() if file.suffix == ".md"]
BLOCKS = [
    (page, number, language, text)
    for page in PAGES
    for number, (language, text) in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S), start=1
    )
]


def blocks_in(language: str, besides: str = "") -> list:
    return [
        pytest.param(text, id=f"{name_of(page)}-{number}")
        for page, number, of, text in BLOCKS
        if of == language and name_of(page) != besides
    ]


def _run_as_rank(world: World, program: str, port: int) -> None:
    """What torchrun does for a rank, without the seconds that importing torch takes."""
    of_a_launcher = {
        "RANK": world.rank,
        "LOCAL_RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher keeps the store
    }
    os.environ.update({name: str(value) for name, value in of_a_launcher.items()})
    os.chdir(world.folder)
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("program", blocks_in("python", besides="README.md"))
def test_programs_of_pages_run(program: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Job(2, _run_as_rank, program, store.port) as job:
        job.results()


def test_program_of_the_readme_is_six_lines_and_correct(tmp_path: Path) -> None:
    [program] = [
        text for page, _, of, text in BLOCKS if page == ROOT / "README.md" and of == "python"
    ]
    assert len([line for line in program.splitlines() if line]) == 6
    (tmp_path / "example.py").write_text(program)
    result = torchrun("example.py", ranks=3, folder=tmp_path)
    # 0 + 1 + 2, on every rank. The ranks write to one pipe, so lines may run together.
    assert result.stdout.count("3.0") == 3, result.stdout + result.stderr


@pytest.mark.parametrize("commands", blocks_in("sh"))
def test_commands_of_pages_exist(commands: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in commands.splitlines():
        line = line.split("#")[0]
        if re.match(r"\s*make\b", line):
            line = re.sub(r'"[^"]*"', "", line)  # without the words of ARGS
            assert set(re.findall(r"\s([a-z]+)(?=\s|$)", line)) <= targets, line
        for module in re.findall(r"-m ((?:deepspeed_comm|tests)[\w.]*)", line):
            assert importlib.util.find_spec(module), line
        for word in re.findall(r"^\s*dscomm (\w+)", line):
            assert word in PROGRAMS, line
        for path in re.findall(r"(?:^|\s)((?:tools|tests|docs|csrc|examples)/[\w./-]+)", line):
            assert (ROOT / path).exists(), line


@pytest.mark.parametrize("script", blocks_in("bash"))
def test_bash_scripts_of_pages_parse(script: str) -> None:
    result = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=60
    )
    assert result.returncode == 0, f"{script}\n{result.stderr}"


def test_versions_on_the_deployment_page_match_the_setup() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    setup = (ROOT / "tools" / "setup").read_text()
    installed = dict(re.findall(r'_requirement="(\w+)==([\d.]+)"', setup))
    assert installed.keys() == {"torch", "mpich"}
    for name, version in installed.items():
        [row] = re.findall(rf"^\| {name} \|.*", page, re.M | re.I)
        assert f" {version} " in row, row


def test_every_code_block_has_a_language() -> None:
    assert [f"{name_of(page)}, block {number}" for page, number, of, _ in BLOCKS if not of] == []
