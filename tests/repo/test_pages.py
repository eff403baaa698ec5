"""What the pages tell people to type works: programs run, commands exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from launch import torchrun
from source_tree import ROOT, name_of, tracked_files

from deepspeed_comm.__main__ import PROGRAMS

PAGES = [file for file in tracked_files() if file.suffix == ".md"]
BLOCKS = [
    (page, number, language, text)
    for page in PAGES
    for number, (language, text) in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S), start=1
    )
]


def blocks_in(language: str) -> list:
    return [
        pytest.param(page, text, id=f"{name_of(page)}-{number}")
        for page, number, of, text in BLOCKS
        if of == language
    ]


@pytest.mark.parametrize(("page", "program"), blocks_in("python"))
def test_programs_of_pages_run(page: Path, program: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(program)
    result = torchrun("example.py", folder=tmp_path)
    assert result.returncode == 0, f"{program}\n{result.stdout}{result.stderr}"


def test_program_of_the_readme_is_six_lines_and_correct(tmp_path: Path) -> None:
    [program] = [
        text for page, _, of, text in BLOCKS if page == ROOT / "README.md" and of == "python"
    ]
    assert len([line for line in program.splitlines() if line]) == 6
    (tmp_path / "example.py").write_text(program)
    result = torchrun("example.py", ranks=3, folder=tmp_path)
    # 0 + 1 + 2, on every rank. The ranks write to one pipe, so lines may run together.
    assert result.stdout.count("3.0") == 3, result.stdout + result.stderr


@pytest.mark.parametrize(("page", "commands"), blocks_in("sh"))
def test_commands_of_pages_exist(page: Path, commands: str) -> None:
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


@pytest.mark.parametrize(("page", "script"), blocks_in("bash"))
def test_bash_scripts_of_pages_parse(page: Path, script: str) -> None:
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
