"""deepspeed.comm's API: collectives, point-to-point, groups, the log, and init_distributed().

Mirrors deepspeed.comm.comm: same names.

    import deepspeed_comm as dist  # was: from deepspeed import comm as dist

Operations behave like those of torch.distributed, with DeepSpeed's names and defaults, on any
backend of torch; init_distributed() uses dscomm for CPU tensors by default. They return None, or a
torch Work with async_op=True. Unless a function says more, tensors have any shape and any dtype of
the backend, equal on all ranks. `group` is a torch ProcessGroup; None is the default group. src,
dst and peer are global ranks; group_src and group_dst are ranks of the group.

Operations with the parameters `prof`, `log_name` and `debug` can be logged. While the log is
enabled, a call is logged if prof_all is set, if its `prof` is true, or if its log_name is in
prof_ops. `debug` is the name of the calling function, for the log; by default it is looked up.

Operations raise AssertionError without a process group. init_distributed() makes one; a group made
by torch.distributed.init_process_group() works, too.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum  # noqa: F401 - DeepSpeed's module has these names
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed import GradBucket  # noqa: F401

from deepspeed_comm import _direct, environment, utils
from deepspeed_comm._compiler import is_compiling as _is_compiling
from deepspeed_comm._compiler import outside_graphs as _outside_graphs
from deepspeed_comm._log import logger, warn_once
from deepspeed_comm._plugin import load_extension, loaded_extension
from deepspeed_comm._switch import switch as _switch
from deepspeed_comm.backend import NOT_INITIALIZED as _NOT_INITIALIZED
from deepspeed_comm.backend import Backend
from deepspeed_comm.comms_log import files as _files
from deepspeed_comm.comms_log import trace as _trace
from deepspeed_comm.comms_logging import CommsLogger
from deepspeed_comm.config import DeepSpeedCommsConfig
from deepspeed_comm.constants import *  # noqa: F403
from deepspeed_comm.environment import (  # noqa: F401
    TORCH_DISTRIBUTED_DEFAULT_PORT,
    in_aml,
    in_aws_sm,
    in_dlts,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed_comm.reduce_op import ReduceOp
from deepspeed_comm.torch import TorchBackend
from deepspeed_comm.utils import (  # noqa: F401
    get_caller_func,
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

default_pg_timeout = timedelta(minutes=int(os.getenv("DEEPSPEED_TIMEOUT", default=10)))

# The current backend. The others are DeepSpeed's own backends, which this package does not have.
cdb: Backend | None = None
nccl_backend = None
mpi_backend = None
ccl_backend = None
hccl_backend = None

comms_logger = CommsLogger()


class ProcessGroup:
    """An id and ranks. Unused; for programs that import the name."""

    def __init__(self, comm_id: Any, ranks: list[int] | None = None) -> None:
        self.ranks = ranks or []
        self.comm_id = comm_id
        self.size = len(self.ranks)


def _backend() -> TorchBackend:
    """Returns `cdb`; makes it if the program only called torch's init_process_group()."""
    if (cdb is None or not cdb.is_initialized()) and torch.distributed.is_initialized():
        _take_group_of_torch()
    assert cdb is not None and cdb.is_initialized(), _NOT_INITIALIZED
    return cdb  # type: ignore[return-value]  # or a similar object that the program has set


@_outside_graphs
def _take_group_of_torch() -> None:
    init_distributed()


# --- the log


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
    trace_events: int | None = None,
) -> None:
    """Configures the log; None leaves a value unchanged.

    deepspeed_config: a DeepSpeedConfig, or a DeepSpeed configuration as a dictionary; the other
        parameters override it.
    enabled: whether calls are logged at all.
    prof_all: logs all operations.
    prof_ops: the names (log_name) of the operations to log without prof_all.
    verbose: also prints each call on rank 0.
    debug: adds the name of the calling function to the name of a call in the log.
    trace_events: the number of latest calls to keep for save_trace(), about 250 bytes each; 0 keeps
        none.

    Raises TypeError for an unknown key or a value of the wrong type in the configuration, and
    ValueError if trace_events is negative, or if the parameter trace_events is not an int.
    """
    if isinstance(deepspeed_config, dict):
        comms_logger.configure(DeepSpeedCommsConfig(deepspeed_config))
    elif deepspeed_config is not None:
        comms_logger.configure(deepspeed_config.comms_config)
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
        "trace_events": trace_events,
    }
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, value)


class _LoggedWork:
    """A Work without a future: its call is logged when wait() returns."""

    def __init__(self, work: Any, log: Callable[[], None]) -> None:
        self._work = work
        self._log: Callable[[], None] | None = log

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        if self._log is not None:
            self._log()
            self._log = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _logged_when_done(works: list[Any], log: Callable[[], None]) -> list[Any]:
    """Returns the works, and calls log() when the last one completes, unless one has failed."""
    left = len(works)
    has_failed = False
    mutex = threading.Lock()  # works may complete on several threads
    call = comms_logger.launched(works)

    def one_is_done(future: Any = None) -> None:
        nonlocal left, has_failed
        failed = future is not None and _has_failed(future)
        with mutex:
            left -= 1
            has_failed |= failed
            is_last = left == 0
        if is_last and not has_failed:
            log()
        if is_last:
            comms_logger.done(call)

    watched = []
    for work in works:
        try:
            work.get_future().add_done_callback(one_is_done)
            watched.append(work)
        except (RuntimeError, AttributeError):  # this backend's works have no future
            comms_logger.done(call)  # settle() must not wait for this call
            watched.append(_LoggedWork(work, one_is_done))
    return watched


def _has_failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # wait() raises it in the program
        return True
    return False


def timed_op(func: _Function) -> _Function:
    """Decorator: makes an operation loggable. With the log off, it adds one check to a call."""
    signature = inspect.signature(func)
    name = func.__name__
    default_log_name = get_default_args(func).get("log_name", name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():  # tracing is not a call
            return func(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given.setdefault("log_name", default_log_name)
        if not (
            given.get("prof") or comms_logger.prof_all or given["log_name"] in comms_logger.prof_ops
        ):
            return func(*args, **kwargs)
        if comms_logger.debug and given.get("debug") is None:
            given["debug"] = get_caller_func(3)
        record = get_debug_log_name(given, comms_logger.debug)
        size = utils.get_msg_size(given)
        group = _group_of(given)
        group_size = _backend().get_world_size(group)
        # Before the call, because the group may be destroyed when its last call completes.
        group_name = _trace.group_text(group) if group_size > 0 else ""
        device = _gpu_of(given)
        if device is not None:  # exclude work queued on the GPU before this call
            torch.cuda.synchronize(device)
        began_ns = time.perf_counter_ns()

        def log() -> None:
            ended_ns = time.perf_counter_ns()
            if comms_logger.trace_events > 0:
                dtype = utils.get_dtype(given)
                call = _trace.Call(name, record, began_ns, ended_ns, size, group_name, dtype)
                comms_logger.trace(call)
            took_ms = (ended_ns - began_ns) / 1e6
            comms_logger.append(name, record, took_ms, size, group_size, group_name)

        result = func(*args, **kwargs)
        if group_size < 0:  # this rank is not a member
            return result
        if device is None and _is_work(result):
            return _logged_when_done([result], log)[0]
        if device is None and _are_works(result):
            return _logged_when_done(result, log)
        if device is not None:  # the Work of a GPU completes when the call is queued
            torch.cuda.synchronize(device)
        log()
        return result

    return _switch(func, timed, "comms_logger.enabled", globals())


def _is_work(result: Any) -> bool:
    # AsyncCollectiveTensor, of the functional collectives, is a tensor with wait().
    return hasattr(result, "wait") and not isinstance(result, torch.Tensor)


def _are_works(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(map(_is_work, result))


def _group_of(given: dict[str, Any]) -> Any:
    """The group of a call, or of the first message of a batch."""
    messages = given.get("p2p_op_list")
    return getattr(messages[0], "group", None) if messages else given.get("group")


def _gpu_of(given: dict[str, Any]) -> Any:
    """The GPU of a call's tensors, or None."""
    for value in given.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        tensor = getattr(first, "tensor", first)  # of a P2POp
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return tensor.device
    return None


def log_summary(
    show_straggler: bool = False, return_dict: bool = False, compact: bool = False
) -> dict[str, Any] | None:
    """Prints the log of rank 0. Collective over all ranks.

    show_straggler: adds the time that calls waited for slower ranks. return_dict: returns the log
    of this rank, in ms and Gbit/s; averages leave out the lowest and the highest tenth of samples:

        {"summary": {name: {bytes: {count, total_latency_ms, avg_latency_ms, tput_avg_gbps,
                                    busbw_avg_gbps, msg_size_bytes, msg_size_str,
                                    p50_latency_ms, p99_latency_ms}}},
         "straggler_analysis": None or {name: {bytes: {count, total_comm_lat_ms,
                                    total_straggler_ms, avg_comm_lat_ms, avg_straggler_ms, ...}}},
         "metadata": {world_size, rank, timestamp}}

    compact: a table of 100 columns instead of DeepSpeed's 180.
    """
    backend = _backend()
    comms_logger.settle()
    backend.barrier()
    is_first = backend.get_rank() == 0
    result = comms_logger.log_all(is_first, show_straggler, return_dict, compact)
    backend.barrier()
    return result


def save_log(path: str | os.PathLike[str], format: str | None = None) -> None:
    """Writes the log of all ranks to one file on rank 0, atomically. Collective over all ranks.

    path, format: those of rank 0 count. format is "json" or "csv"; by default the suffix of path
    selects it. The file has a row for each rank, operation and message size, with the columns of
    comms_log.files.COLUMNS. JSON has the rows in "records", and "world_size", "timestamp" and the
    ranks' "hosts".

    Raises RuntimeError on all ranks if the file cannot be written.
    """
    _backend()
    comms_logger.settle()
    _files.gather_and_write(
        _files.own_log(comms_logger.get_summary()),
        lambda everyones: _files.write_log(everyones, path, format),
        path,
    )


def save_trace(path: str | os.PathLike[str]) -> None:
    """Writes the calls that all ranks kept (see trace_events) to one Chrome trace on rank 0.

    Collective over all ranks; the path of rank 0 counts. Each rank is a process of the trace, and
    each group a thread. Times are in us by rank 0's clock, with the origin of torch.profiler;
    comms_log/trace.py describes how the clocks are compared.

    Raises RuntimeError on all ranks if the file cannot be written, or if no rank keeps calls.
    """
    _backend()
    comms_logger.settle()
    _files.gather_and_write(
        _trace.own_trace(*comms_logger.own_calls()),
        lambda everyones: _trace.write_trace(everyones, path),
        path,
    )


def reset_log() -> None:
    """Clears the log of this rank."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether this rank has logged any call."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """The number of calls logged on this rank."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names of the operations logged on this rank."""
    return comms_logger.get_operation_names()


# --- collectives


@timed_op
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: str | None = None,
    group_src: int | None = None,
) -> Any:
    """Copies `tensor` of `src` to all ranks of the group, in place."""
    return _backend().broadcast(tensor, src, group, async_op, group_src)


@timed_op
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: str | None = None,
    group_src: int | None = None,
) -> Any:
    """Copies the objects of `src` to all ranks. Pickled, so all ranks must be trusted."""
    return _backend().broadcast_object_list(object_list, src, group, device, group_src)


@timed_op
def all_gather(
    tensor_list: Any,
    tensor: Any,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: str | None = None,
) -> Any:
    """Writes `tensor` of the group's rank k to tensor_list[k], on all ranks."""
    return _backend().all_gather(tensor_list, tensor, group, async_op)


@timed_op
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> Any:
    """Writes `obj` of the group's rank k to object_list[k], on all ranks; pickled."""
    return _backend().all_gather_object(object_list, obj, group)


@timed_op
def all_gather_into_tensor(
    output_tensor: Any,
    tensor: Any,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> Any:
    """Writes the tensors of all ranks to output_tensor.

    output_tensor: the tensors concatenated along dimension 0, or stacked on a new dimension 0.
    """
    return _backend().all_gather_into_tensor(output_tensor, tensor, group, async_op)


def allgather_fn(
    output_tensor: Any,
    input_tensor: Any,
    group: Any = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """all_gather_into_tensor(), or all_gather() with a torch that lacks it."""
    if has_all_gather_into_tensor():
        return all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op, debug=debug
        )
    _warn_of_fallback("all_gather_into_tensor", "all_gather")
    parts = list(torch.chunk(output_tensor, get_world_size(group)))
    return all_gather(parts, input_tensor, group=group, async_op=async_op, debug=debug)


def all_gather_coalesced(
    output_tensors: list[Any], input_tensors: list[Any], group: Any = None, async_op: bool = False
) -> Any:
    """all_gather_into_tensor() of several tensors in one call; lists of equal length."""
    return _backend().all_gather_coalesced(output_tensors, input_tensors, group, async_op)


@timed_op
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
    group_dst: int | None = None,
) -> Any:
    """Reduces `tensor` of all ranks with `op`; the result is in `tensor` of `dst`."""
    return _backend().reduce(tensor, dst, op, group, async_op, group_dst)


@timed_op
def reduce_scatter(
    output: Any,
    input_list: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> Any:
    """Reduces input_list[k] of all ranks with `op`; the result is in `output` of rank k."""
    return _backend().reduce_scatter(output, input_list, op, group, async_op)


@timed_op
def reduce_scatter_tensor(
    output_tensor: Any,
    tensor: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Any:
    """Reduces `tensor` of all ranks with `op`; output_tensor is this rank's part of the result.

    The parts are equal, along dimension 0, in the order of ranks.
    """
    return _backend().reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def reduce_scatter_fn(
    output_tensor: Any,
    tensor: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Any:
    """reduce_scatter_tensor(), or reduce_scatter() with a torch that lacks it."""
    options = {"op": op, "group": group, "async_op": async_op, "prof": prof, "debug": debug}
    if has_reduce_scatter_tensor():
        return reduce_scatter_tensor(output_tensor, tensor, **options)
    _warn_of_fallback("reduce_scatter_tensor", "reduce_scatter")
    parts = list(torch.chunk(tensor, get_world_size(group)))
    return reduce_scatter(output_tensor, parts, **options)


def _warn_of_fallback(missing: str, instead: str) -> None:
    if get_rank() == 0:
        warn_once(
            f"unable to find torch.distributed.{missing}. will fall back to torch.distributed."
            f"{instead} which will result in suboptimal performance. please consider upgrading "
            "your pytorch installation."
        )


@timed_op
def all_reduce(
    tensor: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """Reduces `tensor` of all ranks with `op`, in place, with the result on all ranks."""
    return _backend().all_reduce(tensor, op, group, async_op)


@timed_op
def inference_all_reduce(
    tensor: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """all_reduce() with the least overhead; returns `tensor`, or a Work with async_op=True.

    torch.compile can trace it, if `op` is a ReduceOp and async_op is False.
    """
    # TorchBackend checks that a process group exists, if the direct call is not possible.
    backend = cdb if type(cdb) is TorchBackend else _backend()
    return backend.inference_all_reduce(tensor, op, group, async_op)


@timed_op
def all_reduce_caching(
    tensor: Any,
    op: Any = ReduceOp.SUM,
    match_id: str = "",
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce_caching",
    debug: str | None = None,
) -> Any:
    """all_reduce() for a call that is repeated: prepares the call once.

    match_id: the name of this call, the same on all ranks. The first call with a match_id fixes the
        group, shape, dtype and op. A match_id can be reused after its group is destroyed.

    Raises ValueError if the group, shape, dtype or op differ from the first call, and TypeError if
    match_id is empty or not a string. Over dscomm, different match_ids on different ranks raise
    DistBackendError on all of them.
    """
    backend = cdb if type(cdb) is TorchBackend else _backend()  # as in inference_all_reduce()
    return backend.all_reduce_caching(tensor, op, match_id, group, async_op)


@timed_op
def all_reduce_coalesced(
    tensors: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """all_reduce() of several tensors of one dtype in one call."""
    return _backend().all_reduce_coalesced(tensors, op, group, async_op)


@timed_op
def all_to_all_single(
    output: Any,
    tensor: Any,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str | None = None,
) -> Any:
    """Sends part k of `tensor` to rank k, and receives part k of `output` from rank k.

    output_split_sizes, input_split_sizes: the lengths of the parts along dimension 0; equal parts
    by default.
    """
    return _backend().all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group, async_op
    )


@timed_op
def all_to_all(
    output_tensor_list: Any,
    input_tensor_list: Any,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: str | None = None,
) -> Any:
    """all_to_all_single() with one tensor for each rank; shapes may differ."""
    return _backend().all_to_all(output_tensor_list, input_tensor_list, group, async_op)


@timed_op
def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: str | None = None,
    group_dst: int | None = None,
) -> Any:
    """Writes `tensor` of rank k to gather_list[k] of `dst`; gather_list is None on other ranks."""
    return _backend().gather(tensor, gather_list, dst, group, async_op, group_dst)


@timed_op
def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: str | None = None,
    group_src: int | None = None,
) -> Any:
    """Writes scatter_list[k] of `src` to `tensor` of rank k; scatter_list is None elsewhere."""
    return _backend().scatter(tensor, scatter_list, src, group, async_op, group_src)


@timed_op
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = 0,
    group: Any = None,
    prof: bool = False,
    log_name: str = "gather_object",
    debug: str | None = None,
    group_dst: int | None = None,
) -> Any:
    """Writes `obj` of rank k to object_gather_list[k] of `dst`; pickled."""
    return _backend().gather_object(obj, object_gather_list, dst, group, group_dst)


@timed_op
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = 0,
    group: Any = None,
    prof: bool = False,
    log_name: str = "scatter_object_list",
    debug: str | None = None,
    group_src: int | None = None,
) -> Any:
    """Writes object k of scatter_object_input_list of `src` to scatter_object_output_list[0] of
    rank k."""
    return _backend().scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, src, group, group_src
    )


@timed_op
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Any:
    """Waits until all ranks of the group have called it."""
    return _backend().barrier(group, async_op, device_ids)


@timed_op
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> Any:
    """barrier() that names the missing ranks after `timeout`.

    wait_all_ranks: names all missing ranks, not just the first one.
    """
    return _backend().monitored_barrier(group, timeout, wait_all_ranks)


# --- point-to-point


@timed_op
def send(
    tensor: Any,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str | None = None,
) -> Any:
    """Sends `tensor` to `dst`; returns when `tensor` may be changed."""
    backend = cdb if type(cdb) is TorchBackend else _backend()  # as in inference_all_reduce()
    return backend.send(tensor, dst, group, tag)


@timed_op
def recv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str | None = None,
) -> Any:
    """Receives `tensor` from `src` (None: any rank); returns the sender's global rank."""
    backend = cdb if type(cdb) is TorchBackend else _backend()  # as in inference_all_reduce()
    return backend.recv(tensor, src, group, tag)


@timed_op
def isend(
    tensor: Any,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str | None = None,
) -> Any:
    """Starts to send `tensor`, which must not change until the returned Work is done."""
    return _backend().isend(tensor, dst, group, tag)


@timed_op
def irecv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> Any:
    """Starts to receive `tensor` from `src` (None: any rank); returns a Work."""
    return _backend().irecv(tensor, src, group, tag)


class P2POp:
    """A message for batch_isend_irecv().

    op: isend or irecv of this module. peer: a global rank.
    """

    def __init__(
        self, op: Callable[..., Any], tensor: Any, peer: int, group: Any = None, tag: int = 0
    ) -> None:
        assert op in (isend, irecv), "op must be deepspeed_comm.isend or deepspeed_comm.irecv"
        self.op = "isend" if op is isend else "irecv"
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


@timed_op
def batch_isend_irecv(
    p2p_op_list: list[P2POp],
    prof: bool = False,
    log_name: str = "batch_isend_irecv",
    debug: str | None = None,
) -> list[Any]:
    """Starts all messages; returns a Work for each."""
    return _backend().batch_isend_irecv(p2p_op_list)


# --- memory


@_outside_graphs
def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """An uninitialized CPU tensor in memory that the other ranks of this host can read.

    Over dscomm, large collectives on such a tensor, or on any part of it, skip the copies to and
    from staging memory; results are the same. The tensor may outlive the group, and works with all
    groups of dscomm. A forked child shares the memory, and may see later writes of the parent.

    Returns an ordinary tensor, as torch.empty() does, for less than a page (4 KiB), if the group
    has another backend, if the pool is full or off (DSCOMM_POOL_BYTES), on another device, and with
    pin_memory=True (CUDA cannot pin shared memory). is_pooled() tells the two kinds apart.

    size: integers, or one sequence of them, like torch.empty().
    dtype: torch's default dtype by default.
    device: the CPU by default, regardless of torch's default device.
    requires_grad, pin_memory: like torch.empty().

    Raises AssertionError without a process group, and TypeError if size is not whole numbers.
    """
    assert torch.distributed.is_initialized(), (
        "empty() needs a process group: call init_distributed() first"
    )
    shape = _shape(size)
    dtype = dtype or torch.get_default_dtype()
    device = torch.device("cpu" if device is None else device)
    if device.type != "cpu" or pin_memory or _direct.find_group_backend(group) is None:
        return torch.empty(
            shape, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory
        )
    tensor: torch.Tensor = load_extension().empty(shape, dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """empty() with the shape, dtype and device of `tensor`, and the strides of torch.empty_like().

    Keywords override the properties of `tensor`.

    Raises the errors of empty(), and TypeError if `tensor` is not strided.
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor: expected a strided one, got one of {tensor.layout}")
    made = empty(
        tensor.numel(),
        dtype=tensor.dtype if dtype is None else dtype,
        device=tensor.device if device is None else device,
        pin_memory=pin_memory,
        group=group,
    )
    strides = torch.empty_like(tensor, device="meta").stride()
    made = made.as_strided(tensor.shape, strides)
    return made.requires_grad_() if requires_grad else made


def is_pooled(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is in memory of empty(), which other ranks of the host can read."""
    native = loaded_extension()
    return native is not None and bool(native.is_in_pool(tensor))


def _shape(size: tuple[Any, ...]) -> torch.Size:
    """The shape from integers of any type, such as NumPy's, or from one sequence of them."""
    try:
        if len(size) == 1 and not _is_whole(size[0]):
            size = tuple(size[0])
        return torch.Size([operator.index(number) for number in size])
    except TypeError as error:
        raise TypeError(
            f"size: expected whole numbers or one sequence of them, got {size!r} ({error})"
        ) from error


def _is_whole(number: Any) -> bool:
    try:
        operator.index(number)
    except TypeError:
        return False
    return True


# --- groups and probes


def is_available() -> bool:
    """Always true."""
    return True


def is_initialized() -> bool:
    """Whether init_distributed() was called, or an operation of this package has used the group of
    torch's init_process_group()."""
    return cdb is not None and cdb.is_initialized()


def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
    """Makes a group of these global ranks (None: all). Collective over all ranks.

    options: keywords of torch.distributed.new_group(): timeout, backend, group_desc ...
    """
    return _backend().new_group(ranks, **options)


def destroy_process_group(group: Any = None) -> Any:
    """Destroys the group (None: all groups), and drops DeepSpeed's references to it, if any."""
    if cdb is None and not torch.distributed.is_initialized():
        return None
    is_whole_world = group is None or group is get_world_group()
    result = _backend().destroy_process_group(group)
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    release = getattr(groups, "_release_process_group_references", None)
    if release is not None and group != torch.distributed.GroupMember.NON_GROUP_MEMBER:
        release(group=None if is_whole_world else group)
    return result


def get_world_group() -> Any:
    """The default group."""
    return _backend().get_world_group()


def get_backend(group: Any = None) -> str:
    """The name of the group's backend."""
    return _backend().get_backend(group)


def get_world_size(group: Any = None) -> int:
    """The number of ranks of the group; -1 if this rank is not a member."""
    return _backend().get_world_size(group)


def get_rank(group: Any = None) -> int:
    """This rank's position in the group; -1 if it is not a member."""
    return _backend().get_rank(group)


def get_local_rank() -> int:
    """This rank's position on its host, from the launcher."""
    _backend()
    return get_local_rank_from_launcher()


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a rank of the group. Raises ValueError if the group has no such rank."""
    ranks = get_all_ranks_from_group(group)
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group_rank: got {group_rank}, expected 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_process_group_ranks(group: Any = None) -> list[int]:
    """The global ranks of the group, in its order; group=None is the default group."""
    return _backend().get_process_group_ranks(group)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """get_process_group_ranks() with DeepSpeed's name."""
    return get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """Makes torch's DeviceMesh over all ranks."""
    return _backend().init_device_mesh(mesh_shape, mesh_dim_names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enables torch's symmetric memory. Raises RuntimeError if torch or the device has none."""
    _backend().enable_symm_mem_for_group(group_name)


def has_all_gather_into_tensor() -> bool:
    return _backend().has_all_gather_into_tensor()


def has_reduce_scatter_tensor() -> bool:
    return _backend().has_reduce_scatter_tensor()


def has_all_reduce_coalesced() -> bool:
    return _backend().has_all_reduce_coalesced


def has_coalescing_manager() -> bool:
    """Whether the default group's backend can coalesce calls."""
    return _backend().has_coalescing_manager


# Names of torch 2.13.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

# Names of older versions of deepspeed.comm.
all_gather_base = all_gather_into_tensor
reduce_scatter_base = reduce_scatter_tensor
has_allgather_base = has_all_gather_into_tensor
has_reduce_scatter_base = has_reduce_scatter_tensor


# --- initialisation


def init_deepspeed_backend(
    ds_backend: str, timeout: timedelta | None = None, init_method: str | None = None
) -> None:
    """Does nothing; torch makes all backends. In DeepSpeed, it makes DeepSpeed's own ones."""
    logger.debug("%s is a backend of torch.distributed", ds_backend)


def set_backend(backend: Backend | None = None) -> None:
    """Sets `cdb`; None leaves it unchanged."""
    global cdb
    if backend is not None:
        cdb = backend


def mpi_discovery(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Sets missing variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) from mpirun,
    Slurm or mpi4py. RuntimeError if none suffices; AssertionError if the process group differs."""
    environment.mpi_discovery(distributed_port, verbose)
    if is_initialized():
        for name, known in (("RANK", get_rank()), ("WORLD_SIZE", get_world_size())):
            given = os.environ[name]
            assert int(given) == known, f"{name} is {given}, but {known} in the process group"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes the default process group, unless it exists, and sets `cdb`.

    dist_backend: any of torch's backends; by default dscomm for CPU tensors, and NCCL for CUDA's.
    auto_mpi_discovery: sets missing environment variables from the launcher (see environment.py);
        without a launcher, the program is a world of one rank.
    verbose: logs the backend and the discovered ranks.
    distributed_port: the default of MASTER_PORT.
    timeout: of every call; the default is DEEPSPEED_TIMEOUT, in minutes, or 10 minutes.
    init_method, rank, world_size: like torch.distributed.init_process_group().
    dist_init_required: False asserts that a process group exists.
    config: a DeepSpeed configuration, for the log.

    Raises RuntimeError with the missing environment variables, AssertionError if dist_init_required
    is False without a process group, and TypeError if timeout is not a timedelta.
    """
    global cdb
    configure(deepspeed_config=config)
    if is_initialized():
        if get_rank() == 0:
            logger.info("Distributed backend already initialized")
        return
    # The program may have made, or made again, torch's process group.
    if torch.distributed.is_initialized():
        cdb = TorchBackend(dist_backend, timeout, init_method)
        return
    assert dist_init_required is not False, (
        "Distributed backend is not initialized. Please set dist_init_required to True or "
        "initialize before calling deepspeed.initialize()"
    )
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout: expected a datetime.timedelta, got {timeout!r}")
    if auto_mpi_discovery and init_method in (None, "env://"):
        found = environment.discover(distributed_port, verbose, rank, world_size)
        init_method = found or init_method
    backend = TorchBackend(dist_backend, timeout, init_method, rank, world_size)
    if backend.get_rank() == 0 and verbose:
        logger.info(f"Initialized torch.distributed with backend {backend.get_backend()}")
    cdb = backend
