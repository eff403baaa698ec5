"""Training with DistributedDataParallel over dscomm: each rank has its share of the data.

torchrun --nproc-per-node=2 examples/ddp_training.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("dscomm")
rank, size = dist.get_rank(), dist.get_world_size()

# Points of a plane, with some noise; rank r has every size-th of them, from the r-th on.
generator = torch.Generator().manual_seed(0)
points = torch.randn(1024, 3, generator=generator)
heights = points @ torch.tensor([[2.0], [-1.0], [0.5]]) + 3.0
heights += 0.01 * torch.randn(heights.shape, generator=generator)
points, heights = points[rank::size], heights[rank::size]

torch.manual_seed(rank)  # DDP gives every rank the parameters of rank 0
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for batch in range(0, len(points), 32):
        optimizer.zero_grad()
        guess = model(points[batch : batch + 32])
        loss = torch.nn.functional.mse_loss(guess, heights[batch : batch + 32])
        loss.backward()  # averages the gradients of all ranks
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean.item():.5f}")

# The same bits on every rank, after however many steps.
parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
everyones = [torch.empty_like(parameters) for _ in range(size)]
dist.all_gather(everyones, parameters)
assert all(torch.equal(each, parameters) for each in everyones)
if rank == 0:
    print("learnt", ", ".join(f"{value:.2f}" for value in parameters.tolist()))

dist.destroy_process_group()
