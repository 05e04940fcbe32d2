"""The z-lab DFlash layout (z-lab/dflash): no heads, embedding and head from the target; fill-in.

Slot k predicts the token at start + k, slot 0 is unused. Layer ids that are absent are refused: the public
fall-back rule names layers that a drafter may not have been trained on (dspark format sheet E.3).
"""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..tensors import tensor_shapes
from .reading import (
    Reader,
    Reading,
    Source,
    no_heads,
    read_architecture,
    read_geometry,
    read_layout_flag,
    read_rope,
    read_taps,
    read_windows,
)
from .writing import Unwritable, geometry_to_json, windows_to_json

NAME = "z-lab"
ARCHITECTURE = "DFlashDraftModel"


def matches(source: Source) -> bool:
    return ARCHITECTURE in source.architectures()


def read(source: Source) -> Reading:
    """The canonical configuration of a z-lab ``config.json``.

    Raises:
        BadInputError: everything that is wrong.
    """
    reader, fields = Reader(NAME, source), source.fields
    places = [reader.object(fields, "dflash_config"), fields]
    read_architecture(reader, [fields])
    read_geometry(reader, [fields])
    read_rope(reader, [fields])
    read_windows(reader, [fields], moves=True, causal=False)
    for name in ("block_size", "mask_token_id"):
        reader.take(name, places, "integer")
    reader.set("target_hidden_size", reader.values.get("hidden_size"), "hidden_size, the target's")
    read_taps(reader, places)
    read_layout_flag(reader, places, family=False)
    no_heads(reader)
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical names, DeepSpec's, are this layout's too."""
    return {name: name for name in tensor_shapes(config)}


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` of this configuration.

    Raises:
        Unwritable: the layout has no place for something.
    """
    for what, held in (
        ("the anchor-first layout (sample_from_anchor true)", config.sample_from_anchor),
        ("a Markov head", config.markov_head_type != "none"),
        ("a confidence head", config.confidence_head),
        ("a draft vocabulary of another size than the target's", config.draft_vocab_size != config.vocab_size),
        ("a hidden size other than the target's", config.target_hidden_size != config.hidden_size),
        ("causal attention inside the block", any(config.layer_causal)),
        ("a sliding window that is anchored", any(config.layer_windows) and not config.window_moves),
    ):
        if held:
            raise Unwritable(what)
    return {
        "architectures": [ARCHITECTURE],
        **geometry_to_json(config),
        **windows_to_json(config),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
        "tie_word_embeddings": False,
    }
