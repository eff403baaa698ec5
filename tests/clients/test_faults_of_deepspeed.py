"""Faults of deepspeed.comm 0.19.8 that a CPU can show: the original has each, and ours has not.

Every program here is run over deepspeed_comm with dscomm, where it does what it says. The drill
also runs it, word for word, over deepspeed.comm with gloo, where it goes wrong in the way that the
test names: that can change only with DeepSpeed's version. A newer DeepSpeed without a fault fails
there: docs/deepspeed.md is to be changed then.

Not here, since no run of 0.19.8 on a CPU of one host shows them:

- Faults of older versions, which 0.19.8 has mended: isend and irecv that block (#8303), barrier
  without its device_ids, a log that cannot be reset, operations that are logged only where their
  name is passed by keyword (#8267), a hang without AVX-512.
- The straggler analysis of a log on a GPU (#7397): needs one.
- A job of several hosts that crashes in inference_all_reduce (#7625): needs them; the crash under
  torchrun, which is here, is of the same line.
- The CCL backend, whose calls are never asynchronous, whose handles do not wait, whose scatter()
  cannot be called, and for which all groups that it does not know are the world: needs oneCCL and
  its bindings for torch; found by reading. tests/api/test_ccl.py tests what ours does.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from program_ranks import OURS, THEIRS, Job, Outcome, run_both

if importlib.util.find_spec("deepspeed") is None:
    # The original comes from a package index; where none can be reached, make test says so.
    pytest.skip(
        "deepspeed is not installed here; tests/clients/setup makes .venv-clients, which has it",
        allow_module_level=True,
    )

# The outcome over deepspeed.comm, where it was run, and over deepspeed_comm.
Both = Callable[..., tuple[Outcome | None, Outcome]]

# What DeepSpeed compiles for sums in shared memory works where the CPU has them; elsewhere it uses
# gloo's all-reduce, and the faults of its own one cannot be seen.
HAS_THEIR_SHARED_MEMORY = all(
    f"{feature} " in Path("/proc/cpuinfo").read_text() for feature in ("avx2", "avx512bw")
)
# DeepSpeed's launcher sets it and torchrun does not: only with it do ranks share memory there.
ALL_LOCAL = {"LOCAL_SIZE": "2"}
THEIR_SEGMENTS = Path("/dev/shm")

COMPILE = """
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""


@pytest.fixture(scope="module")
def their_extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every first group of deepspeed.comm compiles its extension, unless it lies here."""
    folder = tmp_path_factory.mktemp("torch_extensions")
    variables = {
        "TORCH_EXTENSIONS_DIR": str(folder),
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MAX_JOBS": "2",
    }
    subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=dict(os.environ, **variables),
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=900,  # it compiles for minutes beside other stages
    )
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    yield
    if before is None:
        del os.environ["TORCH_EXTENSIONS_DIR"]
    else:
        os.environ["TORCH_EXTENSIONS_DIR"] = before
    shutil.rmtree(folder)


def segments_of(outcome: Outcome) -> list[Path]:
    """What lies in /dev/shm and bears the port of a job, as DeepSpeed's segments do."""
    return sorted(THEIR_SEGMENTS.glob(f"*_{outcome.port}_*"))


@pytest.fixture(params=["ours", pytest.param("both", marks=pytest.mark.drill)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    """Runs a program, and removes the segments that deepspeed.comm leaves behind."""
    outcomes: list[Outcome] = []
    if request.param == "both":
        request.getfixturevalue("their_extension")

    def run(
        program: str, they_may_hang: bool = False, **options: Any
    ) -> tuple[Outcome | None, Outcome]:
        if request.param == "both":
            theirs, ours = run_both(program, tmp_path, they_may_hang=they_may_hang, **options)
            outcomes.append(theirs)
            return theirs, ours.must_be_well()
        with Job(OURS, program, tmp_path, **options) as job:
            return None, job.outcome().must_be_well()

    yield run
    for outcome in outcomes:
        for segment in segments_of(outcome):
            segment.unlink()


# --- 1 to 6: inference_all_reduce


def test_inference_all_reduce_under_torchrun(both: Both) -> None:
    """Fault 1: a segmentation fault."""
    theirs, ours = both(
        """
        tensor = torch.full((1000,), rank + 1.0)
        say("ready")
        dist.inference_all_reduce(tensor)
        say(tensor.unique().tolist())
        """,
        they_may_hang=True,  # a rank whose peer has crashed
    )
    assert [ours.last(rank) for rank in (0, 1)] == [[[3.0]]] * 2
    if theirs is not None and HAS_THEIR_SHARED_MEMORY:
        assert -signal.SIGSEGV in theirs.exit_codes, theirs


def test_inference_all_reduce_respects_operator_dtype_and_layout(both: Both) -> None:
    """Faults 2, 3, 4, 6: the operator, other dtypes, other layouts and async_op are ignored."""
    theirs, ours = both(
        """
        tensor = torch.full((1000,), rank + 1.0)
        dist.inference_all_reduce(tensor, dist.ReduceOp.MAX)
        say("MAX", tensor.unique().tolist())
        for dtype in (torch.float64, torch.int64):
            tensor = torch.full((1000,), rank + 1, dtype=dtype)
            dist.inference_all_reduce(tensor)
            say(str(dtype), tensor.unique().tolist())
        tensor = torch.full((10, 20), rank + 1.0).t()
        dist.inference_all_reduce(tensor)
        say("transposed", tensor.unique().tolist())
        tensor = torch.full((1000,), rank + 1.0)
        work = dist.inference_all_reduce(tensor, async_op=True)
        say("asynchronous", hasattr(work, "wait"))
        if hasattr(work, "wait"):
            work.wait()
        say("sum", tensor.unique().tolist())
        dist.barrier()
        """,
        variables=ALL_LOCAL,
    )
    right = [
        ["MAX", [2.0]],
        ["torch.float64", [3.0]],
        ["torch.int64", [3]],
        ["transposed", [3.0]],
        ["asynchronous", True],
        ["sum", [3.0]],
    ]
    assert ours.said == [right, right]
    if theirs is not None and HAS_THEIR_SHARED_MEMORY:
        for rank, said in enumerate(theirs.said):
            assert said == [
                ["MAX", [3.0]],
                ["torch.float64", [rank + 1.0]],
                ["torch.int64", [rank + 1]],
                ["transposed", [rank + 1.0]],
                ["asynchronous", False],
                ["sum", [3.0]],
            ]
        # Fault 6, too: segments stay when all have ended in order.
        assert len(segments_of(theirs)) == 2
    assert segments_of(ours) == []


def test_inference_all_reduce_with_group_reduces_within_it(both: Both) -> None:
    """Fault 5: the group is ignored, so it waits for ranks that are none of it."""
    theirs, ours = both(
        """
        group = dist.new_group([0, 1])
        say("ready")
        if rank < 2:
            tensor = torch.full((1000,), rank + 1.0)
            dist.inference_all_reduce(tensor, group=group)
            say(tensor.unique().tolist())
        """,
        ranks=3,
        variables={"LOCAL_SIZE": "3"},
        they_may_hang=True,
    )
    assert [ours.last(rank) for rank in (0, 1)] == [[[3.0]]] * 2
    if theirs is not None and HAS_THEIR_SHARED_MEMORY:
        assert theirs.exit_codes == [None, None, 0], theirs


AFTER_ANOTHER_JOB = """
import torch.distributed
torch.distributed.init_process_group(BACKEND)
rank = torch.distributed.get_rank()
factor = float(os.environ["FACTOR"])
began = time.monotonic()
# Theirs alone does not wait for the other rank.
waits = rank == 1 and factor == 10 and BACKEND == "gloo"
while waits and not os.path.exists("said") and time.monotonic() < began + 60:
    time.sleep(0.01)
dist.init_distributed(verbose=False)
say("ready")
tensor = torch.full((1000,), factor * (rank + 1))
dist.inference_all_reduce(tensor)
say(tensor.unique().tolist())
if factor == 10:
    open("said", "w").close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.drill
@pytest.mark.usefixtures("their_extension")
def test_inference_all_reduce_ignores_memory_of_earlier_job(tmp_path: Path) -> None:
    """Fault 6: a job takes the segments that another one with its port left for its own."""
    once = {"init": False, "variables": {**ALL_LOCAL, "FACTOR": "1"}}
    first, ours = run_both(AFTER_ANOTHER_JOB, tmp_path, **once)
    ours.must_be_well()
    assert ours.last() == [[3.0]]
    if HAS_THEIR_SHARED_MEMORY:
        assert first.last() == [[3.0]]
    again = {"init": False, "variables": {**ALL_LOCAL, "FACTOR": "10"}}
    with (
        Job(THEIRS, AFTER_ANOTHER_JOB, tmp_path, port=first.port, **again) as job,
        Job(OURS, AFTER_ANOTHER_JOB, tmp_path, port=ours.port, **again) as our_job,
    ):
        ours = our_job.outcome().must_be_well()
        theirs = job.outcome(may_hang=True)
    assert [ours.last(rank) for rank in (0, 1)] == [[[30.0]]] * 2
    if HAS_THEIR_SHARED_MEMORY:
        # What rank 1 of the job before had left there: 10 + 2.
        assert theirs.last(0) == [[12.0]], theirs
    for segment in segments_of(first):
        segment.unlink()


@pytest.mark.drill  # 4 GiB of tensors
def test_inference_all_reduce_of_two_gibibytes(both: Both) -> None:
    """Fault 6: the number of bytes overflows, and nothing is reduced."""
    theirs, ours = both(
        """
        tensor = torch.zeros(1 << 29)
        tensor[0] = tensor[-1] = rank + 1.0
        dist.inference_all_reduce(tensor)
        say(tensor[0].item(), tensor[-1].item())
        dist.barrier()
        """,
        variables=ALL_LOCAL,
    )
    assert ours.said == [[[3.0, 3.0]]] * 2
    if theirs is not None and HAS_THEIR_SHARED_MEMORY:
        assert theirs.said == [[[1.0, 1.0]], [[2.0, 2.0]]]


# --- 7: groups


def test_get_all_ranks_without_group_returns_world_ranks(both: Both) -> None:
    """Fault 7: none are found."""
    theirs, ours = both("say(dist.get_all_ranks_from_group()); dist.barrier()")
    assert ours.last() == [[0, 1]]
    if theirs is None:
        return
    assert theirs.last() == [[]]


def test_ranks_of_the_world_group_are_returned(both: Both) -> None:
    """Fault 7: it counts for ever."""
    theirs, ours = both(
        """
        say("ready")
        say(dist.get_all_ranks_from_group(dist.get_world_group()))
        """,
        ranks=1,
        they_may_hang=True,
    )
    assert ours.last() == [[0]]
    if theirs is None:
        return
    assert theirs.exit_codes == [None], theirs


# --- 8 to 12: the log


def test_logged_latencies_are_not_cumulative(both: Both) -> None:
    """Fault 8: each is the sum of all before it, even after reset_log()."""
    theirs, ours = both(
        """
        dist.configure(enabled=True, prof_all=True)
        if rank == 1:
            time.sleep(1)  # so rank 0's first call takes long
        for _ in range(6):
            dist.all_reduce(torch.ones(77))
        say(dist.comms_logger.get_raw_data()["all_reduce"][308][1])
        dist.reset_log()
        for _ in range(3):
            dist.all_reduce(torch.ones(77))
        say(dist.comms_logger.get_raw_data()["all_reduce"][308][1])
        dist.configure(enabled=False)
        dist.barrier()
        """
    )
    for outcome, is_cumulative in ((theirs, True), (ours, False)):
        if outcome is None:
            continue
        [latencies], [after_reset] = outcome.said[0]
        assert len(latencies) == 6 and len(after_reset) == 3
        assert (min(latencies[1:]) >= latencies[0]) is is_cumulative, outcome
        assert (min(after_reset) >= latencies[0]) is is_cumulative, outcome


def test_logged_latency_of_asynchronous_call_includes_completion(both: Both) -> None:
    """Fault 9: until they return, not until they are done."""
    theirs, ours = both(
        """
        dist.all_reduce(torch.ones(77))
        dist.configure(enabled=True, prof_all=True)
        if rank == 1:
            while not os.path.exists("launched"):
                time.sleep(0.01)
            time.sleep(0.5)
        began = time.perf_counter()
        work = dist.all_reduce(torch.ones(77), async_op=True)
        launch_ms = (time.perf_counter() - began) * 1e3
        open("launched", "w").close()
        work.wait()
        while not dist.has_comm_data():
            time.sleep(0.01)
        say(launch_ms, dist.comms_logger.get_raw_data()["all_reduce"][308][1])
        dist.configure(enabled=False)
        dist.barrier()
        """
    )
    launch_ms, [logged_ms] = ours.last(0)
    assert logged_ms >= 500, ours  # for so long the other rank has not called
    if theirs is None:
        return
    launch_ms, [logged_ms] = theirs.last(0)
    assert logged_ms <= launch_ms, theirs


def test_logged_bytes_match_size_of_whole_tensor(both: Both) -> None:
    """Fault 10: reduce-scatters count once for each rank, all-reduces twice, and a group's calls as
    those of all ranks."""
    theirs, ours = both(
        """
        group = dist.new_group([0, 1])
        dist.configure(enabled=True, prof_all=True)
        dist.all_reduce(torch.ones(300))
        dist.reduce_scatter_tensor(torch.ones(100), torch.ones(300))
        dist.reduce_scatter(torch.ones(100), list(torch.ones(300).chunk(3)))
        if rank < 2:
            dist.all_gather_into_tensor(torch.ones(200), torch.ones(100), group=group)
        counted, busbws = {}, {}
        for name, sizes in dist.comms_logger.get_raw_data().items():
            [(_, [ms], [algbw], [busbw])] = sizes.values()
            counted[name] = round(algbw * 1e6 / 8 * ms)  # of Gbit/s and ms
            busbws[name] = round(busbw / algbw, 3)
        say(counted, busbws)
        dist.configure(enabled=False)
        dist.barrier()
        """,
        ranks=3,
    )
    if theirs is None:
        return
    assert theirs.last() == [
        {
            "all_reduce": 2400,
            "reduce_scatter_tensor": 3600,
            "reduce_scatter": 3600,
            "all_gather_into_tensor": 1200,
        },
        {
            "all_reduce": 0.667,
            "reduce_scatter_tensor": 0.667,
            "reduce_scatter": 0.667,
            "all_gather_into_tensor": 0.667,
        },
    ]
    assert ours.last() == [
        {
            "all_reduce": 1200,
            "reduce_scatter_tensor": 1200,
            "reduce_scatter": 1200,
            "all_gather_into_tensor": 800,
        },
        {
            "all_reduce": 1.333,
            "reduce_scatter_tensor": 0.667,
            "reduce_scatter": 0.667,
            "all_gather_into_tensor": 0.5,
        },
    ]


@pytest.mark.parametrize(
    "call",
    ["monitored_barrier()", "all_gather_object([None] * size, rank)"],
    ids=["monitored_barrier", "all_gather_object"],
)
def test_logging_calls_without_tensor_does_not_end_program(both: Both, call: str) -> None:
    """Fault 11: they end the program, as if all had gone well."""
    theirs, ours = both(
        f"""
        dist.configure(enabled=True, prof_all=True)
        dist.{call}
        say("the rest of the program", dist.get_logged_comm_ops())
        """
    )
    assert ours.last() == ["the rest of the program", [call.partition("(")[0]]]
    if theirs is None:
        return
    assert theirs.exit_codes == [0, 0] and theirs.said == [[], []], theirs


def test_log_of_a_call_of_zero_duration_is_accepted(both: Both) -> None:
    """Fault 11: it is divided by."""
    theirs, ours = both(
        """
        dist.comms_logger.append("all_reduce", "all_reduce", 0.0, 8)
        say(dist.get_comm_operation_count())
        """,
        ranks=1,
    )
    assert ours.last() == [1]
    if theirs is None:
        return
    assert theirs.exit_codes == [1] and "ZeroDivisionError" in theirs.output[0], theirs


def test_straggler_summary_with_different_calls_on_ranks_returns(both: Both) -> None:
    """Fault 12: a hang."""
    theirs, ours = both(
        """
        dist.configure(enabled=True, prof_all=True)
        dist.all_reduce(torch.ones(77))
        if rank == 1:
            dist.send(torch.ones(1), 0)
        else:
            dist.configure(enabled=False)
            dist.recv(torch.ones(1), 1)
        dist.configure(enabled=False)
        say("ready")
        found = dist.log_summary(show_straggler=True, return_dict=True)
        say(sorted(found["straggler_analysis"]))
        """,
        they_may_hang=True,
    )
    assert ours.last(0) == [["all_reduce"]]
    assert ours.last(1) == [["all_reduce", "send"]]
    if theirs is None:
        return
    assert None in theirs.exit_codes, theirs


def test_log_configured_as_disabled_stays_disabled(both: Both) -> None:
    """Fault 12: "enabled": false enables it."""
    theirs, ours = both(
        """
        import importlib, types
        config = importlib.import_module(dist.__name__ + ".config")
        given = config.DeepSpeedCommsConfig({"comms_logger": {"enabled": False}})
        dist.configure(types.SimpleNamespace(comms_config=given))
        dist.all_reduce(torch.ones(77))
        say(dist.comms_logger.enabled, dist.get_logged_comm_ops())
        dist.configure(enabled=False)
        dist.barrier()
        """
    )
    assert ours.last() == [False, []]
    if theirs is None:
        return
    assert theirs.last() == [True, ["all_reduce"]]


# --- 13: coalesced all-gathers


def test_all_gather_coalesced_and_later_calls_succeed(both: Both) -> None:
    """Fault 13: it raises, and later calls of the group silently do nothing."""
    theirs, ours = both(
        """
        say(dist.has_coalescing_manager())
        outputs = [torch.zeros(2), torch.zeros(4)]
        inputs = [torch.full((1,), rank + 1.0), torch.full((2,), rank + 10.0)]
        try:
            dist.all_gather_coalesced(outputs, inputs)
            say([output.tolist() for output in outputs])
        except RuntimeError as error:
            say(str(error))
        output = torch.zeros(2)
        dist.all_gather_into_tensor(output, torch.full((1,), rank + 1.0))
        say(output.tolist())
        dist.barrier()
        """
    )
    # Ours coalesces by itself, so programs that ask need not.
    assert ours.said[0][1:] == [[[[1.0, 2.0], [10.0, 10.0, 11.0, 11.0]]], [[1.0, 2.0]]]
    if theirs is None:
        return
    [says_it_can], [error], [later] = theirs.said[0]
    assert says_it_can is True
    assert "does not implement startCoalescing" in error
    assert later == [0.0, 0.0]


# --- 15, 16: what is found in the environment


def test_init_without_launcher_needs_no_mpi4py(both: Both) -> None:
    """Fault 15: a plain program needs mpi4py."""
    theirs, ours = both(
        """
        sys.modules["mpi4py"] = None  # as where it is not installed
        dist.init_distributed(BACKEND)
        say(dist.get_rank(), dist.get_world_size())
        """,
        ranks=1,
        init=False,
        without=(
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ),
    )
    assert ours.last() == [0, 1]
    if theirs is None:
        return
    assert theirs.exit_codes == [1] and "ModuleNotFoundError" in theirs.output[0], theirs


def test_unset_azure_ml_and_sagemaker_variables_raise_no_key_error(both: Both) -> None:
    """Fault 16: a KeyError of a variable that need not be set, or that says nothing of where it
    should have come from."""
    theirs, ours = both(
        """
        os.environ |= {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.1",
        }
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
        try:
            dist.patch_aml_env_for_torch_nccl_backend()
            say(os.environ["NCCL_SOCKET_IFNAME"])
        except KeyError as error:
            say(repr(error))
        os.environ.pop("MASTER_ADDR", None)
        try:
            dist.patch_aws_sm_env_for_torch_nccl_backend()
        except Exception as error:
            say(repr(error))
        """,
        ranks=1,
        init=False,
    )
    assert ours.said[0] == [
        ["^docker0,lo"],
        [
            "RuntimeError('SageMaker should have set MASTER_ADDR: set them or, if it did not start "
            "this job, unset SM_TRAINING_ENV')"
        ],
    ]
    if theirs is None:
        return
    assert theirs.said[0] == [
        ["KeyError('NCCL_SOCKET_IFNAME')"],
        ["KeyError('MASTER_ADDR')"],
    ]


# --- 18, 19: the API


def test_torch_functions_missing_in_deepspeed_exist(both: Both) -> None:
    """Fault 18."""
    theirs, ours = both(
        """
        import warnings

        names = [
            "get_backend", "get_process_group_ranks", "gather_object", "scatter_object_list",
            "all_gather_single", "reduce_scatter_single",
        ]
        say([name for name in names if not hasattr(dist, name)])

        def is_taken(call, *arguments, **options):
            try:
                call(*arguments, **options)
                return True
            except TypeError:
                return False

        say(
            is_taken(dist.new_group, [0], timeout=timedelta(seconds=5)),
            is_taken(dist.broadcast, torch.ones(1), group_src=0),
            is_taken(dist.reduce, torch.ones(1), group_dst=0),
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dist.all_gather_into_tensor(torch.ones(1), torch.ones(1))
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(1))
        say(sum("deprecated" in str(warning.message) for warning in seen))
        """,
        ranks=1,
    )
    assert ours.said[0] == [[[]], [True, True, True], [0]]
    if theirs is None:
        return
    lacks, taken, [deprecated] = theirs.said[0]
    assert len(lacks[0]) == 6
    assert taken == [False, False, False]
    # torch before 2.13 has these two under no other name.
    assert (deprecated == 2) is hasattr(torch.distributed, "all_gather_single")


def test_function_names_and_given_caller_names_are_kept(both: Both) -> None:
    """Fault 19: every function is called log_wrapper, and a caller that is named is ignored."""
    theirs, ours = both(
        """
        import inspect

        say(dist.all_reduce.__name__, list(inspect.signature(dist.all_reduce).parameters)[:2])
        dist.configure(enabled=True, prof_all=True, debug=True)

        def train():
            dist.all_reduce(torch.ones(77))
            dist.all_reduce(torch.ones(77), debug="the first layer")

        train()
        say(*dist.get_logged_comm_ops())
        dist.configure(enabled=False)
        try:
            dist.all_reduce(torch.ones(1), dist.ReduceOp.UNUSED)
        except TypeError as error:
            say(str(error))
        """,
        ranks=1,
    )
    assert ours.said[0][:2] == [
        ["all_reduce", ["tensor", "op"]],
        ["all_reduce | [Caller Func: train]", "all_reduce | [Caller Func: the first layer]"],
    ]
    assert "incompatible function arguments" not in ours.last()[0] and "SUM" in ours.last()[0]
    if theirs is None:
        return
    assert theirs.said[0][:2] == [
        ["log_wrapper", ["args", "kwargs"]],
        ["all_reduce | [Caller Func: train]"],
    ]
    assert "incompatible function arguments" in theirs.last()[0]


# --- Two more that docs/deepspeed.md names


def test_operation_before_init_distributed_raises(tmp_path: Path) -> None:
    program = "dist.all_reduce(torch.ones(1))"
    for package, error in (
        (THEIRS, "AttributeError: 'NoneType' object has no attribute 'all_reduce'"),
        (OURS, "AssertionError: DeepSpeed backend not set, please initialize it"),
    ):
        with Job(package, program, tmp_path, ranks=1, init=False) as job:
            outcome = job.outcome()
        assert outcome.exit_codes == [1] and error in outcome.output[0], outcome


def test_all_reduce_switched_off_does_not_communicate(both: Both) -> None:
    """The switch of the original does nothing."""
    theirs, ours = both(
        """
        import importlib
        importlib.import_module(dist.__name__ + ".torch").all_reduce_comm_off(True)
        tensor = torch.full((1,), rank + 1.0)
        dist.all_reduce(tensor)
        say(tensor.tolist())
        dist.barrier()
        """
    )
    assert ours.last(0) == [[1.0]]
    if theirs is None:
        return
    assert theirs.last(0) == [[3.0]]
