"""A decode through DTensor: parallelize_module() with ColwiseParallel and RowwiseParallel."""

from __future__ import annotations

import torch.distributed as dist
from decoding import decode, prepare, whole_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import Measured, Metric, Workload

PLAN = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.self_attn.q_proj": ColwiseParallel(),
    "layers.*.self_attn.k_proj": ColwiseParallel(),
    "layers.*.self_attn.v_proj": ColwiseParallel(),
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def measure(contender: str, quick: bool) -> Measured:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return decode(parallelize_module(whole_model(quick), mesh, PLAN), quick)


WORKLOAD = Workload(
    {"word": Metric("tensor-parallel decode, DTensor", "tokens/s")},
    measure,
    prepare=prepare,
)
