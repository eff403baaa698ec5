"""The base class of backends, and the choice of torch's backend.

Mirrors deepspeed.comm.backend: same names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from deepspeed_comm import constants
from deepspeed_comm._log import warn_once

NOT_INITIALIZED = "DeepSpeed backend not set, please initialize it using init_process_group()"


class Backend:
    """The base class of backends; comm.cdb is one."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group: Any = None
        self.world_size = size
        self.world_rank = rank
        self.single_gpu_mode = True
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def check_initialized(self) -> None:
        assert self.is_initialized(), NOT_INITIALIZED

    def new_group(self, ranks: list[int]) -> Any:
        raise NotImplementedError(f"backend {self.name} makes no groups")

    def init_process_group(self) -> None:
        self.initialized = True


def select_backend(wanted: str | None = None) -> str:
    """The backend's name for torch.distributed.init_process_group().

    wanted: a name, or names by device such as "cpu:gloo,cuda:nccl". By default dscomm, with NCCL
    for CUDA tensors if a GPU is available. "ccl", DeepSpeed's name of its CPU backend, becomes
    dscomm unless oneCCL's bindings are loaded.
    """
    if wanted is not None:
        return ",".join(_known_name(part) for part in wanted.split(","))
    if torch.cuda.is_available():
        return f"cpu:{constants.DSCOMM_BACKEND},cuda:{constants.NCCL_BACKEND}"
    return constants.DSCOMM_BACKEND


def _known_name(part: str) -> str:
    """Replaces ccl in one part of the names: "cpu:ccl", or just "ccl"."""
    device, colon, name = part.rpartition(":")
    is_ccl = name.lower() == constants.CCL_BACKEND
    if not is_ccl or hasattr(torch.distributed.Backend, constants.CCL_BACKEND.upper()):
        return part
    warn_once("the backend ccl is not registered with torch; dscomm is used instead")
    return device + colon + constants.DSCOMM_BACKEND
