"""The ModelOpt layout (NVIDIA/Model-Optimizer): DSpark in a DFlash container, heads under bare names.

``shift_label`` true is anchor first: labels are shifted by one, so slot 0 predicts the token after the anchor.
"""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..tensors import tensor_shapes
from .reading import (
    Reader,
    Reading,
    Source,
    read_architecture,
    read_geometry,
    read_heads,
    read_layout_flag,
    read_rope,
    read_taps,
    read_windows,
)
from .writing import Unwritable, geometry_to_json, windows_to_json

NAME = "modelopt"
ARCHITECTURE = "DFlashDraftModel"
_NAMES = {"markov_head.markov_": "markov_", "confidence_head.proj.": "confidence_proj."}


def matches(source: Source) -> bool:
    nested = source.data.get("dflash_config")
    return (
        ARCHITECTURE in source.architectures() and isinstance(nested, dict) and nested.get("projector_type") == "dspark"
    )


def read(source: Source) -> Reading:
    """The canonical configuration of a ModelOpt ``config.json``.

    Raises:
        BadInputError: everything that is wrong; without ``shift_label`` the layout is left open.
    """
    reader, fields = Reader(NAME, source), source.fields
    places = [reader.object(fields, "dflash_config"), fields]
    read_architecture(reader, [fields])
    read_geometry(reader, [fields])
    read_rope(reader, [fields])
    read_windows(reader, [fields], moves=False, causal=None)
    for name in ("block_size", "mask_token_id"):
        reader.take(name, places, "integer")
    reader.set("target_hidden_size", reader.values.get("hidden_size"), "hidden_size, the target's")
    read_taps(reader, places)
    read_layout_flag(reader, places, family=None, keys=("shift_label",))
    read_heads(reader, places, confidence="use_confidence_head")
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical name to this layout's: the heads' have no prefix."""
    return {name: _bare(name) for name in tensor_shapes(config)}


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` of this configuration.

    Raises:
        Unwritable: the layout has no place for something.
    """
    if config.draft_vocab_size != config.vocab_size:
        raise Unwritable("a draft vocabulary of another size than the target's")
    if any(config.layer_windows):
        raise Unwritable("sliding windows")
    if config.markov_head_type not in ("vanilla", "none"):
        raise Unwritable(f"a Markov head of type {config.markov_head_type}")
    if config.target_hidden_size != config.hidden_size:
        raise Unwritable("a hidden size other than the target's")
    return {
        "architectures": [ARCHITECTURE],
        **geometry_to_json(config),
        **windows_to_json(config),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "projector_type": "dspark",
            "shift_label": config.sample_from_anchor,
            "markov_rank": config.markov_rank,
            **({"markov_head_type": config.markov_head_type} if config.markov_rank else {}),
            "use_confidence_head": config.confidence_head,
            **({"confidence_head_with_markov": config.confidence_head_with_markov} if config.confidence_head else {}),
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
        "tie_word_embeddings": False,
    }


def _bare(name: str) -> str:
    for prefix, bare in _NAMES.items():
        if name.startswith(prefix):
            return bare + name.removeprefix(prefix)
    return name
