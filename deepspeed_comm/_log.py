"""The package's logger: lines of level INFO and above on standard error, unless the program has
configured the logger "deepspeed_comm" itself."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("deepspeed_comm")
if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


@functools.cache
def warn_once(message: str) -> None:
    """Each text once for a process."""
    logger.warning(message)
