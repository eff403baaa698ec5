"""Times of torch.distributed's collectives over CPU backends, as nccl-tests measures NCCL's.

torchrun --nproc-per-node=2 -m deepspeed_comm.bench [collective ...] [flags]
"""
