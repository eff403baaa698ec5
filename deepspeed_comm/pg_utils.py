"""A question about groups that DeepSpeed's layers ask."""

from __future__ import annotations

from typing import Any

from deepspeed_comm import comm


def is_parallel(group: Any) -> bool:
    """Whether it is a group, and of more than one rank."""
    return group is not None and comm.get_world_size(group) > 1
