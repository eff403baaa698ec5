"""Keeps a job's store, as torchrun does, until it is killed."""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist

store = dist.TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.pause()
