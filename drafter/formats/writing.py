"""What every layout's writer shares."""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..errors import DsparkError


class Unwritable(DsparkError):
    """A layout has no place for something that the drafter has; it is refused by name, never dropped."""

    exit_code = 3
    kind = "bad_input"


def geometry_to_json(config: DrafterConfig) -> dict[str, Any]:
    """Sizes, norms and rope under Qwen3's key names, both for transformers 5 and for older readers."""
    if config.architecture == "gemma4":
        raise Unwritable("a Gemma4 drafter")
    data: dict[str, Any] = {
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        **rope_to_json(config),
    }
    if config.embed_scale != 1:
        raise Unwritable(f"an embedding scale ({config.embed_scale})")
    if config.final_logit_softcapping is not None:
        data["final_logit_softcapping"] = config.final_logit_softcapping
    if config.logit_scale != 1:
        data["logit_scale"] = config.logit_scale
    return data


def rope_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``rope_parameters``, and the keys that older readers look for."""
    rope = config.rope
    if rope.kind == "proportional":
        raise Unwritable("rope of kind proportional")
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "yarn", "llama3"):
        parameters["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "yarn":
        for name in ("attention_factor", "beta_fast", "beta_slow", "truncate"):
            parameters[name] = getattr(rope, name)
    if rope.kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            parameters[name] = getattr(rope, name)
    data: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": rope.theta}
    if rope.kind != "default":
        data["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if rope.partial_rotary_factor != 1:
        data["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.interleaved:
        data["is_neox_style"] = False
    return data


def windows_to_json(config: DrafterConfig) -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``; every window is of one width."""
    widths = sorted({window for window in config.layer_windows if window is not None})
    if len(widths) > 1:
        raise Unwritable(f"sliding windows of several widths ({', '.join(map(str, widths))})")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.layer_windows]
    return {
        "layer_types": kinds,
        "sliding_window": widths[0] if widths else None,
        "use_sliding_window": bool(widths),
    }


def heads_to_json(config: DrafterConfig) -> dict[str, Any]:
    """Markov and confidence head under DeepSpec's key names."""
    data: dict[str, Any] = {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence_head}
    if config.markov_rank:
        data["markov_head_type"] = config.markov_head_type
    if config.confidence_head:
        data["confidence_head_with_markov"] = config.confidence_head_with_markov
    return data
