"""A helper of DeepSpeed's layers.

Mirrors deepspeed.comm.pg_utils: same names.
"""

from __future__ import annotations

from typing import Any

from deepspeed_comm import comm


def is_parallel(group: Any) -> bool:
    """Whether `group` is a group of more than one rank."""
    return group is not None and comm.get_world_size(group) > 1
