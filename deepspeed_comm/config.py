"""The configuration manager: the part "comms_logger" of a DeepSpeed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_comm import constants

_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}


# A value is taken where pydantic, by which DeepSpeed reads its configuration, takes it. Each raises
# ValueError for one that it does not take.


def _to_bool(value: Any) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    word = value.decode(errors="replace") if isinstance(value, bytes) else value
    if isinstance(word, str) and word.lower() in _TRUE | _FALSE:
        return word.lower() in _TRUE
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, bool):  # an int to Python, and to pydantic, but hardly meant as one
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


# Of the keys that are no switches: the type, and how a value becomes one.
_TYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    constants.COMMS_LOGGER_PROF_OPS: ("list", _to_list),
    constants.COMMS_LOGGER_TRACE_EVENTS: ("int", _to_int),
}


@dataclasses.dataclass
class CommsLoggerConfig:
    """What the communication log shall do; see constants.COMMS_LOGGER_FORMAT.

    Values of another type are converted as DeepSpeed converts them: 1, "true" and "on" are True.
    Raises TypeError for a key that it does not know or a value that cannot be converted, and
    ValueError for a negative number.
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
