"""The API of deepspeed.comm over dscomm, with its log of how long calls take.

torchrun --nproc-per-node=2 examples/communication_log.py
"""

import torch

import deepspeed_comm as dist  # with DeepSpeed: from deepspeed import comm as dist

dist.init_distributed()
rank, size = dist.get_rank(), dist.get_world_size()

dist.configure(enabled=True, prof_all=True)
for elements in (1000, 1_000_000):
    gradients = torch.full((elements,), float(rank))
    shard = torch.empty(elements // size)
    for _ in range(10):
        dist.all_reduce(gradients, dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(shard, gradients[: shard.numel() * size])
        dist.all_gather_into_tensor(gradients[: shard.numel() * size], shard)

# Rank 0 prints a table: calls, sizes, latencies, bandwidths.
summary = dist.log_summary(return_dict=True)
if rank == 0:
    calls = sum(row["count"] for rows in summary["summary"].values() for row in rows.values())
    print(f"{calls} calls were logged")

dist.destroy_process_group()
