"""A decode whose layers are sharded by hand, as inference servers do it: one all-reduce after each
row-parallel layer, by dist.all_reduce or by deepspeed_comm.inference_all_reduce, the direct call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decoding import decode, prepare, whole_model
from torch import nn
from workload import DIRECT, DSCOMM, GLOO, Measured, Metric, Workload

import deepspeed_comm


class RowParallel(nn.Module):
    """Has some columns of a linear layer's weight, and sums the results of all ranks."""

    def __init__(self, whole: nn.Linear, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight, 1))
        self.all_reduce = all_reduce

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = nn.functional.linear(hidden, self.weight)
        self.all_reduce(output)
        return output


class ParallelHead(nn.Module):
    """Has some of the words, and gathers the logits of all words."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight, 0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden, self.weight)
        ranks = dist.get_world_size()
        gathered = logits.new_empty(ranks * logits.shape[0], *logits.shape[1:])
        dist.all_gather_into_tensor(gathered, logits)
        return torch.cat(gathered.chunk(ranks), dim=-1)


def share(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of this rank's share."""
    return weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def measure(contender: str, quick: bool) -> Measured:
    all_reduce: Callable[[torch.Tensor], Any] = dist.all_reduce
    if contender == DIRECT:
        deepspeed_comm.init_distributed("dscomm", verbose=False)
        all_reduce = deepspeed_comm.inference_all_reduce
    model = whole_model(quick)
    for layer in model.layers:
        attention, feedforward = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj,
                       feedforward.gate_proj, feedforward.up_proj):  # fmt: skip
            linear.weight = nn.Parameter(share(linear.weight, 0))
        attention.o_proj = RowParallel(attention.o_proj, all_reduce)
        feedforward.down_proj = RowParallel(feedforward.down_proj, all_reduce)
    model.lm_head = ParallelHead(model.lm_head)
    return decode(model, quick)


WORKLOAD = Workload(
    {"word": Metric("tensor-parallel decode, all_reduce by hand", "tokens/s")},
    measure,
    (GLOO, DSCOMM, DIRECT),
    prepare,
)
