"""The GGUF layout of llama.cpp: architecture ``dflash`` with Markov and confidence tensors; ``dspark`` of a fork.

Tap numbers are layer inputs, id + 1. A file without a Markov head is decoded fill-in. Rotated pairs are halves, the
draft vocabulary holds absolute ids, a window moves with the slot (query − key < W). Source: llama.cpp's converter and
loader (state of llama-cpp-python 0.3.36); of the fork, names only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DrafterConfig
from ..errors import BadInputError
from ..gguf_file import Skipped, import_gguf
from ..rope import Rope, yarn_attention_factor
from ..tensors import tensor_shapes
from .fields import Fields
from .reading import Reader, Reading, Source, read_layout_flag, read_taps
from .writing import Unwritable

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..convert import Tensor

NAME = "gguf"
DRAFT_TO_TARGET = "absolute"
DTYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
ARCHITECTURES = ("dflash", "dspark")
OWN = "dspark_export"  # keys of this tool: what llama.cpp has no key for
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
_ALIASES = {
    "dspark.fc": "fc",
    "dspark.hidden_norm": "enc.output_norm",
    "dspark.markov_head_a": "markov_w1",
    "dspark.markov_head_b": "markov_w2",
    "dspark.confidence_head": "conf_proj",
    "dflash.dspark.markov.w1": "markov_w1",
    "dflash.dspark.markov.w2": "markov_w2",
    "dflash.dspark.confidence": "conf_proj",
}


def matches(source: Source) -> bool:
    return source.data.get("general.architecture") in ARCHITECTURES


def read(source: Source) -> Reading:
    """The canonical configuration of a GGUF file's metadata and tensors.

    Raises:
        BadInputError: everything that is missing, of a wrong type, or unsupported.
    """
    reader, arch = Reader(NAME, source), str(source.data["general.architecture"])
    fields = Fields(_under(source.data, f"{arch}."), source.file, f"{arch}.")
    own = Fields(_under(source.data, f"{OWN}."), source.file, f"{OWN}.")
    tokenizer = Fields(_under(source.data, "tokenizer.ggml."), source.file, "tokenizer.ggml.")
    for name, key in (
        ("num_hidden_layers", "block_count"), ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"), ("num_attention_heads", "attention.head_count"),
        ("max_position_embeddings", "context_length"), ("block_size", "block_size"),
    ):  # fmt: skip
        reader.take(name, fields, "integer", key)
    values, entries = reader.values, source.entries
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    reader.take("num_key_value_heads", fields, "integer", "attention.head_count_kv", default=heads)
    reader.take("head_dim", fields, "integer", "attention.key_length", default=(hidden or 0) // (heads or 1))
    reader.take("rms_norm_eps", fields, "number", "attention.layer_norm_rms_epsilon")
    reader.take("mask_token_id", tokenizer, "integer")
    reader.take("num_target_layers", own, "integer", default=None)
    reader.take("target_hidden_size", own, "integer", default=hidden)
    _read_vocabulary(reader, fields)
    for name, suffix in (("attention_bias", "attn_q.bias"), ("attention_sinks", "attn_sinks.weight")):
        reader.set(name, any(stored.endswith(suffix) for stored in entries), "tensors")
    norms = any(stored.endswith("attn_q_norm.weight") for stored in entries)
    reader.set("architecture", "qwen3" if norms else "llama", "tensors")
    reader.set("k_eq_v", False, "tensors")
    reader.take("embed_scale", fields, "number", "embedding_scale", default=1.0)
    reader.take("final_logit_softcapping", fields, "number", default=None)
    reader.take("logit_scale", fields, "number", default=1.0)
    _refuse_unsupported(reader, fields)
    _read_rope(reader, fields)
    _read_windows(reader, fields)
    _read_heads(reader)
    if arch == "dflash" or source.settled.target_layer_ids is not None:
        read_taps(reader, [fields] if arch == "dflash" else [], "target_layers", shift=-1)
    else:
        reader.leave_open(
            "--target-layer-ids",
            f"{source.file}: how architecture {arch} counts its target layers is not settled by any public code; "
            "give the layers that the drafter was trained on with --target-layer-ids",
        )
    read_layout_flag(reader, [fields], family=values.get("markov_rank", 0) > 0)
    return reader.reading()


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """Canonical name to llama.cpp's."""
    return {name: _gguf_name(name) for name in tensor_shapes(config)}


def bare_name(stored: str) -> str:
    """llama.cpp's name of a tensor that a fork calls otherwise."""
    for alias, name in _ALIASES.items():
        if stored == alias or stored.startswith(f"{alias}."):
            return name + (stored.removeprefix(alias) or ".weight")
    return stored


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """Metadata of this configuration, without a tokenizer.

    Raises:
        Unwritable: the layout has no place for something.
    """
    rope, windows = config.rope, {window for window in config.layer_windows if window is not None}
    for what, held in (
        ("a Gemma4 drafter", config.architecture == "gemma4"),
        ("a drafter without q and k norms", config.architecture == "llama"),
        (f"a Markov head of type {config.markov_head_type}", config.markov_head_type in ("gated", "rnn")),
        ("a confidence head without a Markov head", config.confidence_head and not config.markov_rank),
        (
            "a confidence head without the Markov feature",
            config.confidence_head and not config.confidence_head_with_markov,
        ),
        ("an anchor-first drafter without a Markov head", config.sample_from_anchor and not config.markov_rank),
        ("attention biases", config.attention_bias),
        ("interleaved rope", rope.interleaved),
        (f"rope of kind {rope.kind}", rope.kind not in ("default", "linear", "yarn")),
        ("YaRN without truncation", rope.kind == "yarn" and not rope.truncate),
        (
            "YaRN with an attention factor of its own",
            rope.kind == "yarn" and rope.attention_factor != yarn_attention_factor(rope.factor, None, None),
        ),
        ("sliding windows of several widths", len(windows) > 1),
        ("a sliding window that is anchored", bool(windows) and not config.window_moves),
        ("causal attention inside the block in some layers only", len(set(config.layer_causal)) > 1),
        ("a draft vocabulary that is padded", config.draft_vocab_size > config.vocab_size),
        ("a hidden size other than the target's", config.target_hidden_size != config.hidden_size),
    ):
        if held:
            raise Unwritable(what)
    data: dict[str, Any] = {
        "general.type": "model",
        "dflash.block_count": config.num_hidden_layers,
        "dflash.context_length": config.max_position_embeddings,
        "dflash.embedding_length": config.hidden_size,
        "dflash.feed_forward_length": config.intermediate_size,
        "dflash.attention.head_count": config.num_attention_heads,
        "dflash.attention.head_count_kv": config.num_key_value_heads,
        "dflash.attention.key_length": config.head_dim,
        "dflash.attention.value_length": config.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "dflash.vocab_size": config.vocab_size,
        "dflash.block_size": config.block_size,
        "dflash.target_layers": [i + 1 for i in config.target_layer_ids],
        "dflash.sample_from_anchor": config.sample_from_anchor,
        "dflash.has_confidence_head": config.confidence_head,
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        **_rope_to_json(config),
    }
    if windows:
        data["dflash.attention.sliding_window"] = max(windows)
        data["dflash.attention.sliding_window_pattern"] = [window is not None for window in config.layer_windows]
    if any(config.layer_causal):
        data["dflash.attention.causal"] = True
    if config.embed_scale != 1:
        data["dflash.embedding_scale"] = float(config.embed_scale)
    if config.final_logit_softcapping is not None:
        data["dflash.final_logit_softcapping"] = float(config.final_logit_softcapping)
    if config.logit_scale != 1:
        data["dflash.logit_scale"] = float(config.logit_scale)
    if config.num_target_layers is not None:
        data[f"{OWN}.num_target_layers"] = config.num_target_layers
    return data


def write(
    file: Path,
    metadata: dict[str, Any],
    tensors: Iterable[Tensor],
    checkpoint: Checkpoint,
    progress: Callable[[int], None],
) -> None:
    """Write a GGUF file with the target's tokenizer, without which llama.cpp finds no mask token.

    Vectors are widened to fp32, as ggml computes with them; ``dspark_export.vector_dtype`` says what they were.

    Raises:
        BadInputError: neither checkpoint nor target holds a tokenizer.json.
    """
    import torch

    gguf = import_gguf()
    tensors = list(tensors)
    writer = gguf.GGUFWriter(file, "dflash")
    vectors = {tensor.dtype for tensor in tensors if len(tensor.shape) == 1 and tensor.dtype in ("F16", "BF16")}
    if len(vectors) == 1:
        metadata = {**metadata, f"{OWN}.vector_dtype": vectors.pop()}
    for key, value in {**metadata, **_tokenizer(checkpoint)}.items():
        _add(writer, gguf, key, value)
    kinds = gguf.GGMLQuantizationType
    widened = [
        "F32" if len(tensor.shape) == 1 and tensor.dtype in ("F16", "BF16") else tensor.dtype for tensor in tensors
    ]
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
    for tensor, dtype in zip(tensors, widened, strict=True):
        count = 1
        for extent in tensor.shape:
            count *= extent
        integers = {"F32": "float32", "F16": "float16", "BF16": "uint16", "I64": "int64"}
        import numpy as np

        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(integers[dtype]), count * sizes[dtype], raw_dtype=kinds[dtype]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (tensor, dtype) in enumerate(zip(tensors, widened, strict=True)):
        progress(number)
        data = torch.cat(list(tensor.pieces()))
        data = data.float() if dtype == "F32" else data
        writer.write_tensor_data(data.contiguous().view(torch.uint8).reshape(-1).numpy())
    writer.close()


def _gguf_name(name: str) -> str:
    if name == "d2t":
        return name
    if not name.startswith("layers."):
        stem, _, suffix = name.rpartition(".")
        return f"{_NAMES.get(stem, stem)}.{suffix}"
    _, layer, rest = name.split(".", 2)
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES.get(stem, stem)}.{suffix}"


def _under(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}


def _read_vocabulary(reader: Reader, fields: Fields) -> None:
    """V from the key, the tokenizer, or the rows of the tables; V' from the map."""
    entries, tokens = reader.source.entries, reader.source.data.get("tokenizer.ggml.tokens")
    rows = {name: entries[name].shape[0] for name in ("markov_w1.weight", "token_embd.weight")
            if name in entries and entries[name].shape}  # fmt: skip
    count = tokens.count if isinstance(tokens, Skipped) else len(tokens) if isinstance(tokens, list) else None
    if fields.has("vocab_size"):
        reader.take("vocab_size", fields, "integer")
    elif rows:
        name, size = next(iter(rows.items()))
        reader.set("vocab_size", size, f"rows of {name}")
    elif count is not None:
        reader.set("vocab_size", count, "tokenizer.ggml.tokens")
    else:
        reader.faults.append(f"{fields.where('vocab_size')} is missing, and no tokenizer or table tells it")
    d2t = entries.get("d2t")
    if d2t is not None and len(d2t.shape) == 1:
        reader.set("draft_vocab_size", d2t.shape[0], "rows of d2t")
    else:
        reader.set("draft_vocab_size", reader.values.get("vocab_size"), "no tensor d2t")


def _refuse_unsupported(reader: Reader, fields: Fields) -> None:
    activation = reader.take("hidden_act", fields, "string", default="silu")
    if activation not in ("silu", None):
        reader.faults.append(f"{fields.where('hidden_act')} is {activation!r}, it must be 'silu'")
    for key in ("attention.scale", "attention.value_scale", "hyper_connection.count", "expert_count"):
        if fields.data.get(key):
            reader.faults.append(f"{fields.where(key)} is {fields.data[key]!r}, which is not read")
    sections = fields.data.get("rope.dimension_sections")
    if isinstance(sections, list) and any(sections[1:]):
        reader.faults.append(f"{fields.where('rope.dimension_sections')} is {sections}, only the first is read")


def _read_rope(reader: Reader, fields: Fields) -> None:
    theta = reader.take("rope_theta", fields, "number", "rope.freq_base", default=10000.0)
    head_dim = reader.values.get("head_dim") or 0
    rotated = reader.take("rotary", fields, "integer", "rope.dimension_count", default=head_dim)
    kind = reader.take("rope_type", fields, "string", "rope.scaling.type", default="none")
    values: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        values["factor"] = reader.take("rope factor", fields, "number", "rope.scaling.factor")
    if kind == "yarn":
        key = "original_max_position_embeddings"
        values[key] = reader.take(key, fields, "integer", "rope.scaling.original_context_length")
        for name, own, default in (("beta_fast", "yarn_beta_fast", 32.0), ("beta_slow", "yarn_beta_slow", 1.0)):
            values[name] = reader.take(name, fields, "number", f"rope.scaling.{own}", default=default)
        factor = values["factor"] or 1.0
        values["attention_factor"] = yarn_attention_factor(factor, None, None)
        if fields.has("rope.scaling.attn_factor"):
            reader.faults.append(f"{fields.where('rope.scaling.attn_factor')} is not read")
    if kind not in ("none", "linear", "yarn", None):
        reader.faults.append(f"{fields.where('rope.scaling.type')} is {kind!r}, read are none, linear, yarn")
    elif None not in (theta, rotated, kind, *values.values()):
        named: Any = "default" if kind == "none" else kind
        rope = Rope(theta=theta, kind=named, partial_rotary_factor=rotated / (head_dim or 1), **values)
        reader.set("rope", rope, reader.origins["rope_theta"])


def _read_windows(reader: Reader, fields: Fields) -> None:
    layers = reader.values.get("num_hidden_layers") or 0
    layers = layers if 0 < layers <= 1024 else 0
    window = reader.take("sliding_window", fields, "integer", "attention.sliding_window", default=0)
    pattern = fields.data.get("attention.sliding_window_pattern")
    limit = reader.values.get("max_position_embeddings") or 0
    effective = window if window and 0 < window < limit else None
    if effective and (not isinstance(pattern, list) or len(pattern) != layers):
        reader.faults.append(f"{fields.where('attention.sliding_window_pattern')} must have {layers} entries")
        pattern = None
    windows = tuple(effective if pattern and pattern[layer] else None for layer in range(layers))
    causal = reader.take("causal", fields, "boolean", "attention.causal", default=False)
    where = fields.where("attention.sliding_window_pattern") if any(windows) else "no layer has a window"
    reader.set("layer_windows", windows, where)
    reader.set("layer_causal", (bool(causal),) * layers, reader.origins.get("causal", ""))
    reader.set("window_moves", any(windows), "the gguf layout")


def _read_heads(reader: Reader) -> None:
    entries = reader.source.entries
    w1, confidence = entries.get("markov_w1.weight"), entries.get("conf_proj.weight")
    rank = w1.shape[1] if w1 is not None and len(w1.shape) == 2 else 0
    reader.set("markov_rank", rank, "tensor markov_w1.weight")
    reader.set("markov_head_type", "vanilla" if rank else "none", "tensor markov_w1.weight")
    reader.set("confidence_head", confidence is not None, "tensor conf_proj.weight")
    reader.set("confidence_head_with_markov", confidence is not None and rank > 0, "tensor conf_proj.weight")


def _rope_to_json(config: DrafterConfig) -> dict[str, Any]:
    rope = config.rope
    data: dict[str, Any] = {
        "dflash.rope.freq_base": float(rope.theta),
        "dflash.rope.dimension_count": rope.rotary_dim(config.head_dim),
    }
    if rope.kind in ("linear", "yarn"):
        data |= {"dflash.rope.scaling.type": rope.kind, "dflash.rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        data |= {
            "dflash.rope.scaling.original_context_length": rope.original_max_position_embeddings,
            "dflash.rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "dflash.rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return data


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's tokens: llama.cpp finds no mask token without, but cuts text with the target's own file."""
    from ..target import tokenizer_tokens

    folders = [checkpoint.path, *([checkpoint.target.path] if checkpoint.target else [])]
    found = next(filter(None, (tokenizer_tokens(folder) for folder in folders)), None)
    if found is None:
        raise BadInputError(
            f"{checkpoint.path}: the gguf layout needs the target's tokenizer; give the target with --target"
        )
    tokens, merges = found
    size = checkpoint.config.vocab_size
    listed = [tokens.get(i, f"[unused {i}]") for i in range(size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [1 if i in tokens else 5 for i in range(size)],
        "tokenizer.ggml.merges": merges or ["  "],  # the key must be there
        "tokenizer.ggml.add_bos_token": False,
    }


def _add(writer: Any, gguf: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
