"""Every name and signature of deepspeed.comm 0.19.8 is here, but for those listed with a reason."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepspeed_comm
from tests.cases.deepspeed_names import DIFFERENT, FLAGS, INTERNAL, THEIRS, ours

CASES = [(module, name) for module, names in THEIRS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), CASES, ids=lambda value: value)
def test_name_has_signature_of_deepspeed(module: str, name: str) -> None:
    if name.split(".")[0] in INTERNAL or name.startswith(FLAGS):
        return
    found: Any = ours(module)
    for part in name.split("."):
        assert hasattr(found, part), f"deepspeed_comm.{module} has no {name}"
        found = getattr(found, part)
    theirs = THEIRS[module][name]
    if not isinstance(theirs, list) or f"{module}.{name}" in DIFFERENT:
        return
    parameters = list(inspect.signature(found).parameters.values())
    if "." in name:
        parameters = parameters[1:]  # self
    assert [p.name for p in parameters][: len(theirs)] == [given[0] for given in theirs]
    for parameter, (called, default) in zip(parameters, theirs, strict=False):
        # "debug" is theirs' mistake: the caller's name, evaluated at import.
        if default is None or called == "debug" or module not in ("comm", "comms_logging"):
            continue
        assert parameter.default == eval(default, vars(ours("comm"))), (name, called)
    # What is more than theirs may be left out.
    for parameter in parameters[len(theirs) :]:
        kinds = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        assert parameter.default is not parameter.empty or parameter.kind in kinds


def test_package_exports_every_name_of_the_api() -> None:
    for name in THEIRS["comm"]:
        if name not in INTERNAL and "." not in name:
            assert getattr(deepspeed_comm, name) is getattr(ours("comm"), name), name
            assert name in dir(deepspeed_comm)
    more = ("ReduceOp", "TorchBackend", "NCCL_BACKEND", "get_backend", "all_gather_base")
    for name in (*more, *THEIRS["utils"], "Enum", "GradBucket", "all_gather_single"):
        assert hasattr(deepspeed_comm, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = deepspeed_comm.nonsense


def test_star_import_exports_functions_but_no_modules() -> None:
    assert deepspeed_comm.comm is ours("comm") and deepspeed_comm.torch is ours("torch")
    names: dict[str, Any] = {}
    exec("from deepspeed_comm import *", names)
    assert names["all_reduce"] is deepspeed_comm.all_reduce
    assert not any(inspect.ismodule(value) for value in names.values())


def test_every_module_can_be_imported_first() -> None:
    """Programs import what they need in any order."""
    folder = Path(deepspeed_comm.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("comms_log/*.py")]
    parts = [file.relative_to(folder).with_suffix("").parts for file in files]
    names = sorted(".".join(each) for each in parts if each[-1] != "__init__")
    program = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.split(".")[0] == "deepspeed_comm"]:
        del sys.modules[loaded]
    importlib.import_module("deepspeed_comm." + name)
    import deepspeed_comm
    assert callable(deepspeed_comm.all_reduce)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *names],
        env=dict(os.environ, PYTHONPATH=str(folder.parent)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert {"comm", "comms_log.log"} <= set(names) and result.returncode == 0, result.stderr


def test_functions_keep_their_names() -> None:
    """The original's are all called log_wrapper(*args, **kwargs)."""
    assert deepspeed_comm.all_reduce.__name__ == "all_reduce"
    assert list(inspect.signature(deepspeed_comm.all_reduce).parameters)[:2] == ["tensor", "op"]


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "get_rank", "new_group", "isend"])
def test_call_before_init_distributed_raises(name: str) -> None:
    arguments = {"all_reduce": ([1],), "isend": ([1], 0), "new_group": ([0],)}.get(name, ())
    with pytest.raises(AssertionError, match="please initialize it using init_process_group"):
        getattr(deepspeed_comm, name)(*arguments)
    assert not deepspeed_comm.is_initialized() and deepspeed_comm.is_available()
