"""A client run over gloo and over dscomm, and its results compared bit for bit.

A case is a module-level function case(world, backend, *arguments) that returns a dictionary of
tensors, numbers and strings, or lists of these. It is run in two new processes for each backend;
they are forked, so packages that the parent has imported need not be imported again.

Both backends must give the same bits: between two ranks a reduction has two addends, whose order
does not matter, and of 16-bit floats both add in float32 and round once. A case whose arithmetic
goes another way says so where it is compared.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

# torch's optimizers import the one, DeepSpeed and torch.compile the other: seconds, in every rank
# that is forked without them.
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
from program_ranks import free_port

from tests.cases.harness import HARD_LIMIT_S, World, run_fresh

Result = dict[str, Any]
Case = Callable[..., Result]


def needed(package: str) -> Any:
    """The package, imported before ranks are forked. Without it the module's tests are skipped."""
    if importlib.util.find_spec(package) is None:
        # Where no package index can be reached, torch's own clients are run all the same.
        pytest.skip(
            f"{package} is not installed here; tests/clients/setup makes an environment with it",
            allow_module_level=True,
        )
    return importlib.import_module(package)


def run(
    backend: str, case: Case, *arguments: Any, ranks: int = 2, limit_s: float = HARD_LIMIT_S
) -> list[Result]:
    """What case(world, backend, *arguments) returns on each rank.

    Raises harness.RankFailure with every rank's traceback. The ranks' variables are those that
    torchrun sets. Every group that is there at the end must be of that backend.
    """
    gc.freeze()  # a rank that collects garbage need not walk through what it was forked with
    packed = run_fresh(ranks, _in_rank, backend, free_port(), case, arguments, limit_s=limit_s)
    return [torch.load(io.BytesIO(each), weights_only=True) for each in packed]


# A reference that several tests compare with is made once.
run_once = functools.cache(run)


def equal_over_both(case: Case, *arguments: Any, limit_s: float = HARD_LIMIT_S) -> list[Result]:
    """Runs the case over both backends, compares, and returns what the ranks of dscomm returned."""
    expected = run("gloo", case, *arguments, limit_s=limit_s)
    found = run("dscomm", case, *arguments, limit_s=limit_s)
    assert_same_bits(found, expected)
    return found


def assert_same_bits(found: Any, expected: Any, where: str = "ranks") -> None:
    """Equal structure, dtypes, shapes and bits; the message says where they differ first."""
    assert type(found) is type(expected), (where, found, expected)
    if isinstance(found, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        if not torch.equal(_bits(found), _bits(expected)):
            difference = (found.double() - expected.double()).abs().max().item()
            raise AssertionError(f"{where}: dscomm and gloo differ by up to {difference}")
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            assert_same_bits(found[key], expected[key], f"{where}, {key}")
    elif isinstance(found, list):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert found == expected, (where, found, expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _in_rank(
    world: World, backend: str, port: int, case: Case, arguments: tuple[Any, ...]
) -> bytes:
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_WORLD_SIZE=str(world.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.manual_seed(0)
    result = case(world, backend, *arguments)
    used = {str(name) for name, _ in dist.distributed_c10d._world.pg_map.values()}
    assert used == {backend}, f"expected groups of {backend} alone, got {used}"
    if backend == "gloo":
        # A thread of gloo that is the last to let go of its group, as the futures of a hook may
        # have it, waits for itself and ends the process. So nobody lets go of it.
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()
