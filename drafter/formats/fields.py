"""Typed access to a parsed JSON object; a wrong key or type becomes one clear error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import BadInputError

_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object in ``source``; every reader raises ``BadInputError``."""

    data: dict[str, Any]
    source: str

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, value, "an integer")
        if abs(value) >= 2**31:
            self.refuse(key, value, "an integer below 2^31")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) > 1e30:
            self.refuse(key, value, "a finite number")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, value, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._value(key, _REQUIRED)
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            self.refuse(key, value, "a list of integers")
        return tuple(value)

    def object(self, key: str) -> Fields | None:
        """The nested object under ``key``; ``None`` if the key is absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        return Fields(value, f"{self.source}: {key}")

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        raise BadInputError(
            f"{self.source}: {key} is {value!r}, it must be {wanted}", file=self.source, key=key, value=value
        )

    def _value(self, key: str, default: Any) -> Any:
        if key in self.data:
            return self.data[key]
        if default is _REQUIRED:
            raise BadInputError(f"{self.source}: the key {key} is missing", file=self.source, key=key)
        return default
