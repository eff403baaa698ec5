"""torch.distributed.checkpoint of a model under FSDP2 and of its AdamW: saved, and loaded."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from train_fsdp2 import shard
from training import batch, digest, make_optimizer, prepare, train_step, whole_model
from workload import Measured, Metric, Workload

from deepspeed_comm._timing import sample


def measure(contender: str, quick: bool) -> Measured:
    model = shard(whole_model(quick))
    optimizer = make_optimizer(model)
    train_step(model, optimizer, batch(0, 64))
    then = digest(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    save, load = [], []
    folders: list[Any] = [tempfile.mkdtemp(prefix="dscomm-bench-") if is_first() else None]
    dist.broadcast_object_list(folders)
    try:
        for number in range(2 if quick else 4):
            path = f"{folders[0]}/{number}"
            save.append(sample(lambda path=path: checkpoint.save(state, checkpoint_id=path)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load.append(sample(lambda path=path: checkpoint.load(state, checkpoint_id=path)))
    finally:
        if is_first():
            shutil.rmtree(folders[0])
    if digest(model) != then:
        raise RuntimeError("what was loaded is not what was saved")
    # The first save and the first load are warm-up.
    return {"save": save[1:], "load": load[1:]}, then


def is_first() -> bool:
    return dist.get_rank() == 0


WORKLOAD = Workload(
    {
        "save": Metric("checkpoint of FSDP2 and AdamW, save", "s"),
        "load": Metric("checkpoint of FSDP2 and AdamW, load", "s"),
    },
    measure,
    prepare=prepare,
)
