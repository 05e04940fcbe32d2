"""The graphs ``context`` and ``block``: the parallel backbone (dspark format sheet B.3).

Matrices of the layers, embedding and head compute in the bundle's dtype; everything between them (residual,
norms, rotary embedding, softmax, fc) computes in fp32. Attention is decomposed; the scores over the cache and
over the block are two products, so that the cache is never concatenated.
"""

from __future__ import annotations

import numpy as np

from dspark.drafter.config import DrafterConfig

from .builder import GraphBuilder
from .contract import Dtype, GraphSpec


class Backbone:
    """Nodes of the backbone for one graph: ``rows`` positions in each of ``batch`` slots."""

    def __init__(self, config: DrafterConfig, dtype: Dtype, builder: GraphBuilder, batch: int, rows: int) -> None:
        self.config, self.dtype, self.b = config, dtype, builder
        self.batch, self.rows = batch, rows

    def context(self) -> None:
        """features [B, N, F·h_t], positions [B, N] -> k, v [L, B, Hkv, N, D]."""
        b, config = self.b, self.config
        flat = b.reshape("features", self.batch * self.rows, config.feature_size)
        g = self._norm(b.linear(flat, ["fc.weight"]), "hidden_norm.weight")  # [B·N, h]
        rotation = self._rotation("positions")
        g = self._to_dtype(g)
        parts = "k" if config.k_eq_v else "kv"
        keys, values = [], []
        for layer in range(config.num_hidden_layers):
            projected = self._gemm(g, layer, parts)
            heads = self._split_heads(projected, [config.num_key_value_heads] * len(parts))
            k, v = self._keys_values(heads, layer, rotation)
            keys.append(b.unsqueeze(self._to_dtype(k), 0))
            values.append(b.unsqueeze(self._to_dtype(v), 0))
        b.output(b.op("Concat", *keys, axis=0), "k")
        b.output(b.op("Concat", *values, axis=0), "v")

    def block(self, capacity: int) -> None:
        """anchor [B], context_length [B], caches [L, B, Hkv, C, D] -> base_logits [B, K, V'], hidden [B, K, h]."""
        b, config = self.b, self.config
        x = self._embedded_block()  # [B·γ, h] fp32
        length = b.reshape("context_length", self.batch, 1)
        positions = b.op("Add", length, b.constant([range(self.rows)]))  # [B, γ]
        rotation = self._rotation(positions)
        masks = BlockMasks(config, b, self.batch, length, capacity)
        for layer in range(config.num_hidden_layers):
            x = self._layer(x, layer, rotation, masks, capacity)
        x = b.reshape(self._norm(x, "norm.weight"), self.batch, self.rows, config.hidden_size)
        if not config.sample_from_anchor:  # the anchor's own slot proposes nothing
            x = b.slice(x, 1, 1, self.rows)
        flat = b.reshape(self._to_dtype(x), self.batch * config.proposals, config.hidden_size)
        logits = self._to_float(b.linear(flat, ["lm_head.weight"]))
        if config.final_logit_softcapping is not None:
            cap = b.constant(config.final_logit_softcapping, np.float32)
            logits = b.op("Mul", b.op("Tanh", b.op("Div", logits, cap)), cap)
        logits = self._scaled(logits, config.logit_scale)
        b.output(b.reshape(logits, self.batch, config.proposals, config.proposal_vocab_size), "base_logits")
        b.output(x, "hidden")

    def _embedded_block(self) -> str:
        b = self.b
        anchor = b.reshape("anchor", self.batch, 1)
        if self.rows > 1:
            masks = b.constant(np.full((self.batch, self.rows - 1), self.config.mask_token_id))
            anchor = b.op("Concat", anchor, masks, axis=1)
        rows = b.op("Gather", b.weight("embed_tokens.weight"), b.reshape(anchor, self.batch * self.rows))
        return self._scaled(self._to_float(rows), self.config.embed_scale)

    def _layer(self, x: str, layer: int, rotation: tuple[str, str], masks: BlockMasks, capacity: int) -> str:
        b, prefix = self.b, f"layers.{layer}"
        mixed = self._attention(self._norm(x, f"{prefix}.input_layernorm.weight"), layer, rotation, masks, capacity)
        if self.config.architecture == "gemma4":  # norms on both sides, and the whole result scaled
            x = b.op("Add", x, self._norm(mixed, f"{prefix}.post_attention_layernorm.weight"))
            fed = self._mlp(self._norm(x, f"{prefix}.pre_feedforward_layernorm.weight"), layer)
            x = b.op("Add", x, self._norm(fed, f"{prefix}.post_feedforward_layernorm.weight"))
            return b.op("Mul", x, b.weight(f"{prefix}.layer_scalar"))
        x = b.op("Add", x, mixed)
        return b.op("Add", x, self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm.weight"), layer))

    def _attention(self, n: str, layer: int, rotation: tuple[str, str], masks: BlockMasks, capacity: int) -> str:
        b, config = self.b, self.config
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        group = config.num_attention_heads // kv_heads
        # Query heads of one key-value head are neighbours: heads = (Hkv, G).
        parts = "qk" if config.k_eq_v else "qkv"
        projected = self._gemm(self._to_dtype(n), layer, parts)
        sizes = [config.num_attention_heads, kv_heads, kv_heads][: len(parts)]
        q, *heads = self._split_heads(projected, sizes)
        q = self._rotate(self._head_norm(q, layer, "q"), rotation)  # [B, nh, γ, D]
        q = self._scaled(q, config.attention_scale)
        q = b.reshape(self._to_dtype(q), self.batch, kv_heads, group * self.rows, dim)
        k, v = (self._to_dtype(x) for x in self._keys_values(heads, layer, rotation))  # [B, Hkv, γ, D]
        k_cache, v_cache = self._cache("k_cache", layer), self._cache("v_cache", layer)  # [B, Hkv, C, D]

        seen = self._to_float(b.op("MatMul", q, b.transpose(k_cache, 0, 1, 3, 2)))  # [B, Hkv, G·γ, C]
        seen = masks.context(seen, layer, kv_heads, group)
        own = self._to_float(b.op("MatMul", q, b.transpose(k, 0, 1, 3, 2)))  # [B, Hkv, G·γ, γ]
        own = masks.block(own, layer, kv_heads, group)
        widths = [capacity, self.rows]
        scores = [seen, own]
        if config.attention_sinks:  # takes its share of the softmax and gives nothing
            sinks = b.reshape(b.weight(f"layers.{layer}.self_attn.sinks"), 1, kv_heads, group, 1, 1)
            sinks = b.op("Expand", sinks, b.constant([self.batch, kv_heads, group, self.rows, 1]))
            scores.append(b.reshape(sinks, self.batch, kv_heads, group * self.rows, 1))
            widths.append(1)
        weights = b.op("Softmax", b.op("Concat", *scores, axis=3), axis=3)
        seen, own, *_ = b.split(self._to_dtype(weights), 3, widths)
        mixed = b.op(
            "Add", self._to_float(b.op("MatMul", seen, v_cache)), self._to_float(b.op("MatMul", own, v))
        )  # [B, Hkv, G·γ, D]
        mixed = b.reshape(mixed, self.batch, kv_heads, group, self.rows, dim)
        mixed = b.reshape(b.transpose(mixed, 0, 3, 1, 2, 4), self.batch * self.rows, config.query_size)
        return self._gemm(self._to_dtype(mixed), layer, "o")

    def _mlp(self, m: str, layer: int) -> str:
        b, prefix, inner = self.b, f"layers.{layer}.mlp", self.config.intermediate_size
        both = b.linear(self._to_dtype(m), [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"])
        gate, up = b.split(self._to_float(both), 1, [inner, inner])
        if self.config.architecture == "gemma4":
            gate = b.op("Gelu", gate, approximate="tanh")
        else:
            gate = b.op("Mul", gate, b.op("Sigmoid", gate))
        return self._to_float(b.linear(self._to_dtype(b.op("Mul", gate, up)), [f"{prefix}.down_proj.weight"]))

    def _keys_values(self, heads: list[str], layer: int, rotation: tuple[str, str]) -> tuple[str, str]:
        """Projected heads k and v, or k alone, -> normed and rotated keys, and values."""
        k, v = heads[0], heads[-1]
        if self.config.architecture == "gemma4":
            v = self._normalised(v)
        return self._rotate(self._head_norm(k, layer, "k"), rotation), v

    def _gemm(self, x: str, layer: int, parts: str) -> str:
        """Projection of x [rows, in] by the neighbouring matrices ``parts``, e.g. "qkv", as fp32."""
        names = [f"layers.{layer}.self_attn.{part}_proj" for part in parts]
        biases = [f"{name}.bias" for name in names] if self.config.attention_bias else []
        return self._to_float(self.b.linear(x, [f"{name}.weight" for name in names], biases))

    def _split_heads(self, x: str, sizes: list[int]) -> list[str]:
        """x [B·N, sum(sizes)·D] -> a tensor [B, size, N, D] for each size."""
        b = self.b
        x = b.transpose(b.reshape(x, self.batch, self.rows, sum(sizes), self.config.head_dim), 0, 2, 1, 3)
        return b.split(x, 1, sizes) if len(sizes) > 1 else [x]

    def _head_norm(self, x: str, layer: int, part: str) -> str:
        return self._norm(x, f"layers.{layer}.self_attn.{part}_norm.weight") if self.config.qk_norm else x

    def _rotate(self, x: str, rotation: tuple[str, str]) -> str:
        """q or k [B, heads, N, D] rotated; pairs are halves, or neighbours, which come out as halves."""
        b, config = self.b, self.config
        size = config.rope.rotary_dim(config.head_dim)
        half, rest = size // 2, []
        if size < config.head_dim:
            x, passed = b.split(x, 3, [size, config.head_dim - size])
            rest = [passed]
        if config.rope.interleaved:
            first, second = (b.op("Gather", x, b.constant(range(i, size, 2)), axis=3) for i in (0, 1))
        else:
            first, second = b.split(x, 3, [half, half])
        cos, sin = rotation
        return b.op(
            "Concat",
            b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
            b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
            *rest,
            axis=3,
        )

    def _rotation(self, positions: str) -> tuple[str, str]:
        """cos, sin [B, 1, N, size/2] of positions [B, N]; frequencies and angles in fp32."""
        b, rope = self.b, self.config.rope
        column = b.reshape(b.cast(positions, "float32"), self.batch, 1, self.rows, 1)
        frequencies = rope.inverse_frequencies(self.config.head_dim)
        angles = b.op("Mul", column, b.constant(frequencies, np.float32))
        cos, sin = (self._scaled(b.op(kind, angles), rope.attention_factor) for kind in ("Cos", "Sin"))
        return cos, sin

    def _cache(self, name: str, layer: int) -> str:
        config = self.config
        if config.num_hidden_layers == 1:
            return self.b.op("Squeeze", name, self.b.constant([0]))
        return self.b.op("Gather", name, self.b.constant(layer), axis=0)

    def _norm(self, x: str, weight: str) -> str:
        return self.b.op("Mul", self._normalised(x), self.b.weight(weight))

    def _normalised(self, x: str) -> str:
        b = self.b
        mean = b.op("ReduceMean", b.op("Pow", x, b.constant(2, np.float32)), b.constant([-1]), keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, b.constant(self.config.rms_norm_eps, np.float32)))
        return b.op("Div", x, root)

    def _scaled(self, x: str, factor: float) -> str:
        return x if factor == 1 else self.b.op("Mul", x, self.b.constant(factor, np.float32))

    def _to_dtype(self, x: str) -> str:
        return x if self.dtype == "float32" else self.b.cast(x, self.dtype)

    def _to_float(self, x: str) -> str:
        return x if self.dtype == "float32" else self.b.cast(x, "float32")


class BlockMasks:
    """What each slot of the block sees of the cache and of the block; layers of one kind share their nodes.

    Args:
        length: [B, 1] rows that the context has.
    """

    def __init__(self, config: DrafterConfig, builder: GraphBuilder, batch: int, length: str, capacity: int) -> None:
        self.config, self.b, self.batch, self.length, self.capacity = config, builder, batch, length, capacity
        self.hidden = builder.constant(np.finfo(np.float32).min, np.float32)
        self._visible: dict[int | None, str] = {}

    def context(self, scores: str, layer: int, kv_heads: int, group: int) -> str:
        """scores [B, Hkv, G·γ, C] with what the layer does not see of the cache put out of reach."""
        window = self.config.layer_windows[layer]
        if window not in self._visible:
            self._visible[window] = self._of_window(window)
        if window is None or not self.config.window_moves:  # the same for every slot: [B, 1, 1, C]
            return self.b.op("Where", self._visible[window], scores, self.hidden)
        return self._per_slot(self._visible[window], scores, kv_heads, group, self.capacity)

    def block(self, scores: str, layer: int, kv_heads: int, group: int) -> str:
        """scores [B, Hkv, G·γ, γ] likewise, for the slots of the block."""
        slots, window = np.arange(self.config.block_size), self.config.layer_windows[layer]
        distance = slots[:, None] - slots  # [γ, γ], from slot to key
        visible = np.ones_like(distance, dtype=bool)
        if window is not None and self.config.window_moves:
            visible &= distance < window
        if self.config.layer_causal[layer]:
            visible &= distance >= 0
        if visible.all():
            return scores
        mask = self.b.constant(visible[None, None], np.bool_)
        return self._per_slot(mask, scores, kv_heads, group, self.config.block_size)

    def _of_window(self, window: int | None) -> str:
        """[B, 1, 1, C], or [B, 1, γ, C] where the window moves with the slot."""
        b, config = self.b, self.config
        if config.ring is None and window is None:
            valid = b.op("Less", b.constant([range(self.capacity)]), self.length)  # [B, C]
            return b.reshape(valid, self.batch, 1, 1, self.capacity)
        position = b.reshape(self._row_positions(), self.batch, 1, 1, self.capacity)
        start = b.reshape(self.length, self.batch, 1, 1, 1)
        valid = b.op("And", b.op("GreaterOrEqual", position, b.constant(0)), b.op("Less", position, start))
        if window is None:
            return valid
        if not config.window_moves:
            return b.op("And", valid, b.op("GreaterOrEqual", position, b.op("Sub", start, b.constant(window))))
        slots = b.constant(np.arange(config.block_size)[None, None, :, None] - window)
        return b.op("And", valid, b.op("Greater", position, b.op("Add", start, slots)))

    def _row_positions(self) -> str:
        """[B, C]: the position that lies in each row of the cache; negative: none yet."""
        b, rows = self.b, self.b.constant([range(self.capacity)])
        if self.config.ring is None:
            return b.op("Expand", rows, b.constant([self.batch, self.capacity]))
        last = b.op("Sub", self.length, b.constant(1))
        return b.op("Sub", last, b.op("Mod", b.op("Sub", last, rows), b.constant(self.capacity)))

    def _per_slot(self, visible: str, scores: str, kv_heads: int, group: int, width: int) -> str:
        """Apply a mask [B or 1, 1, γ, width] to scores [B, Hkv, G·γ, width]."""
        b, rows = self.b, self.config.block_size
        split = b.reshape(scores, self.batch, kv_heads * group, rows, width)
        masked = b.op("Where", visible, split, self.hidden)
        return b.reshape(masked, self.batch, kv_heads, group * rows, width)


def add_context(config: DrafterConfig, dtype: Dtype, spec: GraphSpec, builder: GraphBuilder) -> None:
    """Fill ``builder`` with the graph ``context``."""
    Backbone(config, dtype, builder, spec.batch, spec.size).context()


def add_block(config: DrafterConfig, dtype: Dtype, spec: GraphSpec, builder: GraphBuilder) -> None:
    """Fill ``builder`` with the graph ``block``; all γ slots run, however few tokens are verified."""
    Backbone(config, dtype, builder, spec.batch, config.block_size).block(spec.size)
