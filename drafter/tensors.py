"""The canonical tensors of a drafter: names, shapes, and which may come from the target."""

from __future__ import annotations

from .config import DrafterConfig

# Shared with the target: a checkpoint may leave them out, and the target's own are used.
SHARED_TENSORS = ("embed_tokens.weight", "lm_head.weight")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (DeepSpec) tensor name to shape, complete for ``config``.

    Matrices are [out, in] as in ``torch.nn.Linear``; source: dspark format sheet B.2.
    """
    h, r, v = config.hidden_size, config.markov_rank, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (v, h),
        "fc.weight": (h, config.feature_size),
        "hidden_norm.weight": (h,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes |= {"norm.weight": (h,), "lm_head.weight": (v, h)}
    if config.markov_head_type != "none":
        shapes |= {"markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (v, r)}
    if config.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
    if config.markov_head_type == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * r, 2 * r + h),
            "markov_head.joint_proj.bias": (3 * r,),
        }
    if config.confidence_head:
        width = h + r if config.confidence_head_with_markov else h
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.query_size, config.key_value_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", h))}
    return shapes
