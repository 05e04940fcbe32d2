"""Checkpoint layouts: one module each, with the same three functions.

``matches(data)``: is this configuration of my layout?
``config_from_json(data, source)``: the canonical configuration.
``tensor_names(config)``: canonical tensor name to this layout's name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..errors import BadInputError
from . import deepspec

FORMATS: tuple[ModuleType, ...] = (deepspec,)


def format_of(data: dict[str, Any], source: str) -> ModuleType:
    """The layout module that reads this ``config.json``.

    Raises:
        BadInputError: no known layout.
    """
    for module in FORMATS:
        if module.matches(data):
            return module
    known = ", ".join(module.__name__.rpartition(".")[2] for module in FORMATS)
    raise BadInputError(
        f"{source}: not a drafter that this tool reads: architectures is {data.get('architectures')!r}, "
        f"model_type is {data.get('model_type')!r}; layouts read: {known}",
        file=source,
        architectures=data.get("architectures"),
    )
