"""Trains a small model in every way: over the backend, over gloo, and in a single process.

Every rank gets its share of the same batches, so each way must give the same losses and weights,
apart from the order in which gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import BACKEND, World

STEPS = 8
SHARE = 6  # rows of a batch for one rank
Model = torch.nn.Module


def make_model() -> Model:
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 47), torch.nn.GELU(), torch.nn.Linear(47, 64), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 5))


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = SHARE * size
    inputs = torch.randn(rows, 20, generator=generator)
    # A function that can be learned.
    return inputs, inputs[:, :5].argmax(1)


def train(world: World, prepare: Callable[[Model], Model], whole: bool = False) -> dict[str, Any]:
    """The losses of this rank's share, and the final weights."""
    model = prepare(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    share = slice(SHARE * world.rank, SHARE * (world.rank + 1))
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step % 3, world.size)
        if not whole:
            inputs, targets = inputs[share], targets[share]
        each = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        losses.append((each[share] if whole else each).mean().item())
    weights = [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]
    return {"losses": losses, "weights": weights}


def shard(model: Model, mesh: DeviceMesh) -> Model:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ways(world: World) -> dict[str, Callable[[Model], Model]]:
    def replicated(group: Any) -> Callable[[Model], Model]:
        # Buckets small enough that there are several.
        return lambda model: DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.005
        )

    def sharded(mesh: DeviceMesh) -> Callable[[Model], Model]:
        return lambda model: shard(model, mesh)

    found = {}
    for backend in dict.fromkeys((BACKEND, "gloo")):
        group = dist.new_group(backend=backend)
        found[f"DDP, {backend}"] = replicated(group)
        found[f"FSDP2, {backend}"] = sharded(DeviceMesh.from_group(group, "cpu"))
    host_count = len(set(world.placement))
    shape = (host_count, world.size // host_count)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within"))
    # Shards within a host, replicas across hosts.
    found[f"HSDP, {BACKEND}"] = sharded(mesh)
    return found


def main() -> None:
    world = World()
    world.init()
    alone = train(world, lambda model: model, whole=True)
    results = {name: train(world, prepare) for name, prepare in ways(world).items()}
    for name, result in results.items():
        for what in ("losses", "weights"):
            torch.testing.assert_close(
                result[what],
                alone[what],
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name, what=what: f"{what} of {name}: {text}",
            )
    losses = {name: result["losses"] for name, result in results.items()}
    dist.barrier()
    dist.destroy_process_group()
    world.say("done", losses=losses | {"alone": alone["losses"]})


if __name__ == "__main__":
    main()
