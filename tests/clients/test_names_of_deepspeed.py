"""Every name and signature of the deepspeed.comm that is installed is here, but for those that
tests/cases/deepspeed_names.py leaves out; and the table that it compares with is true."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("deepspeed") is None:
    # The original comes from a package index; where none can be reached, make test says so.
    pytest.skip(
        "deepspeed is not installed here; tests/clients/setup makes .venv-clients, which has it",
        allow_module_level=True,
    )
os.environ["DS_ACCELERATOR"] = "cpu"  # whatever else this machine has

from tests.cases.deepspeed_names import DIFFERENT, FLAGS, INTERNAL, THEIRS, ours  # noqa: E402

MODULES = {
    name: "deepspeed.utils.comms_logging" if name == "comms_logging" else f"deepspeed.comm.{name}"
    for name in THEIRS
}
# Of deepspeed.comm itself: what it has by importing it for its own use, and is not its own.
IMPORTED = {
    "Optional": "of typing",
    "TYPE_CHECKING": "of typing",
    "get_accelerator": "DeepSpeed's own choice of a device",
    "timer": "DeepSpeed's own clocks",
    "CCLBackend": "of torch's backend ccl; deepspeed_comm.ccl has its functions",
}


_DESTROYS = """
import deepspeed.utils.groups as groups
import torch.distributed as dist
import deepspeed_comm

dist.init_process_group("dscomm", store=dist.HashStore(), rank=0, world_size=1)
deepspeed_comm.init_distributed(verbose=False)
part = deepspeed_comm.new_group([0])
groups._EXPERT_PARALLEL_GROUP["part"] = part
groups._WORLD_GROUP = dist.group.WORLD
deepspeed_comm.destroy_process_group(part)
assert not groups._EXPERT_PARALLEL_GROUP and groups._WORLD_GROUP is not None
deepspeed_comm.destroy_process_group()
assert groups._WORLD_GROUP is None
"""


def test_destroyed_groups_are_not_kept_by_deepspeed() -> None:
    """tests/api asks the same of a stand-in for this module."""
    done = subprocess.run(
        [sys.executable, "-c", _DESTROYS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def is_left_out(name: str) -> bool:
    return name.split(".")[0] in INTERNAL or name.startswith(FLAGS)


def unwrapped(function: Any) -> Any:
    """What timed_op and the like have wrapped: the original keeps it in a closure alone."""
    while inspect.isfunction(function) and function.__name__ in ("log_wrapper", "wrapper"):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        function = {name: cell.cell_contents for name, cell in cells}["func"]
    return function


def signature(function: Any) -> list[inspect.Parameter]:
    """The parameters that have a name to a caller; without self."""
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(unwrapped(function)).parameters.values()
    return [
        each for each in parameters if each.name not in ("self", "cls") and each.kind not in unnamed
    ]


def own_functions(module: ModuleType) -> dict[str, Any]:
    """The functions and methods that a module defines, by name; methods as Class.method."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        value = unwrapped(value)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value):
            methods = {
                f"{name}.{method}": getattr(value, method)
                for method, defined in vars(value).items()
                if isinstance(defined, (classmethod, staticmethod)) or inspect.isfunction(defined)
            }
            found |= {name: method for name, method in methods.items() if is_public(name)}
    return {name: value for name, value in found.items() if is_public(name)}


def is_public(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "__init__" or not last.startswith("_")


@pytest.fixture(scope="module")
def deepspeed() -> ModuleType:
    import deepspeed

    assert deepspeed.__version__.split("+")[0] == "0.19.8"
    return deepspeed


@pytest.mark.parametrize("module", MODULES)
def test_every_function_and_parameter_of_deepspeed_exists(
    deepspeed: ModuleType, module: str
) -> None:
    functions = own_functions(importlib.import_module(MODULES[module]))
    assert functions or module in ("constants", "reduce_op")
    for name, function in functions.items():
        if is_left_out(name):
            continue
        found: Any = ours(module)
        for part in name.split("."):
            assert hasattr(found, part), f"deepspeed_comm.{module} has no {name}"
            found = getattr(found, part)
        if f"{module}.{name}" in DIFFERENT:
            continue
        theirs = [parameter.name for parameter in signature(function)]
        assert [parameter.name for parameter in signature(found)][: len(theirs)] == theirs, name


@pytest.mark.parametrize("module", MODULES)
def test_table_of_names_matches_deepspeed(deepspeed: ModuleType, module: str) -> None:
    """deepspeed_0_19_8.json was read from the source; this is what Python says."""
    functions = own_functions(importlib.import_module(MODULES[module]))
    table = {
        name: [parameter for parameter, _ in listed]
        for name, listed in THEIRS[module].items()
        if isinstance(listed, list) and is_public(name) and not is_left_out(name)
    }
    found = {
        name: [each.name for each in signature(function)]
        for name, function in functions.items()
        if not is_left_out(name)
    }
    # Of a class that is made without arguments, the table has the name alone.
    bare = {
        name for name, parameters in found.items() if name.endswith(".__init__") and not parameters
    }
    assert {name: found[name] for name in found if name in table or name not in bare} == table


def test_default_arguments_match_deepspeed(deepspeed: ModuleType) -> None:
    """`debug` aside, whose default there is the name of what imports modules."""
    compared = 0
    for name, function in own_functions(importlib.import_module("deepspeed.comm.comm")).items():
        if is_left_out(name) or f"comm.{name}" in DIFFERENT:
            continue
        here = {parameter.name: parameter.default for parameter in signature(getattr_of(name))}
        for parameter in signature(function):
            if parameter.default is inspect.Parameter.empty:
                continue
            if parameter.name == "debug":
                assert parameter.default in ("exec_module", None)
                continue
            assert repr(here[parameter.name]) == repr(parameter.default), (name, parameter)
            compared += 1
    assert compared > 100


def getattr_of(name: str) -> Any:
    found: Any = ours("comm")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_name_of_the_deepspeed_package_exists(deepspeed: ModuleType) -> None:
    theirs = importlib.import_module("deepspeed.comm")
    package = importlib.import_module("deepspeed_comm")
    missing = {
        name
        for name in vars(theirs)
        if not name.startswith("_") and not is_left_out(name) and not hasattr(package, name)
    }
    # A name here that is there after all would be an error as well.
    assert missing == set(IMPORTED)


def test_constants_match_deepspeed(deepspeed: ModuleType) -> None:
    theirs = importlib.import_module("deepspeed.comm.constants")
    here = ours("constants")
    values = {name: value for name, value in vars(theirs).items() if name.isupper()}
    assert len(values) == 20
    texts = {name for name, value in values.items() if getattr(here, name) != value}
    assert texts <= {"COMMS_LOGGER_FORMAT"}  # the text of its help
    assert {each.name: each.value for each in importlib.import_module(
        "deepspeed.comm.reduce_op"
    ).ReduceOp} == {each.name: each.value for each in ours("reduce_op").ReduceOp}  # fmt: skip
