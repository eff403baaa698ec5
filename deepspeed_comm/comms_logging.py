"""Mirrors deepspeed.utils.comms_logging: same names. The log itself is in comms_log/."""

from __future__ import annotations

from deepspeed_comm.comms_log.log import CommsLogger
from deepspeed_comm.comms_log.summary import calc_bw_log, convert_size, print_rank_0
from deepspeed_comm.utils import get_caller_func

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]
