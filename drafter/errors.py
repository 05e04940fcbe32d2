"""The errors a person sees: one class per family, one exit code per class (DESIGN §8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DsparkError(Exception):
    """What was wrong, the values seen, what to do, on one line: what files hold may not steer a terminal.

    ``details`` holds the values seen as data, for ``--json``.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, message: str, **details: Any) -> None:
        self.message = message if message.isprintable() else "".join(map(_printable, message))
        super().__init__(self.message)
        self.details: Mapping[str, Any] = details


class UsageError(DsparkError):
    """Options that do not go together, or an output that exists already."""

    exit_code = 2
    kind = "usage"


class BadInputError(DsparkError):
    """A checkpoint, configuration, table or prompt that cannot be used."""

    exit_code = 3
    kind = "bad_input"


class CheckFailedError(DsparkError):
    """Parity or losslessness was checked and does not hold."""

    exit_code = 4
    kind = "check_failed"


class NotAvailableError(DsparkError):
    """Something is not installed, there is no such device, or no space is left."""

    exit_code = 5
    kind = "not_available"


class IntegrityError(DsparkError):
    """A hash, an identity or a SKU does not match what was recorded."""

    exit_code = 6
    kind = "integrity"


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
