"""Typed access to a parsed JSON object; a wrong key or type becomes one clear error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import BadInputError

_REQUIRED: Any = object()
_LONGEST = 4096  # entries of a list in a configuration; they are one a layer


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object in ``source``; every reader raises ``BadInputError``."""

    data: dict[str, Any]
    source: str
    path: str = ""  # of this object in the file, with a dot behind every key

    def where(self, key: str) -> str:
        return f"{self.source}: {self.path}{key}"

    def has(self, key: str) -> bool:
        """Whether the key says anything; null does not."""
        return self.data.get(key) is not None

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

    def integers(self, key: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        value = self._value(key, default)
        if not _is_list(value) or any(isinstance(i, bool) or not isinstance(i, int) or abs(i) >= 2**31 for i in value):
            self.refuse(key, value, f"a list of at most {_LONGEST} integers")
        return tuple(value)

    def strings(self, key: str, default: Any = _REQUIRED) -> tuple[str, ...]:
        value = self._value(key, default)
        if not _is_list(value) or any(not isinstance(item, str) for item in value):
            self.refuse(key, value, f"a list of at most {_LONGEST} strings")
        return tuple(value)

    def object(self, key: str) -> Fields | None:
        """The nested object under ``key``; ``None`` if the key is absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        return Fields(value, self.source, f"{self.path}{key}.")

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = ascii(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        raise BadInputError(
            f"{self.where(key)} is {shown}, it must be {wanted}", file=self.source, key=key, value=shown
        )

    def _value(self, key: str, default: Any) -> Any:
        if key in self.data:
            return self.data[key]
        if default is _REQUIRED:
            raise BadInputError(f"{self.source}: the key {self.path}{key} is missing", file=self.source, key=key)
        return default


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _LONGEST
