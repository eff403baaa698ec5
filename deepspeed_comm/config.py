"""Parses the part "comms_logger" of a DeepSpeed configuration.

Mirrors deepspeed.comm.config: same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_comm import constants

_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}


# Converters of values. DeepSpeed parses its configuration with pydantic, so they accept the same
# values as pydantic, and raise ValueError for other values.


def _to_bool(value: Any) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    word = value.decode(errors="replace") if isinstance(value, bytes) else value
    if isinstance(word, str) and word.lower() in _TRUE | _FALSE:
        return word.lower() in _TRUE
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, bool):  # an int in Python, but not meant as a number
        raise ValueError
    if isinstance(value, int):
        return value
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ValueError


def _to_list(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise ValueError


# The keys that are not bool: the name of their type, and its converter.
_TYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    constants.COMMS_LOGGER_PROF_OPS: ("list", _to_list),
    constants.COMMS_LOGGER_TRACE_EVENTS: ("int", _to_int),
}


@dataclasses.dataclass
class CommsLoggerConfig:
    """The configuration of the communication log; constants.COMMS_LOGGER_FORMAT is an example.

    Values are converted like DeepSpeed's: 1, "true" and "on" are True. Raises TypeError for a value
    that cannot be converted, and ValueError for a negative trace_events.
    """

    enabled: bool = constants.COMMS_LOGGER_ENABLED_DEFAULT
    prof_all: bool = constants.COMMS_LOGGER_PROF_ALL_DEFAULT
    prof_ops: list[str] = dataclasses.field(default_factory=list)
    verbose: bool = constants.COMMS_LOGGER_VERBOSE_DEFAULT
    debug: bool = constants.COMMS_LOGGER_DEBUG_DEFAULT
    # Not in DeepSpeed: the number of latest calls to keep for a trace; 0 keeps none.
    trace_events: int = constants.COMMS_LOGGER_TRACE_EVENTS_DEFAULT

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            expected, convert = _TYPES.get(field.name, ("bool", _to_bool))
            try:
                setattr(self, field.name, convert(value))
            except ValueError:
                raise TypeError(
                    f"comms_logger: {field.name}: expected a {expected}, got {value!r}"
                ) from None
        if self.trace_events < 0:
            raise ValueError(
                f"comms_logger: trace_events: expected 0 or more, got {self.trace_events}"
            )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> CommsLoggerConfig:
        """Reads the value of the key "comms_logger". Raises TypeError for an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(
                f"comms_logger: {', '.join(unknown)}: unknown key; expected {', '.join(known)}"
            )
        return cls(**given)


class DeepSpeedCommsConfig:
    """The communication part of a DeepSpeed configuration, given as a dictionary."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = False
        self.comms_logger: CommsLoggerConfig | None = None  # None if not configured
        given = ds_config.get(constants.COMMS_LOGGER)
        if given is None:
            return
        # As in DeepSpeed, the key enables the log; unlike there, "enabled": false disables it.
        self.comms_logger = CommsLoggerConfig.parse({"enabled": True, **given})
        self.comms_logger_enabled = self.comms_logger.enabled
