"""The DeepSpec layout (also NeMo's), Qwen3 and Gemma4 style: anchor first (dspark format sheet B.1, B.2, B.6)."""

from __future__ import annotations

from typing import Any

from ..config import DrafterConfig
from ..rope import Rope
from ..tensors import tensor_shapes
from .fields import Fields
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
from .writing import Unwritable, geometry_to_json, heads_to_json

NAME = "deepspec"
QWEN3, GEMMA4 = "Qwen3DSparkModel", "Gemma4DSparkModel"


def matches(source: Source) -> bool:
    return QWEN3 in source.architectures() or GEMMA4 in source.architectures()


def read(source: Source) -> Reading:
    """The canonical configuration of a DeepSpec ``config.json``.

    Raises:
        BadInputError: everything that is missing, of a wrong type, unsupported or contradictory.
    """
    reader, fields = Reader(NAME, source), source.fields
    # A trainer's export may still nest the keys (dspark format sheet F.5, report 34).
    places = [fields, *(reader.object(fields, key) for key in ("dspark_config", "dflash_config"))]
    if GEMMA4 in source.architectures():
        _read_gemma4(reader, fields)
    else:
        read_architecture(reader, [fields])
        read_geometry(reader, [fields])
        read_rope(reader, [fields])
        read_windows(reader, [fields], moves=False, causal=None)
    for name in ("block_size", "mask_token_id"):
        reader.take(name, places, "integer")
    read_taps(reader, places)
    read_layout_flag(reader, places, family=True)
    read_heads(reader, places)
    reader.set("target_hidden_size", reader.values.get("hidden_size"), "hidden_size, a copy of the target's")
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical names are DeepSpec's own."""
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
    if any(config.layer_windows):
        raise Unwritable("sliding windows")
    if config.target_hidden_size != config.hidden_size:
        raise Unwritable("a hidden size other than the target's")
    gemma = config.architecture == "gemma4"
    return {
        "architectures": [GEMMA4 if gemma else QWEN3],
        **(_gemma4_to_json(config) if gemma else geometry_to_json(config)),
        "num_anchors": 512,  # of training only, but asserted at load
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": True,
        **heads_to_json(config),
        "tie_word_embeddings": False,
    }


def _read_gemma4(reader: Reader, fields: Fields) -> None:
    for key, wanted in (("enable_moe_block", False), ("hidden_size_per_layer_input", 0), ("num_kv_shared_layers", 0)):
        value = fields.data.get(key)
        if value not in (None, wanted):
            reader.faults.append(f"{fields.where(key)} is {value!r}, it must be {wanted!r}")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                 "max_position_embeddings"):  # fmt: skip
        reader.take(name, fields, "integer")
    reader.set("architecture", "gemma4", f"{fields.source}: architectures")
    equal = reader.take("k_eq_v", fields, "boolean", "attention_k_eq_v", default=False)
    # All layers attend globally; only shared values take the global number of heads.
    reader.take("num_key_value_heads", fields, "integer", "num_global_key_value_heads" if equal else "")
    reader.take("head_dim", fields, "integer", "global_head_dim")
    reader.take("rms_norm_eps", fields, "number")
    reader.take("attention_bias", fields, "boolean", default=False)
    reader.take("num_target_layers", fields, "integer", default=None)
    reader.take("final_logit_softcapping", fields, "number", default=None)
    reader.set("draft_vocab_size", reader.values.get("vocab_size"), f"the {NAME} layout")
    reader.set("logit_scale", 1.0, f"the {NAME} layout")
    reader.set("attention_sinks", False, f"the {NAME} layout")
    activation = reader.take("hidden_activation", fields, "string", default="gelu_pytorch_tanh")
    if activation not in ("gelu_pytorch_tanh", None):
        reader.faults.append(f"{fields.where('hidden_activation')} is {activation!r}, it must be 'gelu_pytorch_tanh'")
    _read_embed_scale(reader, fields)
    _read_gemma4_rope(reader, fields)
    layers = reader.values.get("num_hidden_layers") or 0
    kinds = reader.take("layer_types", fields, "strings", default=())
    if any(kind != "full_attention" for kind in kinds or ()):
        reader.faults.append(f"{fields.where('layer_types')} is {list(kinds)}, it must be all 'full_attention'")
    layers = layers if 0 < layers <= 1024 else 0
    reader.set("layer_windows", (None,) * layers, "no layer has a window")
    reader.set("layer_causal", (False,) * layers, "no layer has a window")
    reader.set("window_moves", False, "no layer has a window")


def _read_embed_scale(reader: Reader, fields: Fields) -> None:
    """√h, rounded to the dtype that the checkpoint computes in, as its embedding module rounds it."""
    hidden = reader.values.get("hidden_size")
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = reader.take("dtype", fields, "string", key, default="float32")
    if hidden is None or hidden < 1 or dtype is None:
        return
    scale = rounded(hidden**0.5, dtype.removeprefix("torch."))
    reader.set("embed_scale", scale, f"√hidden_size in {dtype}")


def _read_gemma4_rope(reader: Reader, fields: Fields) -> None:
    parameters = reader.object(fields, "rope_parameters")
    full = reader.object(parameters, "full_attention") or parameters
    if full is None:
        reader.faults.append(f"{fields.source}: the key rope_parameters is missing")
        return
    kind = reader.take("rope_type", full, "string", default="proportional")
    theta = reader.take("rope_theta", full, "number")
    partial = reader.take("partial_rotary_factor", full, "number", default=1.0)
    factor = reader.take("rope factor", full, "number", "factor", default=1.0)
    if kind not in ("proportional", "default", None):
        reader.faults.append(f"{full.where('rope_type')} is {kind!r}, it must be 'proportional' or 'default'")
    elif None not in (kind, theta, partial, factor):
        rope = Rope(theta=theta, kind=kind, partial_rotary_factor=partial, factor=factor)
        reader.set("rope", rope, full.where("")[:-1])


def _gemma4_to_json(config: DrafterConfig) -> dict[str, Any]:
    for what, held in (("attention sinks", config.attention_sinks), ("a logit scale", config.logit_scale != 1)):
        if held:
            raise Unwritable(what)
    rope = config.rope
    if rope.kind not in ("proportional", "default") or rope.interleaved:
        raise Unwritable(f"rope of kind {rope.kind} in a Gemma4 drafter")
    exact = config.embed_scale == config.hidden_size**0.5
    return {
        "model_type": "gemma4_text",
        "dtype": "float32" if exact else "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_global_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "attention_k_eq_v": config.k_eq_v,
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": {
            "full_attention": {
                "rope_type": rope.kind,
                "rope_theta": rope.theta,
                "partial_rotary_factor": rope.partial_rotary_factor,
                **({"factor": rope.factor} if rope.factor != 1 else {}),
            }
        },
    }


def rounded(value: float, dtype: str) -> float:
    """``value`` as bf16, fp16 or fp32 holds it."""
    import ml_dtypes
    import numpy as np

    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    return float(np.asarray(value, dtype=kinds[dtype])) if dtype in kinds else value
