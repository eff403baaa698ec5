"""The configuration manager: the part "comms_logger" of a DeepSpeed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepspeed_comm import constants

# Of the keys that are no switches.
_TYPES: dict[str, type] = {
    constants.COMMS_LOGGER_PROF_OPS: list,
    constants.COMMS_LOGGER_TRACE_EVENTS: int,
}


@dataclasses.dataclass
class CommsLoggerConfig:
    """What the communication log shall do; see constants.COMMS_LOGGER_FORMAT.

    Raises TypeError for a key that it does not know or a value of another type, and ValueError for
    a negative number.
    """

    enabled: bool = constants.COMMS_LOGGER_ENABLED_DEFAULT
    prof_all: bool = constants.COMMS_LOGGER_PROF_ALL_DEFAULT
    prof_ops: list[str] = dataclasses.field(default_factory=list)
    verbose: bool = constants.COMMS_LOGGER_VERBOSE_DEFAULT
    debug: bool = constants.COMMS_LOGGER_DEBUG_DEFAULT
    # Ours: how many calls are kept for a trace, the latest ones; 0: none.
    trace_events: int = constants.COMMS_LOGGER_TRACE_EVENTS_DEFAULT

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            expected = _TYPES.get(field.name, bool)
            # A bool is an int to Python.
            if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
                raise TypeError(
                    f"comms_logger: {field.name}: expected a {expected.__name__}, got {value!r}"
                )
        if self.trace_events < 0:
            raise ValueError(
                f"comms_logger: trace_events: expected 0 or more, got {self.trace_events}"
            )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> CommsLoggerConfig:
        """From the part of a configuration that has the key "comms_logger"."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(
                f"comms_logger: {', '.join(unknown)}: no such key; there are {', '.join(known)}"
            )
        return cls(**given)


class DeepSpeedCommsConfig:
    """Of a whole DeepSpeed configuration, a dictionary, what concerns communication."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = False
        self.comms_logger: CommsLoggerConfig | None = None  # where the configuration has none
        given = ds_config.get(constants.COMMS_LOGGER)
        if given is None:
            return
        # The key alone says yes, as in deepspeed.comm; "enabled": false says no, unlike there.
        self.comms_logger = CommsLoggerConfig.parse({"enabled": True, **given})
        self.comms_logger_enabled = self.comms_logger.enabled
