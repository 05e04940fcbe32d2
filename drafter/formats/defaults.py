"""What a nested configuration leaves out: the defaults of the model class that its ``model_type`` names.

transformers writes a nested configuration without the keys that equal its class's defaults. Values: Qwen3Config and
LlamaConfig of transformers 5.24; the tests compare them with the library.
"""

from __future__ import annotations

from typing import Any

from .fields import Fields
from .reading import Reader

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {"qwen3": _QWEN3, "llama": _LLAMA}
ROPE_THETA = 10000.0


def with_defaults(fields: Fields, reader: Reader) -> Fields:
    """``fields`` with its class's defaults filled in; which they were goes into the warnings."""
    kind = fields.data.get("model_type")
    defaults = dict(DEFAULTS.get(kind, {})) if isinstance(kind, str) else {}
    if not defaults:
        return fields
    nested = [fields.data.get(key) for key in ("rope_parameters", "rope_scaling")]
    if not any(isinstance(data, dict) and "rope_theta" in data for data in nested):
        defaults["rope_theta"] = ROPE_THETA
    missing = {key: value for key, value in defaults.items() if key not in fields.data}
    if missing:
        listed = ", ".join(f"{key} {value}" for key, value in missing.items())
        reader.warnings.append(f"{fields.where('')[:-1]} leaves out, so {kind}'s defaults hold: {listed}")
    return Fields({**fields.data, **missing}, fields.source, fields.path)
