"""The DeepSpec layout of Qwen3-style drafters (dspark format sheet B.1, B.2); anchor first, always."""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..tensors import tensor_shapes
from .fields import Fields

ARCHITECTURE = "Qwen3DSparkModel"


def matches(data: dict[str, Any]) -> bool:
    architectures = data.get("architectures")
    return isinstance(architectures, list) and ARCHITECTURE in architectures and "block_size" in data


def config_from_json(data: dict[str, Any], source: str) -> DrafterConfig:
    """The canonical configuration of a DeepSpec ``config.json``.

    Raises:
        BadInputError: a missing key, a wrong type, an unsupported value, or a contradiction.
    """
    fields = Fields(data, source)
    _refuse_unsupported(fields)
    rank = fields.integer("markov_rank")
    head_type: Any = fields.string("markov_head_type").lower() if rank else "none"
    confidence = fields.boolean("enable_confidence_head")
    hidden_size = fields.integer("hidden_size")
    return DrafterConfig(
        layout="deepspec",
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=fields.integer("num_attention_heads"),
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        vocab_size=fields.integer("vocab_size"),
        block_size=fields.integer("block_size"),
        sample_from_anchor=True,
        mask_token_id=fields.integer("mask_token_id"),
        target_layer_ids=fields.integers("target_layer_ids"),
        num_target_layers=fields.integer("num_target_layers"),
        target_hidden_size=hidden_size,  # the draft configuration is a copy of the target's
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        attention_bias=fields.boolean("attention_bias", False),
        markov_head_type=head_type,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_head_with_markov=confidence and fields.boolean("confidence_head_with_markov", False),
    )


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical names are DeepSpec's own."""
    return {name: name for name in tensor_shapes(config)}


def _rope_theta(fields: Fields) -> float:
    parameters = fields.object("rope_parameters")
    theta = None
    if parameters is not None:
        kind = parameters.string("rope_type", "default")
        if kind != "default":
            parameters.refuse("rope_type", kind, "'default'")
        theta = parameters.number("rope_theta")
    if "rope_theta" in fields.data:
        top_level = fields.number("rope_theta")
        if theta is not None and theta != top_level:
            fields.refuse("rope_theta", top_level, f"equal to rope_parameters.rope_theta, which is {theta}")
        theta = top_level
    return theta if theta is not None else fields.number("rope_theta")


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.string("hidden_act", "silu")
    if activation != "silu":
        fields.refuse("hidden_act", activation, "'silu'")
    if fields.data.get("rope_scaling") is not None:
        fields.refuse("rope_scaling", fields.data["rope_scaling"], "null")
    kinds = fields.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        fields.refuse("layer_types", kinds, "a list of 'full_attention'; sliding windows are not read yet")
