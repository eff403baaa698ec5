"""torch.distributed.checkpoint: what FSDP2 trained is saved, and loaded into other shardings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from over_both import assert_same_bits, equal_over_both
from small_model import make_model, parameters_of, shard, train, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.cases.harness import World

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def _sharded(seed: int) -> Trained:
    model = make_model()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3)


def _state(trained: Trained) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained)
    return {"model": model, "optimizer": optimizer}


def _wholes(state: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of a state, whole."""
    return {
        key: _wholes(value) if isinstance(value, dict) else whole(value)
        for key, value in state.items()
        if isinstance(value, (dict, torch.Tensor))
    }


def _save_and_load(world: World, backend: str, folder: str, asynchronous: bool) -> dict[str, Any]:
    world.init(backend)
    path = Path(folder) / backend
    trained = _sharded(seed=1)
    train(*trained, world.rank, steps=4)
    saved = _state(trained)
    then = _wholes(saved)
    if asynchronous:
        checkpoint.async_save(saved, checkpoint_id=path).result()
    else:
        checkpoint.save(saved, checkpoint_id=path)

    fresh = _sharded(seed=2)
    target = _state(fresh)
    checkpoint.load(target, checkpoint_id=path)
    set_state_dict(*fresh, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_same_bits(_wholes(_state(fresh)), then)

    # The other dimension sharded: every rank reads parts of both ranks' files.
    mesh = init_device_mesh("cpu", (world.size,))
    columns = {
        name: distribute_tensor(torch.zeros(value.shape), mesh, [Shard(value.dim() - 1)])
        for name, value in saved["model"].items()
    }
    checkpoint.load({"model": columns}, checkpoint_id=path)
    assert_same_bits(_wholes(columns), then["model"])

    # Training goes on from what was loaded as from what was saved.
    assert train(*trained, world.rank, steps=3) == train(*fresh, world.rank, steps=3)
    assert_same_bits(parameters_of(trained[0]), parameters_of(fresh[0]))
    return {"saved": then["model"], "trained on": parameters_of(fresh[0])}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_saved_checkpoint_loads_the_same_values(tmp_path: Path, asynchronous: bool) -> None:
    results = equal_over_both(_save_and_load, str(tmp_path), asynchronous)
    # One process without a group reads what two have written.
    alone = make_model()
    state = {"model": alone.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "dscomm", no_dist=True)
    set_model_state_dict(alone, state["model"], options=StateDictOptions(strict=True))
    assert_same_bits(parameters_of(alone), results[0]["saved"])
