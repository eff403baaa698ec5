"""PyTorch's DistributedTest, loaded for one backend and one number of ranks.

The suite decides most of what it skips while its module is imported: by BACKEND and WORLD_SIZE in
the environment and by sets of backends. So both are settled here, before that import, and a process
can load it once only.

Some of these decisions are made by a backend's name although nothing in the test needs that
backend, only CPU tensors: "Only MPI supports all_to_all" dates from a gloo that could not. Such a
gate is opened here for every backend, gloo too, so that the baseline is measured by the same tests.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# The suite is told of no GPU and computes on one thread: ranks are forked, and threads of an OpenMP
# pool in the parent would not survive that.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MASTER_ADDR": "localhost",
    # Lets test_barrier_timeout_global run; every test gets its own file before it starts.
    "INIT_METHOD": "file://",
    # Native stacks take seconds to symbolize and bury the message; the repro line is not ours.
    "TORCH_SHOW_CPP_STACKTRACES": "0",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}

# The reason with which the suite would skip -> why the test is run all the same.
OPENED_GATES: dict[str, str] = {
    r"Only MPI supports (CPU )?all_to_all(_single)?": "gloo and dscomm exchange CPU tensors too",
    r"Only gloo backend supports timeouts": "dscomm's groups have timeouts",
    r"GLOO Batch Send Recv CPU": "batch_isend_irecv needs isend and irecv, nothing of gloo",
    r"Only Gloo backend supports sparse all reduce": "dscomm adds sparse tensors",
    r"get_future is only supported on mpi, nccl and gloo": "dscomm's Work has futures",
    r"Test requires backend \w+ to be one of \{'gloo'\}": "CPU tensors, and nothing of gloo",
}

# Tests with groups of the ranks 1 and 2 are kept by the suite for 8 ranks or more; 3 are enough.
_SMALLEST_WORLD_WITH_RANK_2 = 3

_BARRIER_S = 60

# These choose the model's device inside the test by a list of names, on which only gloo and MPI
# stand for the CPU. The group itself is made before, by its own name.
DEVICE_CHOSEN_BY_NAME = re.compile(r"test_accumulate_gradients_no_sync")


def load(backend: str, ranks: int) -> type[Any]:
    """The class with all tests of the suite, each to be run in forked ranks."""
    os.environ.update(_ENVIRONMENT, BACKEND=backend, WORLD_SIZE=str(ranks), TEMP_DIR="")

    if backend == "dscomm":
        import deepspeed_comm  # noqa: F401 - makes the backend known where torch was told not to.

    from torch.testing._internal import common_distributed, common_utils

    _declare_capabilities(common_distributed.DistTestCases, backend)
    _open_gates(common_utils, common_distributed)

    from torch.testing._internal.distributed import distributed_test

    for supported in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        if backend not in supported:
            supported.append(backend)

    class DistributedSuite(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        # The suite's barriers are files, and give up after 10 s, which a busy machine exceeds.
        def _barrier(self, wait_for: int | None = None, timeout: float = _BARRIER_S) -> None:
            distributed_test.Barrier.sync(wait_for, timeout)

    return DistributedSuite


def test_names(suite: type[Any]) -> list[str]:
    return sorted(name for name in dir(suite) if name.startswith("test_"))


def skip_reason(suite: type[Any], name: str) -> str | None:
    """Why the suite skips the test before any rank exists; None when it is to be run."""
    function = getattr(suite, name)
    if not getattr(function, "__unittest_skip__", False):
        return None
    return getattr(function, "__unittest_skip_why__", "") or "skipped by the suite without a reason"


@contextlib.contextmanager
def monitored_barrier_answered_gloo() -> Iterator[None]:
    """Lets torch.distributed.monitored_barrier pass its own check of the backend's name.

    It asks get_backend() of its module, so that function is another one while it runs.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = dist.monitored_barrier

    def monitored_barrier(*arguments: Any, **named: Any) -> Any:
        with mock.patch.object(distributed_c10d, "get_backend", lambda group=None: "gloo"):
            return original(*arguments, **named)

    with mock.patch.object(dist, "monitored_barrier", monitored_barrier):
        yield


def group_timeout_s(name: str) -> int:
    from torch.testing._internal.distributed import distributed_test

    timeouts = distributed_test.CUSTOM_PG_TIMEOUT
    return int(timeouts.get(name, distributed_test.default_pg_timeout))


def _declare_capabilities(cases: Any, backend: str) -> None:
    # "gpu" is what the suite asks for before tests that run on CPU tensors without a GPU as well.
    for feature in ("gpu", "ddp", "subgroup", "plugin"):
        if backend != "gloo":
            cases.backend_feature[feature].add(backend)


def _open_gates(common_utils: Any, common_distributed: Any) -> None:
    gates = re.compile("|".join(f"(?:{gate})" for gate in OPENED_GATES))
    skip, skip_if = (
        common_utils.skip_but_pass_in_sandcastle,
        common_utils.skip_but_pass_in_sandcastle_if,
    )

    def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def open_skip(reason: str) -> Callable[..., Any]:
        return unchanged if gates.fullmatch(reason) else skip(reason)

    def open_skip_if(condition: bool, reason: str) -> Callable[..., Any]:
        return skip_if(condition and not gates.fullmatch(reason), reason)

    def skip_if_small_worldsize(function: Callable[..., Any]) -> Callable[..., Any]:
        too_small = int(os.environ["WORLD_SIZE"]) < _SMALLEST_WORLD_WITH_RANK_2
        return skip_if(too_small, "needs a rank 2")(function)

    common_utils.skip_but_pass_in_sandcastle = open_skip
    common_utils.skip_but_pass_in_sandcastle_if = open_skip_if
    common_distributed.skip_if_small_worldsize = skip_if_small_worldsize
