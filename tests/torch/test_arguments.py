"""Wrong arguments: the calling rank raises an exception at once, which names the argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.cases.harness import TORCH_2, RankSets, World, run_fresh
from tests.cases.marks import needs_torch_2

# torch 1.13 has no Python TypeError for its C++ counterpart in some bindings.
WRONG = (ValueError, TypeError, RuntimeError)


def _refuses(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(WRONG) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is missing in: {text}"
    if TORCH_2:
        assert isinstance(caught.value, (ValueError, TypeError)), type(caught.value)


def _arguments_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    t = torch.zeros(4)

    def zeros(count: int) -> list[torch.Tensor]:
        return [torch.zeros(4) for _ in range(count)]

    _refuses(lambda: dist.all_gather(zeros(size + 1), t), "tensor_list", str(size + 1), str(size))
    _refuses(
        lambda: dist.all_gather([torch.zeros(5)] + zeros(size - 1), torch.zeros(4)),
        "tensor_list[0]",
        "5",
        "4",
    ) if (rank == 0) else None
    _refuses(
        lambda: world.allgather([zeros(size - 1) + [torch.zeros(4, dtype=torch.int32)]], [t]),
        f"tensor_list[{size - 1}]",
        "int32",
        "float32",
    )
    _refuses(lambda: world.allreduce([t, t]), "tensor", "2", "one")
    _refuses(
        lambda: world.allreduce([torch.zeros(2, dtype=torch.complex32)]),
        "tensor",
        "ComplexHalf",
        "complex64",
    )
    _refuses(
        lambda: world.broadcast(t, size),
        "broadcast in group '",
        f"': src: got rank {size}",
        f"0 to {size - 1}",
    )
    _refuses(lambda: world.reduce(t, -1), "dst", "-1")
    _refuses(lambda: world.gather([], t, rank), "gather_list", "0")
    _refuses(lambda: world.gather(zeros(size), t, (rank + 1) % size), "gather_list", "not dst")
    _refuses(
        lambda: world.scatter(t, zeros(size - 1), rank),
        "scatter_list",
        str(size - 1),
        str(size),
    )
    _refuses(lambda: world.scatter(t, zeros(size), (rank + 1) % size), "scatter_list", "not src")
    _refuses(lambda: world.reduce_scatter([t], [zeros(size + 1)]), "input_list", str(size + 1))
    _refuses(lambda: dist.reduce_scatter(torch.zeros(3), zeros(size)), "output", "3", "4")
    _refuses(
        lambda: dist.all_to_all(zeros(size), zeros(size + 1)), "input_tensor_list", str(size + 1)
    )
    _refuses(
        lambda: dist.all_to_all(zeros(size - 1), zeros(size)), "output_tensor_list", str(size - 1)
    )
    _refuses(
        lambda: dist.all_to_all_single(torch.zeros(size * 2 + 1), torch.zeros(size * 2)),
        "output",
        "multiple",
    )
    _refuses(
        lambda: dist.all_to_all_single(
            torch.zeros(6), torch.zeros(6), None, [6] + [1] * (size - 1)
        ),
        "input_split_sizes",
        "add up",
        "6",
    )
    _refuses(
        lambda: dist.all_to_all_single(torch.zeros(6), torch.zeros(6), [7, -1] + [0] * (size - 2)),
        "output_split_sizes",
        "-1",
    )
    # The sum of these is 6 if it goes on from -1 after an overflow.
    _refuses(
        lambda: dist.all_to_all_single(
            torch.zeros(6), torch.zeros(6), None, [2**63 - 1, 1, 7] + [0] * (size - 3)
        ),
        "input_split_sizes",
        "add up to more than 6",
    )
    _refuses(lambda: dist.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)), "dimension")
    to_itself = [int(other == rank) for other in range(size)]
    _refuses(
        lambda: dist.all_to_all_single(
            torch.zeros(5), torch.zeros(6), [5 * n for n in to_itself], [6 * n for n in to_itself]
        ),
        "all_to_all_single in group '",
        "': this rank sends 6 elements to itself and expects 5; make ",
        f"input_split_sizes[{rank}] and output_split_sizes[{rank}] equal",
    )
    _refuses(lambda: dist.isend(t, (rank + 1) % size, tag=-5), "send in group '", "': tag: got -5")
    _refuses(
        lambda: world.recv([t], size + 3, 0), "recv in group '", f"': src: got rank {size + 3}"
    )
    _refuses(lambda: world.send([t, t], (rank + 1) % size, 0), "tensor", "2")
    # After all of these errors the group still works.
    dist.all_reduce(t)
    dist.barrier()


def test_invalid_arguments_are_refused_by_name(ranks: RankSets) -> None:
    ranks(3).run(_arguments_case)


def _torch_2_arguments_case() -> None:
    size = dist.get_world_size()
    world = dist.group.WORLD
    t = torch.zeros(4)
    _refuses(
        lambda: dist.all_gather_into_tensor(torch.zeros(size * 4 + 1), t),
        "output_tensor",
        str(size * 4),
    )
    _refuses(
        lambda: dist.all_gather_into_tensor(torch.zeros(size * 4, dtype=torch.int64), t),
        "output_tensor",
        "int64",
    )
    _refuses(
        lambda: dist.reduce_scatter_tensor(t, torch.zeros(size * 4 - 1)), "input", str(size * 4)
    )
    _refuses(lambda: world.allgather_into_tensor_coalesced([t], [t, t]), "outputs", "1", "2")
    _refuses(
        lambda: world.allgather_into_tensor_coalesced(
            [torch.zeros(size * 4), torch.zeros(1)], [t, t]
        ),
        "outputs[1]",
    )
    _refuses(
        lambda: world._get_backend(torch.device("cpu")).set_timeout(-torch_seconds(1)), "timeout"
    )
    dist.barrier()


def torch_seconds(seconds: int) -> object:
    from datetime import timedelta

    return timedelta(seconds=seconds)


@needs_torch_2
def test_invalid_arguments_of_torch_2_calls_are_refused_by_name(ranks: RankSets) -> None:
    ranks(2).run(_torch_2_arguments_case)


def _backend_case() -> None:
    """Calls the backend directly, without a dispatcher that checks devices first."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.AllreduceOptions()
    with pytest.raises(ValueError, match=r"tensor: got a tensor on meta, expected one on the CPU"):
        backend.allreduce([torch.zeros(3, device="meta")], options)
    with pytest.raises(TypeError, match=r"tensor: got a tensor of layout SparseCsr"):
        backend.allreduce([torch.eye(2).to_sparse_csr()], options)
    dist.barrier()


@needs_torch_2
def test_tensor_of_other_device_or_layout_is_refused(ranks: RankSets) -> None:
    ranks(2).run(_backend_case)


def _creation_case(world: World) -> None:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from deepspeed_comm import _C

    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = dist.HashStore(), 3, 2
    with pytest.raises(ValueError, match="rank: got 3 of 2"):
        _C.create_backend(options)
    with pytest.raises(TypeError, match="pg_options: got .*str"):
        _C.create_backend(options, "fast")


@needs_torch_2
def test_backend_creation_with_invalid_options_raises() -> None:
    run_fresh(1, _creation_case)


def _settings_case(world: World) -> None:
    import os

    os.environ["DSCOMM_SPIN_PAUSE"] = "5"
    with pytest.raises((ValueError, RuntimeError), match="did you mean DSCOMM_SPIN_PAUSES"):
        world.init()
    del os.environ["DSCOMM_SPIN_PAUSE"]
    os.environ["DSCOMM_YIELD_US"] = "soon"
    with pytest.raises(
        (ValueError, RuntimeError), match="DSCOMM_YIELD_US=soon: expected a whole number"
    ):
        world.init(name="again")


def test_invalid_setting_in_environment_raises() -> None:
    run_fresh(1, _settings_case)


def _mistaken_rank_case(world: World, mistaken: tuple[int, ...]) -> str:
    import os

    if world.rank in mistaken:
        os.environ["DSCOMM_SPIN_PAUSE"] = "5"
    with pytest.raises((ValueError, RuntimeError)) as raised:
        world.init()
    return str(raised.value)


@pytest.mark.parametrize("mistaken", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_invalid_setting_on_some_ranks_raises_on_all(mistaken: tuple[int, ...]) -> None:
    """At once: no rank waits until its timeout for ranks that have no group."""
    for rank, text in enumerate(run_fresh(3, _mistaken_rank_case, mistaken)):
        assert "DSCOMM_SPIN_PAUSE is not a setting of dscomm; did you mean" in text, text
        assert "timed out" not in text
        if rank not in mistaken:
            assert any(f"rank {other} " in text for other in mistaken), text


def _freed(
    count: int = 4, view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> torch.Tensor:
    tensor = view(torch.zeros(count))
    tensor.untyped_storage().resize_(0)
    return tensor


def _without_memory_case() -> None:
    """Each operation refuses a freed tensor in each position at once; peers see nothing of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    right, left = (rank + 1) % size, (rank - 1) % size

    def full(count: int = 4) -> torch.Tensor:
        return torch.zeros(count)

    def with_freed() -> list[torch.Tensor]:
        return [*(full() for _ in range(size - 1)), _freed()]

    def fulls() -> list[torch.Tensor]:
        return [full() for _ in range(size)]

    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(_freed()),
        lambda: dist.all_reduce(_freed(), async_op=True),
        lambda: dist.all_reduce(_freed(view=lambda t: t.view(2, 2).t())),
        lambda: dist.all_reduce(_freed(view=lambda t: t[3:])),
        lambda: dist.all_reduce(_freed(view=lambda t: t[:1].expand(5))),
        lambda: dist.broadcast(_freed(), 0),
        lambda: dist.reduce(_freed(), 0),
        lambda: dist.all_gather(fulls(), _freed()),
        lambda: dist.all_gather(with_freed(), full()),
        lambda: dist.all_gather_into_tensor(_freed(4 * size), full()),
        lambda: dist.all_gather_into_tensor(full(4 * size), _freed()),
        lambda: dist.gather(_freed(), fulls() if rank == 0 else None, 0),
        lambda: dist.scatter(_freed(), fulls() if rank == 0 else None, 0),
        lambda: dist.reduce_scatter(full(), with_freed()),
        lambda: dist.reduce_scatter_tensor(_freed(), full(4 * size)),
        lambda: dist.all_to_all(fulls(), with_freed()),
        lambda: dist.all_to_all_single(full(4 * size), _freed(4 * size)),
        lambda: world.allreduce_coalesced([full(), _freed()], dist.AllreduceCoalescedOptions()),
        lambda: world.allgather_into_tensor_coalesced([full(4 * size)], [_freed()]),
        lambda: world.reduce_scatter_tensor_coalesced([full()], [_freed(4 * size)]),
        lambda: dist.isend(_freed(), right),
        lambda: dist.irecv(_freed(), left),
        lambda: world.recv_anysource([_freed()], 0),
        lambda: dist.all_reduce(
            torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.int64), _freed(), (4,))
        ),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(ValueError, match="without memory.*the storage was freed"):
            call()
            raise AssertionError(number)
    # If part of the storage is left, a tensor within it is valid; an empty tensor needs no memory.
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(ValueError, match="end at byte 32 of its storage, which holds 16"):
        dist.all_reduce(tensor)
    tensor = torch.empty(0).set_(tensor.untyped_storage(), 0, (4,))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 4
    dist.all_reduce(_freed(view=lambda t: t[:0]))

    zeros = torch._efficientzerotensor(4)
    for call in (
        lambda: dist.all_reduce(zeros),
        lambda: dist.broadcast(zeros, right),
        lambda: dist.all_gather([zeros, *fulls()[1:]], full()),
        lambda: dist.irecv(zeros, left),
    ):
        with pytest.raises(ValueError, match="zero tensor, which has no memory to write to"):
            call()
    outputs = [torch.ones(4) for _ in range(size)]
    dist.all_gather(outputs, zeros)
    assert not any(output.any() for output in outputs)
    dist.barrier()


@needs_torch_2
def test_tensors_with_freed_memory_are_refused(ranks: RankSets) -> None:
    ranks(2).run(_without_memory_case)
