"""The graphs ``context`` and ``block``: the parallel backbone (dspark format sheet B.3).

Matrices of the layers, embedding and head compute in the bundle's dtype; everything between them (residual,
norms, rotary embedding, softmax, fc) computes in fp32. Attention is decomposed; the scores over the cache and
over the block are two products, so that the cache is never concatenated.
"""

from __future__ import annotations

import numpy as np

from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import inverse_frequencies

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
        g = self._norm(b.op("Gemm", flat, b.weight("fc.weight"), transB=1), "hidden_norm.weight")  # [B·N, h]
        rotation = self._rotation("positions")
        g = self._to_dtype(g)
        keys, values = [], []
        for layer in range(config.num_hidden_layers):
            k, v = self._split_heads(self._gemm(g, layer, "kv"), config.num_key_value_heads, 2)
            keys.append(b.unsqueeze(self._to_dtype(self._head_norm_rotate(k, layer, "k", rotation)), 0))
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
        valid = b.op("Less", b.constant([range(capacity)]), length)  # [B, C]
        valid = b.reshape(valid, self.batch, 1, 1, capacity)
        for layer in range(config.num_hidden_layers):
            x = b.op("Add", x, self._attention(x, layer, rotation, valid, capacity))
            x = b.op("Add", x, self._mlp(x, layer))
        x = b.reshape(self._norm(x, "norm.weight"), self.batch, self.rows, config.hidden_size)
        if not config.sample_from_anchor:  # the anchor's own slot proposes nothing
            x = b.slice(x, 1, 1, self.rows)
        flat = b.reshape(self._to_dtype(x), self.batch * config.proposals, config.hidden_size)
        logits = self._to_float(b.op("Gemm", flat, b.weight("lm_head.weight"), transB=1))
        b.output(b.reshape(logits, self.batch, config.proposals, config.vocab_size), "base_logits")
        b.output(x, "hidden")

    def _embedded_block(self) -> str:
        b = self.b
        anchor = b.reshape("anchor", self.batch, 1)
        if self.rows > 1:
            masks = b.constant(np.full((self.batch, self.rows - 1), self.config.mask_token_id))
            anchor = b.op("Concat", anchor, masks, axis=1)
        rows = b.op("Gather", b.weight("embed_tokens.weight"), b.reshape(anchor, self.batch * self.rows))
        return self._to_float(rows)

    def _attention(self, x: str, layer: int, rotation: tuple[str, str], valid: str, capacity: int) -> str:
        b, config = self.b, self.config
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        group = config.num_attention_heads // kv_heads
        n = self._to_dtype(self._norm(x, f"layers.{layer}.input_layernorm.weight"))
        # Query heads of one key-value head are neighbours: heads = (Hkv, G).
        heads = b.reshape(
            self._gemm(n, layer, "qkv"), self.batch, self.rows, config.num_attention_heads + 2 * kv_heads, dim
        )
        q, k, v = b.split(b.transpose(heads, 0, 2, 1, 3), 1, [config.num_attention_heads, kv_heads, kv_heads])
        q = self._head_norm_rotate(q, layer, "q", rotation)  # [B, nh, γ, D]
        q = b.op("Mul", q, b.constant(dim**-0.5, np.float32))
        q = b.reshape(self._to_dtype(q), self.batch, kv_heads, group * self.rows, dim)
        k = self._to_dtype(self._head_norm_rotate(k, layer, "k", rotation))  # [B, Hkv, γ, D]
        v = self._to_dtype(v)
        k_cache, v_cache = self._cache("k_cache", layer), self._cache("v_cache", layer)  # [B, Hkv, C, D]

        seen = self._to_float(b.op("MatMul", q, b.transpose(k_cache, 0, 1, 3, 2)))  # [B, Hkv, G·γ, C]
        seen = b.op("Where", valid, seen, b.constant(np.finfo(np.float32).min, np.float32))
        own = self._to_float(b.op("MatMul", q, b.transpose(k, 0, 1, 3, 2)))  # [B, Hkv, G·γ, γ]
        weights = b.op("Softmax", b.op("Concat", seen, own, axis=3), axis=3)
        seen, own = b.split(self._to_dtype(weights), 3, [capacity, self.rows])
        mixed = b.op(
            "Add", self._to_float(b.op("MatMul", seen, v_cache)), self._to_float(b.op("MatMul", own, v))
        )  # [B, Hkv, G·γ, D]
        mixed = b.reshape(mixed, self.batch, kv_heads, group, self.rows, dim)
        mixed = b.reshape(b.transpose(mixed, 0, 3, 1, 2, 4), self.batch * self.rows, config.query_size)
        return self._gemm(self._to_dtype(mixed), layer, "o")

    def _mlp(self, x: str, layer: int) -> str:
        b, prefix, inner = self.b, f"layers.{layer}.mlp", self.config.intermediate_size
        m = self._to_dtype(self._norm(x, f"layers.{layer}.post_attention_layernorm.weight"))
        both = b.weight(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        gate, up = b.split(self._to_float(b.op("Gemm", m, both, transB=1)), 1, [inner, inner])
        gated = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up)
        down = b.weight(f"{prefix}.down_proj.weight")
        return self._to_float(b.op("Gemm", self._to_dtype(gated), down, transB=1))

    def _gemm(self, x: str, layer: int, parts: str) -> str:
        """Projection of x [rows, in] by the neighbouring matrices ``parts``, e.g. "qkv", as fp32."""
        names = [f"layers.{layer}.self_attn.{part}_proj" for part in parts]
        inputs = [x, self.b.weight(*(f"{name}.weight" for name in names))]
        if self.config.attention_bias:
            inputs.append(self.b.weight(*(f"{name}.bias" for name in names)))
        return self._to_float(self.b.op("Gemm", *inputs, transB=1))

    def _split_heads(self, x: str, heads: int, parts: int) -> list[str]:
        """x [B·N, parts·heads·D] -> ``parts`` tensors [B, heads, N, D]."""
        b = self.b
        x = b.reshape(x, self.batch, self.rows, parts * heads, self.config.head_dim)
        return b.split(b.transpose(x, 0, 2, 1, 3), 1, [heads] * parts)

    def _head_norm_rotate(self, x: str, layer: int, part: str, rotation: tuple[str, str]) -> str:
        """q or k [B, heads, N, D]: RMS norm over D, then rotation, halves against each other."""
        b, half = self.b, self.config.head_dim // 2
        x = self._norm(x, f"layers.{layer}.self_attn.{part}_norm.weight")
        first, second = b.split(x, 3, [half, half])
        cos, sin = rotation
        return b.op(
            "Concat",
            b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
            b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
            axis=3,
        )

    def _rotation(self, positions: str) -> tuple[str, str]:
        """cos, sin [B, 1, N, D/2] of positions [B, N]; frequencies and angles in fp32."""
        b, frequencies = self.b, inverse_frequencies(self.config).numpy()
        column = b.reshape(b.cast(positions, "float32"), self.batch, 1, self.rows, 1)
        angles = b.op("Mul", column, b.constant(frequencies, np.float32))
        return b.op("Cos", angles), b.op("Sin", angles)

    def _cache(self, name: str, layer: int) -> str:
        config = self.config
        if config.num_hidden_layers == 1:
            return self.b.op("Squeeze", name, self.b.constant([0]))
        return self.b.op("Gather", name, self.b.constant(layer), axis=0)

    def _norm(self, x: str, weight: str) -> str:
        b = self.b
        mean = b.op("ReduceMean", b.op("Pow", x, b.constant(2, np.float32)), b.constant([-1]), keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, b.constant(self.config.rms_norm_eps, np.float32)))
        return b.op("Mul", b.op("Div", x, root), b.weight(weight))

    def _to_dtype(self, x: str) -> str:
        return x if self.dtype == "float32" else self.b.cast(x, self.dtype)

    def _to_float(self, x: str) -> str:
        return x if self.dtype == "float32" else self.b.cast(x, "float32")


def add_context(config: DrafterConfig, dtype: Dtype, spec: GraphSpec, builder: GraphBuilder) -> None:
    """Fill ``builder`` with the graph ``context``."""
    Backbone(config, dtype, builder, spec.batch, spec.size).context()


def add_block(config: DrafterConfig, dtype: Dtype, spec: GraphSpec, builder: GraphBuilder) -> None:
    """Fill ``builder`` with the graph ``block``; all γ slots run, however few tokens are verified."""
    Backbone(config, dtype, builder, spec.batch, config.block_size).block(spec.size)
