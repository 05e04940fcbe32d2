"""The reference model in plain PyTorch. It follows the graph contracts of ``export.contract`` by name.

Architecture: DSpark paper §3.1 (equations 2 to 7) and dspark format sheet B.3, B.4, B.6. All arithmetic is fp32; a
model may round where a graph of another dtype does, which shows what that dtype costs.
B slots, K proposals, L layers, C context rows, N feature rows, V vocabulary, V' draft vocabulary,
h hidden, r Markov rank, Hkv/D key-value heads and head dim, G query heads per key-value head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, sigmoid, silu, softmax

from .config import DrafterConfig
from .parameters import Load, Parameters
from .tensors import DRAFT_TO_TARGET, tensor_shapes


class ReferenceDrafter:
    """Context rows, block, Markov step and Markov loop of one drafter.

    Args:
        dtype: what the operands and results of the backbone's products are rounded to (the weights come rounded).
    """

    def __init__(self, config: DrafterConfig, parameters: Parameters, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.parameters, self.dtype = config, parameters, dtype
        self.inverse_frequencies = torch.from_numpy(config.rope.inverse_frequencies(config.head_dim))

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value rows of the context, for the runtime to write into its cache.

        Args:
            features: [B, N, F·h_t] outputs of the tapped target layers, concatenated in order of the ids.
            positions: [B, N] absolute positions.

        Returns:
            k, v: [L, B, Hkv, N, D]; k is normed and rotated.
        """
        g = self._norm(self.parameters.linear(features, "fc.weight"), "hidden_norm.weight")  # [B, N, h]
        rows = [self._keys_values(layer, g, positions) for layer in range(self.config.num_hidden_layers)]
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def block(self, anchor: Tensor, context_length: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The parallel block: every slot sees its context and the block, as far as the layer's window goes.

        Args:
            anchor: [B] last committed token.
            context_length: [B] rows that the context has, which is the anchor's absolute position.
            k_cache, v_cache: [L, B, Hkv, C, D]; position p lies in row p, in a ring in row p mod C.

        Returns:
            base_logits [B, K, V'] and hidden [B, K, h] after the final norm.
        """
        config = self.config
        masks = torch.full((anchor.shape[0], config.block_size - 1), config.mask_token_id)
        tokens = torch.cat([anchor[:, None], masks], dim=1)  # [B, γ]
        positions = context_length[:, None] + torch.arange(config.block_size)  # [B, γ]
        x = self.parameters.embedding(tokens, "embed_tokens.weight") * config.embed_scale  # [B, γ, h]
        for layer in range(config.num_hidden_layers):
            visible = self._visible(layer, context_length, k_cache.shape[3])  # [B, γ, C+γ]
            x = self._layer(layer, x, positions, visible, k_cache[layer], v_cache[layer])
        first = 0 if config.sample_from_anchor else 1
        hidden = self._norm(x, "norm.weight")[:, first:]  # [B, K, h]
        logits = self._product("lm_head", hidden)
        if config.final_logit_softcapping is not None:
            logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
        return logits * config.logit_scale, hidden

    def markov_step(
        self,
        previous: Tensor,
        base_logits: Tensor,
        hidden: Tensor,
        state: Tensor,
        noise: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """One slot of the sequential head (equations 5 to 7).

        Args:
            previous: [B] token before this slot.
            base_logits: [B, V']. hidden: [B, h].
            state: [B, r], zero at the first slot; used by the rnn head only.
            noise: [B] uniforms in [0, 1). temperature: [B]; 0 is argmax.

        Returns:
            token [B] (a target id), q [B, V'], confidence_logit [B] (``None`` without the head), next state [B, r].
        """
        bias, state = self.markov_bias(previous, hidden, state)
        token, q = sample(base_logits if bias is None else base_logits + bias, noise, temperature)
        if self.config.reduced_vocabulary:
            token = self.parameters[DRAFT_TO_TARGET][token]
        return token, q, self.confidence_logit(previous, hidden), state

    def markov_loop(
        self, anchor: Tensor, base_logits: Tensor, hidden: Tensor, noise: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """K slots left to right, each given the token drawn before it.

        Args:
            anchor: [B]. base_logits: [B, K, V']. hidden: [B, K, h].
            noise: [B, K] uniforms in [0, 1), one per slot. temperature: [B]; 0 is argmax.

        Returns:
            tokens [B, K] (target ids), q [B, K, V'], confidence_logits [B, K], survival [B, K] (cumulative product of
            the confidences); the last two are ``None`` without a confidence head.
        """
        state = torch.zeros(anchor.shape[0], self.config.markov_rank)
        previous, tokens, laws, logits = anchor, [], [], []
        for slot in range(self.config.proposals):
            previous, q, logit, state = self.markov_step(
                previous, base_logits[:, slot], hidden[:, slot], state, noise[:, slot], temperature
            )
            tokens.append(previous)
            laws.append(q)
            if logit is not None:
                logits.append(logit)
        confidence = torch.stack(logits, dim=1) if logits else None
        survival = None if confidence is None else sigmoid(confidence).cumprod(dim=1)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1), confidence, survival

    def markov_bias(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor | None, Tensor]:
        """The head's correction [B, V'] of the base logits, and its next state; ``None`` without a head."""
        w, kind = self.parameters, self.config.markov_head_type
        if kind == "none":
            return None, state
        e = w.embedding(previous, "markov_head.markov_w1.weight")  # [B, r]
        if kind == "gated":
            e = sigmoid(self._project("markov_head.gate_proj", torch.cat([hidden, e], dim=-1))) * e
        if kind == "rnn":
            z = self._project("markov_head.joint_proj", torch.cat([state, e, hidden], dim=-1))  # [B, 3r]
            update, candidate, output = z.chunk(3, dim=-1)
            state = sigmoid(update) * state + (1 - sigmoid(update)) * torch.tanh(candidate)
            e = torch.tanh(output)
        return w.linear(e, "markov_head.markov_w2.weight"), state

    def confidence_logit(self, previous: Tensor, hidden: Tensor) -> Tensor | None:
        """[B] log-odds that the slot's token is accepted, given that all before it are (equation 7)."""
        if not self.config.confidence_head:
            return None
        x = hidden
        if self.config.confidence_head_with_markov:
            e = self.parameters.embedding(previous, "markov_head.markov_w1.weight")
            x = torch.cat([hidden, e], dim=-1)
        return self._project("confidence_head.proj", x)[..., 0]

    def _layer(
        self, layer: int, x: Tensor, positions: Tensor, visible: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        prefix = f"layers.{layer}"
        n = self._norm(x, f"{prefix}.input_layernorm.weight")  # [B, γ, h]
        mixed = self._attention(layer, n, positions, visible, k_cache, v_cache)
        if self.config.architecture == "gemma4":  # norms on both sides, and the whole result scaled
            x = x + self._norm(mixed, f"{prefix}.post_attention_layernorm.weight")
            fed = self._mlp(layer, self._norm(x, f"{prefix}.pre_feedforward_layernorm.weight"))
            x = x + self._norm(fed, f"{prefix}.post_feedforward_layernorm.weight")
            return x * self.parameters[f"{prefix}.layer_scalar"]
        x = x + mixed
        return x + self._mlp(layer, self._norm(x, f"{prefix}.post_attention_layernorm.weight"))

    def _attention(
        self, layer: int, n: Tensor, positions: Tensor, visible: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        config, prefix = self.config, f"layers.{layer}.self_attn"
        q = self._heads(self._product(f"{prefix}.q_proj", n), config.num_attention_heads)  # [B, nh, γ, D]
        q = self._rotate(self._head_norm(q, f"{prefix}.q_norm.weight"), positions)
        q = self._rounded(q * config.attention_scale)
        k, v = self._keys_values(layer, n, positions)  # [B, Hkv, γ, D]
        # The queries of a group are rows of one product with its keys, so that no key is copied
        grouped = q.reshape(q.shape[0], config.num_key_value_heads, -1, config.head_dim)  # [B, Hkv, G·γ, D]
        scores = torch.cat([grouped @ keys.transpose(-1, -2) for keys in (k_cache, k)], dim=-1)
        scores = self._rounded(scores).view(*q.shape[:3], -1)  # [B, nh, γ, C+γ]
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        if config.attention_sinks:  # takes its share of the softmax and gives nothing
            sinks = self.parameters[f"{prefix}.sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        else:
            weights = softmax(scores, dim=-1)
        weights, capacity = self._rounded(weights).reshape(*grouped.shape[:3], -1), k_cache.shape[2]
        seen, own = weights[..., :capacity] @ v_cache, weights[..., capacity:] @ v
        mixed = (self._rounded(seen) + self._rounded(own)).view(q.shape)  # [B, nh, γ, D]
        return self._product(f"{prefix}.o_proj", mixed.transpose(1, 2).flatten(2))

    def _visible(self, layer: int, context_length: Tensor, capacity: int) -> Tensor:
        """[B, γ, C+γ]: which cache rows and which slots of the block each slot attends to."""
        config, slots = self.config, torch.arange(self.config.block_size)
        start = context_length[:, None, None]  # [B, 1, 1]
        position = self._row_positions(context_length, capacity)[:, None]  # [B, 1, C]
        context = ((position >= 0) & (position < start)).expand(-1, len(slots), -1)  # [B, γ, C]
        block = torch.ones(len(slots), len(slots), dtype=torch.bool)
        window = config.layer_windows[layer]
        if window is not None:
            origin = start + slots[:, None] if config.window_moves else start  # of the window's width
            context = context & (position > origin - window if config.window_moves else position >= origin - window)
            if config.window_moves:
                block = (slots[:, None] - slots) < window
        if config.layer_causal[layer]:
            block = block & (slots <= slots[:, None])
        return torch.cat([context, block.expand(len(context_length), -1, -1)], dim=-1)

    def _row_positions(self, context_length: Tensor, capacity: int) -> Tensor:
        """[B, C]: the position that lies in each row of the cache; negative: none yet."""
        rows = torch.arange(capacity)[None]
        if self.config.ring is None:
            return rows.expand(len(context_length), -1)
        last = context_length[:, None] - 1
        return last - (last - rows) % capacity

    def _mlp(self, layer: int, m: Tensor) -> Tensor:
        prefix = f"layers.{layer}.mlp"
        gate, up = (self._product(f"{prefix}.{part}_proj", m) for part in ("gate", "up"))
        gate = gelu(gate, approximate="tanh") if self.config.architecture == "gemma4" else silu(gate)
        return self._product(f"{prefix}.down_proj", gate * up)

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and values [B, Hkv, N, D] of rows x [B, N, h]."""
        heads, prefix = self.config.num_key_value_heads, f"layers.{layer}.self_attn"
        raw = self._heads(self._product(f"{prefix}.k_proj", x), heads)
        v = raw if self.config.k_eq_v else self._heads(self._product(f"{prefix}.v_proj", x), heads)
        if self.config.architecture == "gemma4":
            v = self._normalised(v)
        k = self._rotate(self._head_norm(raw, f"{prefix}.k_norm.weight"), positions)
        return self._rounded(k), self._rounded(v)

    def _product(self, name: str, x: Tensor) -> Tensor:
        """A projection of the backbone, whose operands and result are of the graph's dtype."""
        return self._rounded(self._project(name, self._rounded(x)))

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self.parameters.linear(x, f"{name}.weight", f"{name}.bias")

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.config.head_dim).transpose(1, 2)  # [B, heads, N, D]

    def _head_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if self.config.qk_norm else x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._normalised(x) * self.parameters[name]

    def _normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [B, heads, N, D] at positions [B, N]; pairs are halves, or neighbours.

        Rotated neighbours come out as halves, in queries and keys alike: their products are the same.
        """
        rope, size = self.config.rope, self.config.rope.rotary_dim(self.config.head_dim)
        angles = positions[:, None, :, None].float() * self.inverse_frequencies  # [B, 1, N, size/2]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        rotated, rest = x[..., :size], x[..., size:]
        first, second = (rotated[..., ::2], rotated[..., 1::2]) if rope.interleaved else rotated.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def sample(logits: Tensor, noise: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draw from softmax(logits / temperature); temperature 0 is argmax with a one-hot law.

    Args:
        logits: [B, V] fp32. noise: [B] in [0, 1). temperature: [B].

    Returns:
        token [B] int64, q [B, V] fp32: the law that the token was drawn from.
    """
    greedy = logits.argmax(dim=-1)  # [B]
    one_hot = nn.functional.one_hot(greedy, logits.shape[-1]).float()
    if not bool((temperature > 0).any()):
        return greedy, one_hot
    hot = (temperature > 0)[:, None]
    # In fp64: with some vector units PyTorch's fp32 softmax of 49,152 entries sums to 1 + 5e-5.
    scaled = logits.double() / torch.where(hot, temperature[:, None], 1.0)
    q = torch.where(hot, softmax(scaled, dim=-1).float(), one_hot)
    cumulative = q.double().cumsum(dim=-1)
    threshold = noise.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(hot[:, 0], drawn, greedy), q


def reference_from_tensors(config: DrafterConfig, load: Load, dtype: torch.dtype = torch.float32) -> ReferenceDrafter:
    """A reference model from a loader of canonical tensors, e.g. ``Checkpoint.load``; it rounds as graphs of dtype."""
    return ReferenceDrafter(config, Parameters(load, tensor_shapes(config)), dtype)
