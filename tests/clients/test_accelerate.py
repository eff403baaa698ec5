"""A training loop of Accelerate on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from over_both import assert_same_bits, equal_over_both, needed
from small_model import ROWS, batch, make_model, parameters_of
from torch.utils.data import DataLoader, TensorDataset

from tests.cases.harness import World

accelerate = needed("accelerate")

EPOCHS = 3
BATCHES = 4
ODD_ROWS = 3  # of a last batch that ranks must even out


def _data() -> TensorDataset:
    batches = [batch(step, rank) for rank in range(4) for step in range(3)]
    inputs, targets = zip(*batches, strict=True)
    rows = 2 * BATCHES * ROWS + ODD_ROWS
    return TensorDataset(torch.cat(inputs)[:rows], torch.cat(targets)[:rows])


def _train(world: World, backend: str) -> dict[str, Any]:
    # Accelerate has a list of backends, and takes any that is there already.
    world.init(backend)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.distributed_type == accelerate.DistributedType.MULTI_CPU
    assert accelerator.num_processes == world.size
    accelerate.utils.set_seed(11)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(_data(), batch_size=ROWS, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
    guesses = []
    for inputs, targets in loader:
        with torch.no_grad():
            guess = model(inputs).argmax(1)
        guesses.append(torch.stack(accelerator.gather_for_metrics((guess, targets))))
    told = [accelerate.utils.broadcast_object_list([f"of {world.rank}"], from_process=1)[0]]
    told += accelerate.utils.gather_object([f"of {world.rank}"])
    padded = accelerator.pad_across_processes(torch.ones(2 + world.rank), dim=0)
    accelerator.wait_for_everyone()
    return {
        "losses": [loss.item() for loss in losses],
        "guesses": guesses,
        "told": told,
        "padded": padded,
        "parameters": parameters_of(accelerator.unwrap_model(model)),
    }


def test_accelerate_training_matches_gloo() -> None:
    results = equal_over_both(_train)
    for result in results:
        assert_same_bits(result["parameters"], results[0]["parameters"])
        assert result["told"] == ["of 1", "of 0", "of 1"]
        # Rows that made the last batches equally long are not in the metrics.
        rows = torch.cat(result["guesses"], 1)
        assert rows.shape == (2, 2 * BATCHES * ROWS + ODD_ROWS)
        assert (rows[0] == rows[1]).float().mean() > 0.4  # 1 in 5 by chance
    assert results[0]["padded"].tolist() == [1.0, 1.0, 0.0]
