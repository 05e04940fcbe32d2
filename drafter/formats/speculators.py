"""The speculators layout (vllm-project/speculators), DSpark and DFlash (dspark format sheet E)."""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..tensors import tensor_shapes
from .defaults import with_defaults
from .fields import Fields
from .reading import (
    Reader,
    Reading,
    Source,
    no_heads,
    read_architecture,
    read_geometry,
    read_heads,
    read_layout_flag,
    read_rope,
    read_taps,
    read_windows,
)
from .writing import Unwritable, geometry_to_json, heads_to_json, windows_to_json

NAME = "speculators"
DRAFT_TO_TARGET = "offset"  # target id = i + d2t[i]
_KINDS = ("dspark", "dflash")


def matches(source: Source) -> bool:
    return source.data.get("speculators_model_type") in _KINDS


def read(source: Source) -> Reading:
    """The canonical configuration of a speculators ``config.json``.

    Raises:
        BadInputError: everything that is wrong; a DSpark checkpoint without ``sample_from_anchor`` is left open.
    """
    reader, fields = Reader(NAME, source), source.fields
    dspark = source.data["speculators_model_type"] == "dspark"
    layers = reader.object(fields, "transformer_layer_config")
    if layers is None:
        reader.faults.append(f"{fields.source}: the key transformer_layer_config is missing")
        layers = Fields({}, fields.source, "transformer_layer_config.")
    layers = with_defaults(layers, reader)
    read_architecture(reader, [layers])
    read_geometry(reader, [layers, fields])
    read_rope(reader, [layers])
    causal = not reader.take("sliding_window_non_causal", fields, "boolean", default=False)
    read_windows(reader, [layers], moves=False, causal=causal)
    reader.take("block_size", fields, "integer", default=8)
    reader.take("mask_token_id", fields, "integer")
    reader.take("target_hidden_size", fields, "integer", default=reader.values.get("hidden_size"))
    read_taps(reader, [fields], "aux_hidden_state_layer_ids", shift=-1)
    # DFlash was never anything but fill-in before the key came; DSpark was written both ways without it.
    read_layout_flag(reader, [fields], family=None if dspark else False)
    if dspark:
        read_heads(reader, [fields])
    else:
        no_heads(reader)
    _check_proposals(reader, fields)
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical names, DeepSpec's, are this layout's too."""
    return {name: name for name in tensor_shapes(config)}


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` of this configuration.

    Raises:
        Unwritable: the layout has no place for something.
    """
    if -1 in config.target_layer_ids:
        raise Unwritable("the embedding output as a tap (target_layer_ids -1)")
    if config.window_moves:
        raise Unwritable("a sliding window that moves with the slot")
    windowed = [causal for causal, window in zip(config.layer_causal, config.layer_windows, strict=True) if window]
    if len(set(windowed)) > 1 or any(
        causal and not window for causal, window in zip(config.layer_causal, config.layer_windows, strict=True)
    ):
        raise Unwritable("causal attention inside the block in some layers only")
    dspark = config.markov_head_type != "none" or config.confidence_head
    name = "dspark" if dspark else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
        "speculators_model_type": name,
        "speculators_version": "0.6.0",
        "transformer_layer_config": {
            **geometry_to_json(config),
            **windows_to_json(config),
            "num_hidden_layers": config.num_hidden_layers,
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        **(heads_to_json(config) if dspark else {}),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "sliding_window_non_causal": bool(windowed) and not windowed[0],
        **({"num_target_layers": config.num_target_layers} if config.num_target_layers else {}),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.proposals}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _check_proposals(reader: Reader, fields: Fields) -> None:
    """``speculative_tokens`` may be fewer than the block gives, never more; converters wrote it off by one."""
    nested = reader.object(fields, "speculators_config")
    if nested is None:
        return
    verifier = reader.object(nested, "verifier")
    if verifier is not None and isinstance(verifier.data.get("name_or_path"), str):
        reader.target["name"] = verifier.data["name_or_path"]
    methods = nested.data.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    block, anchored = reader.values.get("block_size"), reader.values.get("sample_from_anchor")
    if isinstance(tokens, int) and isinstance(block, int) and anchored is not None:
        proposals = block if anchored else block - 1
        if tokens > proposals:
            reader.warnings.append(
                f"{nested.where('proposal_methods')}: speculative_tokens is {tokens}, "
                f"a block of {block} proposes {proposals}"
            )
