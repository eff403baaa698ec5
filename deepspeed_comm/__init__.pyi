"""The package for type checkers: the names that __getattr__ of __init__.py finds."""

from enum import Enum as Enum

from torch._C._distributed_c10d import GradBucket as GradBucket

from deepspeed_comm.backend import Backend as Backend
from deepspeed_comm.comm import *  # noqa: F403
from deepspeed_comm.comms_logging import CommsLogger as CommsLogger
from deepspeed_comm.config import DeepSpeedCommsConfig as DeepSpeedCommsConfig
from deepspeed_comm.constants import *  # noqa: F403
from deepspeed_comm.environment import (
    TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from deepspeed_comm.environment import in_aml as in_aml
from deepspeed_comm.environment import in_aws_sm as in_aws_sm
from deepspeed_comm.environment import in_dlts as in_dlts
from deepspeed_comm.environment import (
    patch_aml_env_for_torch_nccl_backend as patch_aml_env_for_torch_nccl_backend,
)
from deepspeed_comm.environment import (
    patch_aws_sm_env_for_torch_nccl_backend as patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed_comm.reduce_op import ReduceOp as ReduceOp
from deepspeed_comm.torch import TorchBackend as TorchBackend
from deepspeed_comm.utils import *  # noqa: F403

__version__: str
