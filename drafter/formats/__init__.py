"""Checkpoint layouts: one module each, with the same functions.

``matches(source)``: is this checkpoint of my layout?
``read(source)``: the canonical configuration, with the origin of every value.
``tensor_names(config)``: canonical tensor name to this layout's name.
``config_to_json(config)``: the configuration file of this layout, strictly; ``Unwritable`` names what it cannot hold.
"""

from __future__ import annotations

from types import ModuleType

from ..errors import BadInputError
from . import deepspec, gguf, modelopt, specforge, speculators, zlab
from .reading import Source

# Where two layouts share an architecture, the narrower one comes first.
FORMATS: tuple[ModuleType, ...] = (deepspec, speculators, specforge, modelopt, zlab, gguf)
NAMES: dict[str, ModuleType] = {module.NAME: module for module in FORMATS}
_ELSEWHERE = ("DeepseekV4DSparkModel", "Glm5_2DSparkModel", "KimiK3DSparkModel", "MiniMaxM3DSparkModel")


def format_of(source: Source) -> ModuleType:
    """The layout module that reads this checkpoint.

    Raises:
        BadInputError: no known layout.
    """
    for module in FORMATS:
        if module.matches(source):
            return module
    architectures = ascii(source.data.get("architectures"))[:200]
    kind = ascii(source.data.get("model_type", source.data.get("general.architecture")))[:200]
    known = next((name for name in _ELSEWHERE if name in source.architectures()), None)
    why = f"{known} is a DSpark drafter of an architecture that is not supported" if known else "not a drafter"
    raise BadInputError(
        f"{source.file}: {why}: architectures is {architectures}, model_type is {kind}; "
        f"layouts read: {', '.join(NAMES)}",
        file=source.file,
        architectures=architectures,
    )
