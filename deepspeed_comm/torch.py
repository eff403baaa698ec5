"""The operations of the API on torch.distributed, with any of its backends.

Mirrors deepspeed.comm.torch: same names.

Operations return None, or a torch Work with async_op=True; on ranks outside the group they return
None. `group` is a torch ProcessGroup; None is the default group. src, dst and peer are global
ranks; group_src and group_dst are ranks of the group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from deepspeed_comm import _direct, _launcher_variables, constants
from deepspeed_comm._caching import Plans
from deepspeed_comm._compiler import is_compiling, is_dynamo, outside_graphs
from deepspeed_comm._log import warn_once
from deepspeed_comm.backend import Backend, select_backend
from deepspeed_comm.reduce_op import ReduceOp, torch_reduce_op

# Operations that do not communicate (see Noop), to measure a job without their time.
_switched_off: set[str] = set()


def _switch(operation: str, is_off: bool) -> None:
    (_switched_off.add if is_off else _switched_off.discard)(operation)


def all_gather_comm_off(flag: bool = False) -> None:
    _switch("all_gather", flag)


def reduce_scatter_comm_off(flag: bool = False) -> None:
    _switch("reduce_scatter", flag)


def broadcast_comm_off(flag: bool = False) -> None:
    _switch("broadcast", flag)


def all_reduce_comm_off(flag: bool = False) -> None:
    _switch("all_reduce", flag)


def reduce_comm_off(flag: bool = False) -> None:
    _switch("reduce", flag)


def backward_comm_off(flag: bool = False) -> None:
    """Switches all-gather and reduce-scatter, used in a backward pass, off (flag=True) or on."""
    all_gather_comm_off(flag)
    reduce_scatter_comm_off(flag)


class Noop:
    """The Work of an operation that is switched off."""

    def wait(self) -> None:
        return None


def _is_off(operation: str) -> bool:
    if operation not in _switched_off:
        return False
    if dist.get_rank() == 0:
        warn_once(f"{operation} is switched off: it does not communicate")
    return True


def _warn_of_fallback(missing: str, instead: str) -> None:
    """Warns once, on rank 0."""
    if dist.get_rank() == 0:
        warn_once(f"{missing}; {instead}")


def has_all_reduce_coalesced() -> bool:
    """Whether torch has all_reduce_coalesced(); all backends for CPU tensors support it."""
    return hasattr(dist, "all_reduce_coalesced")


@outside_graphs
def has_coalescing_manager(group: Any = None, device: Any = "cpu") -> bool:
    """Whether torch has a coalescing manager, and the group's backend for `device` supports it."""
    if not hasattr(dist.distributed_c10d, "_coalescing_manager"):
        return False
    if not dist.is_initialized():
        return True
    # torch 1.13 has another kind of manager, and its groups are their own backends.
    find_backend = getattr(group or dist.group.WORLD, "_get_backend", None)
    if find_backend is None:
        return False
    try:
        backend = find_backend(torch.device(device))
    except RuntimeError:  # the group has no backend for the device
        return False
    # dscomm can coalesce, but reports false: else torch would make one Work of several messages.
    is_ours = backend.name() == constants.DSCOMM_BACKEND
    return is_ours or bool(getattr(backend, "supports_coalescing", False))


def _device_type() -> str:
    """The device type of the default group's tensors: the first other than "cpu", if any."""
    devices = getattr(dist.group.WORLD, "_device_types", [torch.device("cpu")])
    return next((device.type for device in devices if device.type != "cpu"), "cpu")


# torch's tables of groups. torch 1.13 has no _world, and no split_group() either.
_torch_world: Any = getattr(dist.distributed_c10d, "_world", None)


def is_unlisted(group: Any) -> bool:
    """Whether torch has no list of the group's ranks, as for groups of group.split_group() and
    group.merge_remote_group(). torch's functions that need the list raise."""
    return (
        _torch_world is not None
        and isinstance(group, dist.ProcessGroup)
        and group not in _torch_world.pg_group_ranks
    )


def _backends_of(group: Any) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _ranks_of_unlisted(group: Any) -> list[int]:
    for backend in _backends_of(group):
        ranks = list(getattr(getattr(backend, "options", None), "global_ranks_in_group", []))
        if len(ranks) == group.size():
            return ranks
    raise ValueError(
        f"neither torch nor the backend of group '{group.group_name}' knows its global ranks; use "
        "group.rank() and group.size(), and torch.distributed's calls with group_src or group_dst"
    )


def _peer(
    name: str, rank: int | None, group_rank: int | None, group: Any, default: int | None = None
) -> dict[str, int]:
    """The keyword src= or dst= (`name`) for torch, a global rank; for an unlisted group, group_src=
    or group_dst=.

    default: the value of `rank` if the program has not given one. Raises ValueError for both a rank
    and a group_rank, for neither, and for a rank outside an unlisted group.
    """
    if group_rank is not None and rank == default:
        if is_unlisted(group):
            return {f"group_{name}": group_rank}
        target: Any = group or dist.group.WORLD
        return {name: dist.get_global_rank(target, group_rank)}
    if group_rank is not None:
        raise ValueError(f"got both {name} and group_{name}, expected one of them")
    if rank is None and default is None:
        raise ValueError(f"got neither {name} (global rank) nor group_{name} (rank of the group)")
    if rank is not None and is_unlisted(group):
        ranks = _ranks_of_unlisted(group)
        if rank not in ranks:
            raise ValueError(f"{name}: got global rank {rank}, expected one of the group, {ranks}")
        return {f"group_{name}": ranks.index(rank)}
    return {name: rank if rank is not None else 0}


class TorchBackend(Backend):
    """torch.distributed with any backend. Makes the default group, unless it exists."""

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        super().__init__()
        self.name = name
        self._plans = Plans(self.get_process_group_ranks, lambda group: not is_unlisted(group))
        self.has_all_reduce_coalesced = has_all_reduce_coalesced()
        self.all_gather_function = self.get_all_gather_function()
        self.reduce_scatter_function = self.get_reduce_scatter_function()
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self._has_operations = hasattr(torch.ops.dscomm, "inference_all_reduce_")
        self.shm_comm_op = None  # DeepSpeed's shared-memory extension, which dscomm replaces
        self.world_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.using_mpi = dist.get_backend() == "mpi"

    @property
    def has_coalescing_manager(self) -> bool:
        return has_coalescing_manager(device=_device_type())

    # torch 2.13 deprecates the older names.
    def get_all_gather_function(self) -> Any:
        return getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))

    def get_reduce_scatter_function(self) -> Any:
        return getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))

    def has_all_gather_into_tensor(self) -> bool:
        return self.all_gather_function is not None

    def has_reduce_scatter_tensor(self) -> bool:
        return self.reduce_scatter_function is not None

    def init_process_group(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
    ) -> None:
        if not dist.is_initialized():
            given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            dist.init_process_group(
                select_backend(backend),
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                **given,
            )
        self.initialized = True

    def is_initialized(self) -> bool:
        return _direct.world._default_pg is not None

    # --- collectives

    def all_reduce(
        self, tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if _is_off("all_reduce"):
            return Noop()
        return dist.all_reduce(tensor, torch_reduce_op(op), group, async_op)

    def inference_all_reduce(
        self, tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        # The direct call checks its arguments; a Python call before it would cost a quarter of it.
        if not is_dynamo() and not _switched_off:
            work = _direct.direct_all_reduce(
                tensor, op, _direct.world._default_pg if group is None else group, async_op
            )
            if work is not NotImplemented:
                return work if async_op else tensor
        self.check_initialized()
        if _is_off("all_reduce"):
            return Noop() if async_op else tensor
        if is_compiling():
            return self._traced_all_reduce(tensor, op, group, async_op)
        native = _direct.find_backend(group, tensor)
        if native is not None:
            work = native.all_reduce(tensor, torch_reduce_op(op), async_op)
        else:
            work = dist.all_reduce(tensor, torch_reduce_op(op), group, async_op)
            _mark_changed(tensor)
        return work if async_op else tensor

    def _traced_all_reduce(self, tensor: Any, op: Any, group: Any, async_op: bool) -> Any:
        """inference_all_reduce() while torch.compile is tracing."""
        target: Any = group or dist.group.WORLD
        name = getattr(op, "name", None)
        if name is None and is_dynamo():  # PREMUL_SUM has a factor, and cannot be traced
            return self._all_reduce_apart(tensor, op, group, async_op)
        if (
            self._has_operations
            and not async_op
            and name is not None
            and self.get_rank(target) >= 0
        ):
            torch.ops.dscomm.inference_all_reduce_(tensor, name, target.group_name)
            return tensor
        work = dist.all_reduce(tensor, torch_reduce_op(op), group, async_op)
        return work if async_op else tensor

    @outside_graphs
    def _all_reduce_apart(self, tensor: Any, op: Any, group: Any, async_op: bool) -> Any:
        return self.inference_all_reduce(tensor, op, group, async_op)

    def all_reduce_caching(
        self,
        tensor: Any,
        op: Any = ReduceOp.SUM,
        match_id: str = "",
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        plan = self._plans.known.get(match_id) if type(match_id) is str else None
        if plan is not None and not _switched_off:
            work = plan.repeat(
                tensor, op, _direct.world._default_pg if group is None else group, async_op
            )
            if work is not NotImplemented:
                return work
        self.check_initialized()
        return self._all_reduce_of_plan(tensor, op, match_id, group, async_op)

    @outside_graphs
    def _all_reduce_of_plan(
        self, tensor: Any, op: Any, match_id: str, group: Any, async_op: bool
    ) -> Any:
        if group is not None and self.get_rank(group) < 0:
            return None
        plan = self._plans.find(match_id, tensor, op, group or dist.group.WORLD)
        if _is_off("all_reduce"):
            return Noop()
        native = _direct.find_backend(group, tensor)
        of_group = native or _direct.find_group_backend(group)
        if native is None and of_group is not None:
            work = of_group.with_match_id(
                match_id, lambda: dist.all_reduce(tensor, torch_reduce_op(op), group, async_op)
            )
            _mark_changed(tensor)
        elif native is None:
            _warn_of_fallback(
                f"{self.get_backend(group)} does not cache calls",
                "all_reduce_caching is all_reduce, and does not compare the match_ids of ranks",
            )
            work = dist.all_reduce(tensor, torch_reduce_op(op), group, async_op)
            _mark_changed(tensor)
        else:
            work = native.all_reduce_caching(tensor, torch_reduce_op(op), match_id, async_op)
            if plan.repeat is _direct.not_implemented:
                plan.repeat = _direct.repeated_all_reduce(
                    tensor, op, group or dist.group.WORLD, native, match_id
                )
        self._plans.keep(match_id, plan)
        return work

    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not self.has_all_reduce_coalesced:
            raise RuntimeError(f"torch {torch.__version__} has no all_reduce_coalesced")
        if _is_off("all_reduce"):
            return Noop()
        return dist.all_reduce_coalesced(tensors, torch_reduce_op(op), group, async_op)

    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        if _is_off("reduce"):
            return Noop()
        to = _peer("dst", dst, group_dst, group)
        return dist.reduce(tensor, op=torch_reduce_op(op), group=group, async_op=async_op, **to)

    def reduce_scatter(
        self,
        output: Any,
        input_list: Any,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _is_off("reduce_scatter"):
            return Noop()
        return dist.reduce_scatter(output, input_list, torch_reduce_op(op), group, async_op)

    def reduce_scatter_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _is_off("reduce_scatter"):
            return Noop()
        if self.reduce_scatter_function is not None:
            return self.reduce_scatter_function(
                output_tensor, input_tensor, torch_reduce_op(op), group, async_op
            )
        parts = list(torch.chunk(input_tensor, dist.get_world_size(group)))
        return self.reduce_scatter(output_tensor, parts, op, group, async_op)

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        if _is_off("broadcast"):
            return Noop()
        return dist.broadcast(
            tensor, group=group, async_op=async_op, **_peer("src", src, group_src, group)
        )

    def all_gather(
        self, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if _is_off("all_gather"):
            return Noop()
        return dist.all_gather(tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if _is_off("all_gather"):
            return Noop()
        if self.all_gather_function is not None:
            return self.all_gather_function(output_tensor, input_tensor, group, async_op)
        parts = list(torch.chunk(output_tensor, dist.get_world_size(group)))
        return self.all_gather(parts, input_tensor, group, async_op)

    all_gather_base = all_gather_into_tensor  # the name in older versions

    @outside_graphs
    def all_gather_coalesced(
        self,
        output_tensors: list[Any],
        input_tensors: list[Any],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers each input tensor into the output tensor at the same index."""
        assert len(output_tensors) == len(input_tensors), (
            f"all_gather_coalesced: {len(output_tensors)} output tensors for "
            f"{len(input_tensors)} input tensors"
        )
        if _is_off("all_gather"):
            return Noop()
        if not input_tensors or self.get_rank(group) < 0:
            return None
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        if has_coalescing_manager(group, input_tensors[0].device):
            return self._all_gather_at_once(pairs, group, async_op)
        _warn_of_fallback(
            f"{self.get_backend(group)} cannot coalesce calls",
            "all_gather_coalesced gathers one tensor after the other",
        )
        works = [self.all_gather_into_tensor(output, own, group, True) for output, own in pairs]
        if async_op:
            return _Works(works)
        for work in works:
            work.wait()
        return None

    def _all_gather_at_once(self, pairs: list[Any], group: Any, async_op: bool) -> Any:
        c10d = dist.distributed_c10d
        try:
            with c10d._coalescing_manager(group, async_ops=async_op) as coalescing:
                for output, own in pairs:
                    self.all_gather_function(output, own, group, async_op)
        except BaseException:
            # Otherwise torch would collect later calls of the group, and never run them.
            whole: Any = group or dist.group.WORLD
            c10d._world.pg_coalesce_state.pop(whole, None)
            raise
        return coalescing if async_op else None

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )

    def all_to_all(
        self,
        output_tensor_list: Any,
        input_tensor_list: Any,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)

    def gather(
        self,
        tensor: Any,
        gather_list: Any = None,
        dst: int | None = 0,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        to = _peer("dst", dst, group_dst, group, default=0)
        return dist.gather(tensor, gather_list, group=group, async_op=async_op, **to)

    def scatter(
        self,
        tensor: Any,
        scatter_list: Any = None,
        src: int | None = 0,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        of = _peer("src", src, group_src, group, default=0)
        return dist.scatter(tensor, scatter_list, group=group, async_op=async_op, **of)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return dist.barrier(group, async_op, device_ids)

    @outside_graphs
    def monitored_barrier(
        self, group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> Any:
        """torch's function accepts only gloo; for other backends, calls the group's own method."""
        if self.get_rank(group) < 0:
            return None
        own = getattr(group or dist.group.WORLD, "monitored_barrier", None)
        if (is_unlisted(group) or dist.get_backend(group) != "gloo") and own is not None:
            return own(timeout=timeout, wait_all_ranks=wait_all_ranks)
        return dist.monitored_barrier(group, timeout, wait_all_ranks)

    # --- objects

    @outside_graphs
    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> Any:
        return dist.broadcast_object_list(
            object_list, group=group, device=device, **_peer("src", src, group_src, group)
        )

    @outside_graphs
    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> Any:
        return dist.all_gather_object(object_list, obj, group)

    @outside_graphs
    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = 0,
        group: Any = None,
        group_dst: int | None = None,
    ) -> Any:
        to = _peer("dst", dst, group_dst, group, default=0)
        return dist.gather_object(obj, object_gather_list, group=group, **to)

    @outside_graphs
    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = 0,
        group: Any = None,
        group_src: int | None = None,
    ) -> Any:
        of = _peer("src", src, group_src, group, default=0)
        return dist.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, group=group, **of
        )

    # --- point-to-point

    # send() and recv() try the direct call (_direct.py) first, as inference_all_reduce() does.

    def send(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Any:
        if not is_dynamo():
            own_group = _direct.world._default_pg if group is None else group
            done = _direct.direct_send(tensor, dst, own_group, tag)
            if done is not NotImplemented:
                return done
            self.check_initialized()
            _direct.remember_ranks(group)
        return dist.send(tensor, group=group, tag=tag, **_peer("dst", dst, None, group))

    def recv(self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        if not is_dynamo():
            own_group = _direct.world._default_pg if group is None else group
            source = _direct.direct_recv(tensor, src, own_group, tag)
            if source is not NotImplemented:
                return source
            self.check_initialized()
            _direct.remember_ranks(group)
        if is_unlisted(group):
            return _receive_of_unlisted(tensor, src, group, tag)
        return dist.recv(tensor, src, group, tag)

    def isend(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Any:
        return dist.isend(tensor, group=group, tag=tag, **_peer("dst", dst, None, group))

    def irecv(self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        if src is not None and is_unlisted(group):
            return dist.irecv(tensor, group=group, tag=tag, **_peer("src", src, None, group))
        return dist.irecv(tensor, src, group, tag)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        """Starts messages, P2POps of this package; returns a Work for each."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(getattr(dist, p2p.op), p2p.tensor, p2p.peer, p2p.group, p2p.tag)
                for p2p in p2p_op_list
            ]
        )

    # --- groups

    def get_rank(self, group: Any = None) -> int:
        return group.rank() if is_unlisted(group) else dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return dist.get_world_size(group)

    def get_backend(self, group: Any = None) -> str:
        if is_unlisted(group):
            return ",".join(dict.fromkeys(each.name() for each in _backends_of(group)))
        return dist.get_backend(group)

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        if isinstance(options.get("backend"), str):
            options["backend"] = select_backend(options["backend"])
        return dist.new_group(ranks, **options)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        if is_unlisted(group):
            return _ranks_of_unlisted(group)[group_rank]
        target: Any = group or dist.group.WORLD
        return dist.get_global_rank(target, group_rank)

    @outside_graphs
    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        group = group or dist.group.WORLD
        if is_unlisted(group):
            return _ranks_of_unlisted(group)
        return [dist.get_global_rank(group, k) for k in range(dist.get_world_size(group))]

    def get_world_group(self) -> Any:
        return dist.group.WORLD

    def destroy_process_group(self, group: Any = None) -> Any:
        return dist.destroy_process_group(group)

    def init_device_mesh(self, mesh_shape: Any, mesh_dim_names: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(_device_type(), mesh_shape, mesh_dim_names=mesh_dim_names)

    def enable_symm_mem_for_group(self, group_name: str) -> None:
        try:
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        except ImportError as error:
            raise RuntimeError(f"torch {torch.__version__} has no symmetric memory") from error
        enable_symm_mem_for_group(cast(Any, group_name))


def _receive_of_unlisted(tensor: Any, src: int | None, group: Any, tag: int) -> int:
    """dist.recv() for an unlisted group. torch's needs the list of ranks to name the sender."""
    if src is not None:
        dist.irecv(tensor, group=group, tag=tag, **_peer("src", src, None, group)).wait()  # type: ignore[union-attr]
        return src
    ranks = _ranks_of_unlisted(group)  # raises before a message is lost
    work = group.recv_anysource([tensor], tag)
    work.wait()
    return ranks[cast(int, work._source_rank())]


_increment_version: Any = getattr(torch.autograd.graph, "increment_version", None)


def _mark_changed(tensor: Any) -> None:
    """Marks the tensor as changed in place, so that autograd detects stale saved tensors. dscomm's
    calls do this; torch's collectives do not."""
    if _increment_version is not None and not tensor.is_inference():
        _increment_version(tensor)


class _Works:
    """One Work for several."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def known_world_size(world_size: int | None) -> int | None:
    """`world_size` if it is positive, else the variable WORLD_SIZE, else None."""
    if world_size is not None and world_size > 0:
        return world_size
    return _launcher_variables.number(os.environ, "WORLD_SIZE") or None
