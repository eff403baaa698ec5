"""The package's logger. It writes INFO and above to standard error, unless the program has added a
handler to the logger "deepspeed_comm"."""

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
    """Logs a warning, each text once in a process."""
    logger.warning(message)
