"""All-reduces of torch.distributed over dscomm: waited for at once, in the background, in a group.

torchrun --nproc-per-node=2 examples/all_reduce.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("dscomm")
rank, size = dist.get_rank(), dist.get_world_size()

# In place: every rank's tensor becomes the sum of all.
tensor = torch.full((1000,), float(rank + 1))
dist.all_reduce(tensor)
if rank == 0:
    print(f"the sum of 1 to {size} is {tensor[0].item():g}")

# In the background: compute something else, then wait before the tensor is used.
largest = torch.tensor([rank])
work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
squares = torch.arange(1000) ** 2
work.wait()
if rank == 0:
    print(f"the largest rank is {largest.item()}, and the last square {squares[-1].item()}")

# In a group: all ranks make it, its ranks use it.
even = dist.new_group(list(range(0, size, 2)))
if rank % 2 == 0:
    count = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(count, group=even)
    if rank == 0:
        print(f"{count.item()} of {size} ranks have an even number")

dist.destroy_process_group()
