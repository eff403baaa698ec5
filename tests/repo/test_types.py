"""Types: the package passes mypy, programs that use it are checked, the stubs say what there is."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

import deepspeed_comm
from deepspeed_comm._plugin import load_extension

STUB = ROOT / "deepspeed_comm" / "_C.pyi"
CACHE = ROOT / "build" / "mypy"
needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None,
    reason="mypy is not installed: pip install -r requirements-test.txt",
)

PROGRAM = """
from typing import assert_type

import torch

import deepspeed_comm as dist
from deepspeed_comm._C import DscommBackend, reduce_target, settings

dist.init_distributed()
dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM, group=dist.get_world_group())
dist.broadcast(tensor=torch.ones(3), src=0)
assert_type(dist.get_rank(), int)
assert_type(dist.get_world_size(), int)
assert_type(dist.get_backend(), str)
assert_type(dist.is_initialized(), bool)
assert_type(settings()[0]["name"], str)
assert_type(reduce_target(), str)


def look(backend: DscommBackend) -> str:
    return backend.describe() + backend.flight_record()
"""
MISTAKES = {
    "dist.nonsense": "has no attribute",
    "dist.get_rank(1, 2)": "Too many arguments",
    'dist.init_distributed(timeout="soon")': 'incompatible type "str"',
    'dist.broadcast(torch.ones(3), source=0)': "Unexpected keyword argument",
    'settings()[0]["nonsense"]': "has no key",
}  # fmt: skip


def mypy(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE), *arguments],
        cwd=folder,
        env=dict(os.environ, MYPYPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=550,
    )


@needs_mypy
def test_the_package_passes_mypy() -> None:
    """Strictly: see pyproject.toml."""
    result = mypy("-p", "deepspeed_comm")
    assert result.returncode == 0, result.stdout + result.stderr


def own_names() -> list[str]:
    """Of what `import *` brings, what is not another package's."""
    ours = re.compile(r"deepspeed_comm\b(?!\._)")
    values = {name: getattr(deepspeed_comm, name) for name in deepspeed_comm.__all__}
    # A constant has no module.
    names = [
        name
        for name, value in values.items()
        if ours.match(getattr(value, "__module__", "deepspeed_comm") or "")
    ]
    assert {"all_reduce", "ReduceOp", "NCCL_BACKEND", "in_aml"} <= set(names)
    return names


@needs_mypy
def test_mypy_accepts_correct_program_and_reports_mistakes(tmp_path: Path) -> None:
    config = ("--config-file", str(ROOT / "pyproject.toml"))
    (tmp_path / "program.py").write_text(
        PROGRAM + "\n".join(f"dist.{name}" for name in own_names())
    )
    result = mypy(*config, "program.py", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr

    lines = PROGRAM.splitlines() + list(MISTAKES)
    (tmp_path / "mistakes.py").write_text("\n".join(lines))
    result = mypy(*config, "mistakes.py", folder=tmp_path)
    for line, message in MISTAKES.items():
        said = [text for text in result.stdout.splitlines() if f":{lines.index(line) + 1}:" in text]
        assert any(message in text for text in said), (line, result.stdout + result.stderr)


def documented(function: Any) -> list[tuple[str, bool]]:
    """(parameter, whether it may be left out) by the signature with which pybind11's texts begin;
    without self."""
    text = inspect.getdoc(function) or ""
    signature = re.match(r"\w+\((.*)\)(?: -> .*)?$", text.split("\n")[0])
    assert signature is not None, text
    # The texts of defaults and types may hold brackets and commas.
    parts = re.findall(r"(?:[^,(\[]|\([^()]*\)|\[[^\[\]]*\])+", signature[1])
    parameters = [(part.split(":")[0].strip(), " = " in part) for part in parts]
    if ("/", False) in parameters:  # as pybind11 calls what has no name for callers
        unnamed = parameters.index(("/", False))
        parameters[: unnamed + 1] = [("arg0", left_out) for _, left_out in parameters[:unnamed]]
    return [each for each in parameters if each[0] != "self"]


def declared(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """The same of the stub."""
    arguments = function.args
    names = [each.arg for each in arguments.posonlyargs + arguments.args]
    required = len(names) - len(arguments.defaults)
    found = [(name, place >= required) for place, name in enumerate(names) if name != "self"]
    # What has no name for callers is called otherwise by pybind11.
    unnamed = {each.arg for each in arguments.posonlyargs}
    return [("arg0" if name in unnamed else name, left_out) for name, left_out in found]


def compare(body: list[ast.stmt], actual: Any) -> None:
    """What the stub says of a module or a class is what that has, and no less."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
        elif isinstance(statement, ast.ClassDef):
            found.add(statement.name)
            theirs = getattr(actual, statement.name)
            compare(statement.body, theirs)
        elif isinstance(statement, ast.FunctionDef):
            found.add(statement.name)
            theirs = getattr(actual, statement.name)
            is_property = isinstance(theirs, property)
            decorators = [
                each.id for each in statement.decorator_list if isinstance(each, ast.Name)
            ]
            assert is_property == ("property" in decorators), statement.name
            if not is_property:
                assert declared(statement) == documented(theirs), statement.name
        else:
            assert isinstance(statement, (ast.Expr, ast.Import, ast.ImportFrom)), statement
    public = {name for name in vars(actual) if not name.startswith("_")}
    assert public <= found, f"{STUB.name} lacks {public - found} of {actual}"
    assert all(name in vars(actual) for name in found), (found, actual)


def is_for_checkers_alone(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ClassDef) and bool(statement.decorator_list)


def test_stub_matches_the_native_module() -> None:
    body = ast.parse(STUB.read_text()).body
    native = load_extension()
    compare([each for each in body if not is_for_checkers_alone(each)], native)
    [setting] = [each for each in body if is_for_checkers_alone(each)]
    assert isinstance(setting, ast.ClassDef)
    fields = [
        each.target.id
        for each in setting.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    assert {tuple(row) for row in native.settings()} == {tuple(fields)}


def test_type_files_are_packaged() -> None:
    """setup.py packs them, and their mark."""
    for name in ("py.typed", "_C.pyi", "__init__.pyi"):
        assert (ROOT / "deepspeed_comm" / name).exists()
    packed = subprocess.run(
        [sys.executable, "-c", "import runpy, setuptools; "
         "setuptools.setup = lambda **known: print(known['package_data']['deepspeed_comm']); "
         "runpy.run_path('setup.py')"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert packed.stdout == "['py.typed', '*.pyi']\n", packed.stderr
