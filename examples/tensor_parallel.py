"""A layer that is split over the ranks, as for inference: inference_all_reduce adds what they have.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py

The first matrix is split by its outputs and the second by its inputs, so that the ranks talk once,
after the second.
"""

import torch
import torch.nn.functional as F

import deepspeed_comm as dist

FEATURES, HIDDEN = 256, 1024

dist.init_distributed()
rank, size = dist.get_rank(), dist.get_world_size()
assert HIDDEN % size == 0, f"{HIDDEN} hidden features cannot be shared by {size} ranks"

torch.manual_seed(0)  # the same matrices and tokens on every rank
first = torch.randn(HIDDEN, FEATURES) / FEATURES**0.5
second = torch.randn(FEATURES, HIDDEN) / HIDDEN**0.5
tokens = torch.randn(8, FEATURES)

share = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
own_first, own_second = first[share], second[:, share].contiguous()

with torch.inference_mode():
    hidden = F.gelu(F.linear(tokens, own_first))
    output = dist.inference_all_reduce(F.linear(hidden, own_second))
    whole = F.linear(F.gelu(F.linear(tokens, first)), second)

torch.testing.assert_close(output, whole)
if rank == 0:
    print(f"{size} ranks with {own_first.numel() + own_second.numel()} weights each, as one of all")

dist.destroy_process_group()
