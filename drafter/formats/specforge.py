"""The SpecForge layout (sgl-project/SpecForge): keys in ``dflash_config``, no embedding or head; anchor first.

Older containers wrote the heads under ``logit_head.``. SpecForge's own ``spec_generate`` slices slot 0 off and is no
reference for these weights (dspark format sheet E.3).
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
from .writing import Unwritable, geometry_to_json, heads_to_json, windows_to_json

NAME = "specforge"
ARCHITECTURE = "DSparkDraftModel"


def matches(source: Source) -> bool:
    return ARCHITECTURE in source.architectures()


def read(source: Source) -> Reading:
    """The canonical configuration of a SpecForge ``config.json``.

    Raises:
        BadInputError: everything that is wrong.
    """
    reader, fields = Reader(NAME, source), source.fields
    nested = reader.object(fields, "dflash_config")
    places = [nested, fields]
    read_architecture(reader, [fields])
    read_geometry(reader, [fields])
    read_rope(reader, [fields])
    read_windows(reader, [fields], moves=True, causal=True)
    for name in ("block_size", "mask_token_id"):
        reader.take(name, places, "integer")
    reader.set("target_hidden_size", reader.values.get("hidden_size"), "hidden_size, the target's")
    read_taps(reader, places)
    read_layout_flag(reader, places, family=True)
    read_heads(reader, places)
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical names, DeepSpec's, are this layout's too."""
    return {name: name for name in tensor_shapes(config)}


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` of this configuration.

    Raises:
        Unwritable: the layout has no place for something.
    """
    if not config.sample_from_anchor:
        raise Unwritable("the fill-in layout (sample_from_anchor false)")
    if config.draft_vocab_size != config.vocab_size:
        raise Unwritable("a draft vocabulary of another size than the target's")
    if config.target_hidden_size != config.hidden_size:
        raise Unwritable("a hidden size other than the target's")
    for window, causal in zip(config.layer_windows, config.layer_causal, strict=True):
        if bool(window) != causal or (window and not config.window_moves):
            raise Unwritable("attention that is not full, or causal under a window that moves with the slot")
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        **geometry_to_json(config),
        **windows_to_json(config),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "mha" if config.num_key_value_heads == config.num_attention_heads else "gqa",
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": True,
            **heads_to_json(config),
        },
        "tie_word_embeddings": False,
    }
