"""deepspeed.comm's API: collectives, point-to-point, groups, the log, and init_distributed().

    import deepspeed_comm as dist  # was: from deepspeed import comm as dist

Every operation is that of torch.distributed, with DeepSpeed's names and defaults, on whatever
backend init_distributed() was given (dscomm for CPU tensors unless told otherwise). It returns
None, or a torch Work with async_op=True. `group` is a torch ProcessGroup, None the default one;
src, dst and peer are global ranks, group_src and group_dst ranks of the group.

What takes `prof`, `log_name` and `debug` can be logged: a call is while the log is enabled and
prof_all is set, or the call's own `prof`, or its name is one of prof_ops. `debug` is the caller to
show; by default it is looked up.

All of it raises AssertionError before there is a process group: init_distributed() makes one, and
one that torch.distributed.init_process_group() has made is taken.
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
from enum import Enum  # noqa: F401 - names that the original's module has
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

# The backend in use ("current deepspeed backend"), and those of DeepSpeed's own that there are not.
cdb: Backend | None = None
nccl_backend = None
mpi_backend = None
ccl_backend = None
hccl_backend = None

comms_logger = CommsLogger()


class ProcessGroup:
    """Holds an id and ranks. Kept for programs that name it; nothing uses it."""

    def __init__(self, comm_id: Any, ranks: list[int] | None = None) -> None:
        self.ranks = ranks or []
        self.comm_id = comm_id
        self.size = len(self.ranks)


def _backend() -> TorchBackend:
    """`cdb`. It is made here if a program has called torch's own init_process_group() alone."""
    if (cdb is None or not cdb.is_initialized()) and torch.distributed.is_initialized():
        _take_group_of_torch()
    assert cdb is not None and cdb.is_initialized(), _NOT_INITIALIZED
    return cdb  # type: ignore[return-value]  # or what a program has set that is like it


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
    """Sets up the log: from a configuration first, then from what else is given.

    deepspeed_config is a DeepSpeedConfig (of which the comms_config is taken), or a DeepSpeed
    configuration as a dictionary. trace_events is how many calls, the latest ones, are kept for
    save_trace(), some 250 bytes each; 0 keeps none.
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
    """A Work that cannot call back when it is done: its call is logged when it was waited for."""

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
    """The same works; log() is called when the last of them is done, unless one has failed."""
    left = len(works)
    has_failed = False
    mutex = threading.Lock()  # they may end on several threads
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
        except (RuntimeError, AttributeError):  # as torch says that a backend's works have none
            comms_logger.done(call)  # nothing is logged before it is waited for
            watched.append(_LoggedWork(work, one_is_done))
    return watched


def _has_failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # whatever the call has raised; who waits for it is told
        return True
    return False


def timed_op(func: _Function) -> _Function:
    """A collective that can be logged; while the log is off, one question more than without."""
    signature = inspect.signature(func)
    name = func.__name__
    default_log_name = get_default_args(func).get("log_name", name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():  # what is traced is no call
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
        # Now: a group may be gone when its last call is done.
        group_name = _trace.group_text(group) if group_size > 0 else ""
        device = _gpu_of(given)
        if device is not None:  # what is under way there is none of this call's time
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
        if group_size < 0:  # not a rank of the group
            return result
        if device is None and _is_work(result):
            return _logged_when_done([result], log)[0]
        if device is None and _are_works(result):
            return _logged_when_done(result, log)
        if device is not None:  # whose works are done when the call has been queued
            torch.cuda.synchronize(device)
        log()
        return result

    return _switch(func, timed, "comms_logger.enabled", globals())


def _is_work(result: Any) -> bool:
    # A tensor may have a wait(), too: an AsyncCollectiveTensor of the functional collectives.
    return hasattr(result, "wait") and not isinstance(result, torch.Tensor)


def _are_works(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(map(_is_work, result))


def _group_of(given: dict[str, Any]) -> Any:
    """The group of a call: its own, or that of the messages of a batch."""
    messages = given.get("p2p_op_list")
    return getattr(messages[0], "group", None) if messages else given.get("group")


def _gpu_of(given: dict[str, Any]) -> Any:
    """The GPU that a call's tensors are on, if any."""
    for value in given.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        tensor = getattr(first, "tensor", first)  # of a P2POp
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return tensor.device
    return None


def log_summary(
    show_straggler: bool = False, return_dict: bool = False, compact: bool = False
) -> dict[str, Any] | None:
    """Rank 0 prints what was logged there; all ranks return their own with return_dict=True:

        {"summary": {name: {bytes: {count, total_latency_ms, avg_latency_ms, tput_avg_gbps,
                                    busbw_avg_gbps, msg_size_bytes, msg_size_str,
                                    p50_latency_ms, p99_latency_ms}}},
         "straggler_analysis": None or {name: {bytes: {count, total_comm_lat_ms,
                                    total_straggler_ms, avg_comm_lat_ms, avg_straggler_ms, ...}}},
         "metadata": {world_size, rank, timestamp}}

    compact: a table that is 100 characters wide, instead of DeepSpeed's of 180.

    A collective over all ranks.
    """
    backend = _backend()
    comms_logger.settle()
    backend.barrier()
    is_first = backend.get_rank() == 0
    result = comms_logger.log_all(is_first, show_straggler, return_dict, compact)
    backend.barrier()
    return result


def save_log(path: str | os.PathLike[str], format: str | None = None) -> None:
    """Rank 0 writes what all ranks have logged into one file, as a whole or not at all.

    format: "json" or "csv"; by default the end of the name says it. Both have a row for each rank,
    operation and message size, with the columns of comms_log.files.COLUMNS; JSON has the rows under
    "records", beside "world_size", "timestamp" and the ranks' "hosts".

    A collective over all ranks, of whose arguments rank 0's count. Raises RuntimeError on all of
    them when the file cannot be written.
    """
    _backend()
    comms_logger.settle()
    _files.gather_and_write(
        _files.own_log(comms_logger.get_summary()),
        lambda everyones: _files.write_log(everyones, path, format),
        path,
    )


def save_trace(path: str | os.PathLike[str]) -> None:
    """Rank 0 writes the calls that all ranks have kept, with trace_events, as one Chrome trace.

    Each rank is a process of it and each group a thread; times are in us since the first call, by
    rank 0's clock (comms_log/trace.py says how clocks are compared).

    A collective over all ranks, of whose paths rank 0's counts. Raises RuntimeError on all of them
    when the file cannot be written, or no rank keeps calls.
    """
    _backend()
    comms_logger.settle()
    _files.gather_and_write(
        comms_logger.own_trace(),
        lambda everyones: _trace.write_trace(everyones, path),
        path,
    )


def reset_log() -> None:
    """Forgets what was logged, as at the beginning of an epoch."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Calls that were logged on this rank."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names that calls were logged under."""
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
    """Every rank's `tensor` becomes that of `src`."""
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
    """Every rank's objects become those of `src`; pickled, so from trusted ranks only."""
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
    """tensor_list[k] becomes the `tensor` of rank k of the group."""
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
    """object_list[k] becomes the `obj` of rank k of the group."""
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
    """output_tensor becomes the tensors of all ranks, one after the other, or stacked."""
    return _backend().all_gather_into_tensor(output_tensor, tensor, group, async_op)


def allgather_fn(
    output_tensor: Any,
    input_tensor: Any,
    group: Any = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """all_gather_into_tensor(), or all_gather() into parts where torch has no such call."""
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
    """all_gather_into_tensor() of several tensors at once."""
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
    """The `tensor` of `dst` becomes the reduction of all."""
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
    """`output` becomes the reduction of what all have in input_list for this rank."""
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
    """output_tensor becomes this rank's part of the reduction of `tensor`."""
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
    """reduce_scatter_tensor(), or reduce_scatter() of parts where torch has no such call."""
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
    """Every rank's `tensor` becomes the reduction of all."""
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
    """As all_reduce(), the shortest way; returns `tensor`, or a Work with async_op=True.

    torch.compile can trace it, with an `op` of ReduceOp and async_op=False.
    """
    # TorchBackend asks itself whether it is initialised, if the call cannot be made at once.
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
    """As all_reduce(), for a call that is made again and again: what it takes is prepared once.

    match_id: a string that names this call of the program, the same on all ranks. Its first call
        fixes the group, shape, dtype and op; it is free again when the group has been destroyed.

    Raises ValueError for another group, shape, dtype or op under the same match_id, TypeError for
    none. Ranks of dscomm that come with different match_ids all raise DistBackendError.
    """
    backend = cdb if type(cdb) is TorchBackend else _backend()  # as above
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
    """all_reduce() of several tensors of one dtype at once."""
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
    """Part k of `tensor` goes to rank k, whose part for this rank comes to part k of `output`."""
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
    """As all_to_all_single(), of lists with a tensor for each rank."""
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
    """On `dst`, gather_list[k] becomes the `tensor` of rank k; elsewhere it is None."""
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
    """The `tensor` of rank k becomes scatter_list[k] of `src`; elsewhere that is None."""
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
    """On `dst`, object_gather_list[k] becomes the `obj` of rank k."""
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
    """scatter_object_output_list[0] becomes this rank's of the objects of `src`."""
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
    """Until every rank of the group is here."""
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
    """A barrier that names the ranks which do not come, all of them with wait_all_ranks."""
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
    """Returns when `tensor` may be used again."""
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
    """Returns the global rank that sent; src=None takes any."""
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
    """Returns a Work at once."""
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
    """Returns a Work at once."""
    return _backend().irecv(tensor, src, group, tag)


class P2POp:
    """One of batch_isend_irecv()'s: `op` is isend or irecv of this module, `peer` a global rank."""

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
    """Starts all of them; returns a Work for each."""
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
    """An uninitialized CPU tensor whose memory the other ranks of its host can read.

    Over dscomm, large collectives of such a tensor, or of any part of it, go without copies to and
    from staging; results are the same. It may outlive the group, and serves every group of dscomm.
    In a forked child it is no snapshot: what the parent writes later may show there.
    It is an ordinary tensor, as torch.empty() makes it, where the group has another backend, where
    there is no room (DSCOMM_POOL_BYTES), for another device, and with pin_memory=True, because what
    CUDA pins cannot be shared; is_pooled() tells.

    size: whole numbers or one sequence of them, as of torch.empty().
    dtype: torch's default dtype unless another one is given.
    device: the CPU unless another one is given, whatever torch's default device is.
    requires_grad, pin_memory: as of torch.empty().

    Raises AssertionError before there is a process group of torch.
    """
    assert torch.distributed.is_initialized(), (
        "empty() asks the backend of a process group: call init_distributed() first"
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
    """empty() of the shape, dtype and device of `tensor`, with the strides of torch.empty_like().

    Keywords change what they name.

    Raises what empty() raises, and TypeError where `tensor` is not strided.
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
    """Whether the other ranks of the host can read `tensor` where it is, as those of empty()."""
    native = loaded_extension()
    return native is not None and bool(native.is_in_pool(tensor))


def _shape(size: tuple[Any, ...]) -> torch.Size:
    """Whole numbers of any kind, such as NumPy's, or one sequence of them."""
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
    return True


def is_initialized() -> bool:
    """Whether init_distributed() was called, or an operation of this package has taken the group of
    torch's own init_process_group()."""
    return cdb is not None and cdb.is_initialized()


def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
    """A group of these global ranks; all ranks call it. `options` are torch's: timeout, backend,
    group_desc ..."""
    return _backend().new_group(ranks, **options)


def destroy_process_group(group: Any = None) -> Any:
    """Of all groups when none is named. What DeepSpeed, where it is loaded, keeps of them is
    released, as its own function does."""
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
    return _backend().get_world_group()


def get_backend(group: Any = None) -> str:
    """The name of the group's backend."""
    return _backend().get_backend(group)


def get_world_size(group: Any = None) -> int:
    """Ranks of the group; -1 where this is none of them."""
    return _backend().get_world_size(group)


def get_rank(group: Any = None) -> int:
    """This rank's number in the group; -1 where it is not in it."""
    return _backend().get_rank(group)


def get_local_rank() -> int:
    """This rank's number on its host, as the launcher says."""
    _backend()
    return get_local_rank_from_launcher()


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number in the world of a rank of the group. Raises ValueError for none of its ranks."""
    ranks = get_all_ranks_from_group(group)
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group_rank: the group has {len(ranks)} ranks, got {group_rank}")
    return ranks[group_rank]


def get_process_group_ranks(group: Any = None) -> list[int]:
    """The global ranks of the group, in its order; of all ranks when none is named."""
    return _backend().get_process_group_ranks(group)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The same under DeepSpeed's name."""
    return get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """torch's DeviceMesh over all ranks."""
    return _backend().init_device_mesh(mesh_shape, mesh_dim_names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """torch's symmetric memory. Raises RuntimeError where torch or the device has none."""
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


# Their names in torch 2.13.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

# Their names in older versions of deepspeed.comm.
all_gather_base = all_gather_into_tensor
reduce_scatter_base = reduce_scatter_tensor
has_allgather_base = has_all_gather_into_tensor
has_reduce_scatter_base = has_reduce_scatter_tensor


# --- initialisation


def init_deepspeed_backend(
    ds_backend: str, timeout: timedelta | None = None, init_method: str | None = None
) -> None:
    """Where DeepSpeed makes backends of its own. Here torch has them all."""
    logger.debug("%s is a backend of torch.distributed", ds_backend)


def set_backend(backend: Backend | None = None) -> None:
    """Makes it the one in use, where one is given."""
    global cdb
    if backend is not None:
        cdb = backend


def mpi_discovery(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT where they are missing, from
    what mpirun or Slurm says. Raises RuntimeError where that is not enough."""
    environment.mpi_discovery(distributed_port, verbose)
    if is_initialized():
        for name, known in (("RANK", get_rank()), ("WORLD_SIZE", get_world_size())):
            assert int(os.environ[name]) == known, f"{name} is {os.environ[name]}, torch's {known}"


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
    """Makes the default process group, unless there is one, and sets `cdb`.

    dist_backend: any of torch's backends; by default dscomm for CPU tensors (and NCCL for a GPU's).
    auto_mpi_discovery: variables that are missing are found as environment.py says; without a
        launcher the program is a world of one rank.
    distributed_port: MASTER_PORT where nothing says another one.
    timeout: of every call; DEEPSPEED_TIMEOUT (minutes, 10) is the default.
    init_method, rank, world_size: torch's.
    dist_init_required: False for a program that has initialised before.
    config: a DeepSpeed configuration, for the log.

    Raises RuntimeError that names what is missing in the environment, AssertionError when
    dist_init_required is False and nothing is initialised.
    """
    global cdb
    configure(deepspeed_config=config)
    if is_initialized():
        if get_rank() == 0:
            logger.info("Distributed backend already initialized")
        return
    # torch's process group may have been made without us, or anew.
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
