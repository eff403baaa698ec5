"""Times torch.distributed's collectives over CPU backends, with the method of nccl-tests.

torchrun --nproc-per-node=2 -m deepspeed_comm.bench [collective ...] [flags]
"""
