"""The canonical tensors of a drafter: names, shapes, and which may come from the target."""

from __future__ import annotations

from .config import DrafterConfig

# Shared with the target: a checkpoint may leave them out, and the target's own are used.
SHARED_TENSORS = ("embed_tokens.weight", "lm_head.weight")
DRAFT_TO_TARGET = "d2t"  # [V'] int64: target id of each draft token, absolute


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (DeepSpec) tensor name to shape, complete for ``config``; rows that only pad are left out.

    Matrices are [out, in] as in ``torch.nn.Linear``; source: dspark format sheet B.2, B.6.
    """
    h, r, v, v_draft = config.hidden_size, config.markov_rank, config.vocab_size, config.proposal_vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (v, h),
        "fc.weight": (h, config.feature_size),
        "hidden_norm.weight": (h,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes |= {"norm.weight": (h,), "lm_head.weight": (v_draft, h)}
    if config.markov_head_type != "none":
        shapes |= {"markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (v_draft, r)}
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
    if config.reduced_vocabulary:
        shapes[DRAFT_TO_TARGET] = (v_draft,)
    return shapes


def stored_rows(config: DrafterConfig, name: str) -> tuple[int, ...]:
    """How many rows a checkpoint may store of this tensor: more than are used where the vocabulary is padded."""
    rows = tensor_shapes(config)[name][0]
    if config.draft_vocab_size <= config.vocab_size:
        return (rows,)
    if name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        return (config.draft_vocab_size,)
    if name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
        return (rows, config.draft_vocab_size)
    return (rows,)


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
    if not config.qk_norm:
        del shapes["self_attn.q_norm.weight"], shapes["self_attn.k_norm.weight"]
    if config.k_eq_v:
        del shapes["self_attn.v_proj.weight"]
    if config.attention_bias:
        sizes = {"q": q, "k": kv, "v": kv, "o": h}
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in sizes.items() if not (p == "v" and config.k_eq_v)}
    if config.attention_sinks:
        shapes["self_attn.sinks"] = (config.num_attention_heads,)
    if config.architecture == "gemma4":
        shapes |= {
            "pre_feedforward_layernorm.weight": (h,),
            "post_feedforward_layernorm.weight": (h,),
            "layer_scalar": (1,),
        }
    return shapes
