"""DeepSpeed's oneCCL module over dscomm, for programs that use it directly.

Mirrors the module that DeepSpeed's CCLCommBuilder loads: same names.

    from deepspeed_comm import ccl

    kvs = torch.tensor(ccl.get_kvs_addr(rank), dtype=torch.uint8)
    ...  # pass rank 0's tensor to all ranks: by MPI, a file, or another process group
    ccl.initialize(size, rank, kvs)
    ccl.all_reduce(tensor, deepspeed_comm.ReduceOp.SUM, list(range(size)), False)

It neither needs nor makes a process group of torch.distributed. A group is a list of ranks of
initialize(), in order. Lists other than all ranks must be passed to initialize_sub_comm() first.
Roots are positions in the list. Collectives change CPU tensors in place.

Synchronous calls return None when they are done; async_op=True returns a torch Work. Unlike in
DeepSpeed's module, every dtype and op of dscomm is reduced correctly (with DeepSpeed's ReduceOp or
torch's), and an unknown group raises ValueError instead of meaning all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deepspeed_comm import _plugin
from deepspeed_comm._caching import Plans
from deepspeed_comm.comm import default_pg_timeout
from deepspeed_comm.environment import own_address
from deepspeed_comm.reduce_op import torch_reduce_op

_ADDRESS_BYTES = 256  # the size of oneCCL's addresses, which programs expect
_COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "inference_all_reduce",
    "all_reduce_caching",
    "barrier",
)

# The stores of this process, kept until it ends, because other ranks may still use them.
_served: list[Any] = []
_groups: dict[tuple[int, ...], Any] = {}
_plans = Plans(lambda native: next(key for key, each in _groups.items() if each is native))
_world: tuple[int, ...] = ()
_rank = -1


def _serve_store() -> list[int]:
    """Starts a store in this process; returns its address as bytes."""
    host = own_address()
    # The other ranks connect without a world size, so the store must not wait for them.
    store = dist.TCPStore(
        host, 0, None, is_master=True, timeout=default_pg_timeout, wait_for_workers=False
    )
    _served.append(store)
    address = f"{host}:{store.port}".encode()
    return list(address.ljust(_ADDRESS_BYTES, b"\0"))


def get_kvs_addr(rank: int) -> list[int]:
    """On rank 0, starts a store and returns its address, for initialize() of every rank.

    Returns 256 bytes; on other ranks they are 0.
    """
    return _serve_store() if rank == 0 else [0] * _ADDRESS_BYTES


def get_sub_kvs_addr(first: bool) -> list[int]:
    """get_kvs_addr() for initialize_sub_comm(); `first` is true on the group's first rank."""
    return _serve_store() if first else [0] * _ADDRESS_BYTES


def initialize(size: int, rank: int, kvs: Any) -> None:
    """Connects all ranks. Collective; a second call does nothing.

    kvs: rank 0's get_kvs_addr(), as a uint8 tensor or a list.

    Raises ValueError if rank is not below size, or if kvs is not an address. Raises
    DistBackendError, with the missing ranks, if the ranks do not meet within DEEPSPEED_TIMEOUT.
    """
    global _world, _rank
    if _world:
        return
    if not 0 <= rank < size:
        raise ValueError(f"initialize: rank {rank} must be at least 0 and below size, {size}")
    world = tuple(range(size))
    _groups[world] = _make_group("ccl", list(world), rank, kvs)
    _world, _rank = world, rank


def initialize_sub_comm(size: int, rank: int, kvs: Any, ranks: list[int]) -> None:
    """Makes the group of these ranks. Collective over them.

    size: the number of ranks in the group. rank: this process's position in it. kvs:
    get_sub_kvs_addr() of the group's first rank. ranks: ranks of initialize(), in order.

    Raises ValueError if size, rank and ranks contradict each other.
    """
    _check_initialized("initialize_sub_comm")
    key = tuple(ranks)
    if key in _groups:
        return
    if len(key) != size or not 0 <= rank < size or key[rank] != _rank:
        raise ValueError(
            f"initialize_sub_comm: got size {size}, rank {rank} and ranks {list(ranks)}; expected "
            f"{size} ranks, with this rank, {_rank}, at position {rank} (of 0 to {size - 1})"
        )
    name = "ccl " + ",".join(map(str, key))
    _groups[key] = _make_group(name, list(key), rank, kvs)


def get_rank(group: Any = 0) -> int:
    """This rank's position in the group, a list of ranks; -1 if it is not a member.

    group: 0 means all ranks.
    """
    members = _members("get_rank", group)
    return members.index(_rank) if _rank in members else -1


def get_world_size(group: Any = 0) -> int:
    """The number of ranks of the group, a list of ranks; 0 means all ranks."""
    return len(_members("get_world_size", group))


def get_available_coll() -> list[str]:
    """The names of this module's collectives."""
    return list(_COLLECTIVES)


def broadcast(tensor: Any, src: int, group: list[int], async_op: bool = False) -> Any:
    """Copies the tensor of the group's position `src` to all its ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    return _finish(_group("broadcast", group).broadcast([tensor], options), async_op)


def all_reduce(tensor: Any, op: Any, group: list[int], async_op: bool = False) -> Any:
    """Reduces the group's tensors in place, with the result on all its ranks."""
    return _group("all_reduce", group).all_reduce(tensor, torch_reduce_op(op), async_op)


def inference_all_reduce(tensor: Any, op: Any, async_op: bool = False) -> Any:
    """all_reduce() over all ranks."""
    return _group("inference_all_reduce", list(_world)).all_reduce(
        tensor, torch_reduce_op(op), async_op
    )


def all_reduce_caching(
    tensor: Any, op: Any, match_id: str, group: list[int], async_op: bool = False
) -> Any:
    """all_reduce() for a call that is repeated, named by match_id.

    See deepspeed_comm.all_reduce_caching().
    """
    native = _group("all_reduce_caching", group)
    plan = _plans.find(match_id, tensor, op, native)
    work = native.all_reduce_caching(tensor, torch_reduce_op(op), match_id, async_op)
    _plans.keep(match_id, plan)
    return work


def barrier(group: list[int], async_op: bool = False) -> Any:
    """Waits until all ranks of the group have called it."""
    return _finish(_group("barrier", group).barrier(), async_op)


def _finish(work: Any, async_op: bool) -> Any:
    if async_op or work is None:
        return work
    work.wait()
    return None


def _check_initialized(call: str) -> None:
    if not _world:
        raise RuntimeError(f"{call}: call ccl.initialize(size, rank, kvs) first")


def _members(call: str, group: Any) -> tuple[int, ...]:
    _check_initialized(call)
    return tuple(group) if isinstance(group, (list, tuple)) else _world


def _group(call: str, ranks: list[int]) -> Any:
    _check_initialized(call)
    found = _groups.get(tuple(ranks))
    if found is None:
        raise ValueError(
            f"{call}: no group of the ranks {list(ranks)}: call initialize_sub_comm() first"
        )
    return found


def _make_group(name: str, ranks: list[int], rank: int, kvs: Any) -> Any:
    text = (
        bytes(torch.as_tensor(kvs, dtype=torch.uint8).tolist())
        .rstrip(b"\0")
        .decode("ascii", "replace")
    )
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(
            f"kvs: got {text!r}, expected the bytes of get_kvs_addr(), or get_sub_kvs_addr(), of "
            f"the group's first rank; every rank must pass those of the first rank, not its own"
        )
    store = dist.TCPStore(host, int(port), None, is_master=False, timeout=default_pg_timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = dist.PrefixStore(name, store)
    options.group_id = name
    options.group_rank = rank
    options.group_size = len(ranks)
    options.global_ranks_in_group = ranks
    options.timeout = default_pg_timeout
    return _plugin._create_backend(options)
