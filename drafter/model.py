"""The reference model in plain PyTorch. It follows the graph contracts of ``export.contract`` by name.

Architecture: DSpark paper §3.1 (equations 2 to 7) and dspark format sheet B.3, B.4. All arithmetic is fp32
unless the module is cast. B slots, K proposals, L layers, C context rows, N feature rows, V vocabulary,
h hidden, r Markov rank, Hkv/D key-value heads and head dim, G query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, sigmoid, silu, softmax

from .config import DrafterConfig
from .tensors import tensor_shapes


class ReferenceDrafter:
    """Context rows, block, Markov step and Markov loop of one drafter.

    ``weights`` are the canonical tensors, complete; they are used as given (dtype and device).
    """

    def __init__(self, config: DrafterConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = weights
        self.inverse_frequencies = inverse_frequencies(config)  # [D/2]

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value rows of the context, for the runtime to write into its cache.

        Args:
            features: [B, N, F·h_t] outputs of the tapped target layers, concatenated in order of the ids.
            positions: [B, N] absolute positions.

        Returns:
            k, v: [L, B, Hkv, N, D]; k is normed and rotated.
        """
        w = self.weights
        g = self._norm(linear(features, w["fc.weight"]), "hidden_norm.weight")  # [B, N, h]
        rows = [self._keys_values(layer, g, positions) for layer in range(self.config.num_hidden_layers)]
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def block(self, anchor: Tensor, context_length: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The parallel block: every slot sees the whole context and the whole block.

        Args:
            anchor: [B] last committed token.
            context_length: [B] valid cache rows, which is the anchor's absolute position.
            k_cache, v_cache: [L, B, Hkv, C, D].

        Returns:
            base_logits [B, K, V] and hidden [B, K, h] after the final norm.
        """
        config, w = self.config, self.weights
        masks = torch.full((anchor.shape[0], config.block_size - 1), config.mask_token_id)
        tokens = torch.cat([anchor[:, None], masks], dim=1)  # [B, γ]
        positions = context_length[:, None] + torch.arange(config.block_size)  # [B, γ]
        in_context = torch.arange(k_cache.shape[3]) < context_length[:, None]  # [B, C]
        visible = torch.cat([in_context, torch.ones_like(tokens, dtype=torch.bool)], dim=1)  # [B, C+γ]

        x = embedding(tokens, w["embed_tokens.weight"])  # [B, γ, h]
        for layer in range(config.num_hidden_layers):
            x = x + self._attention(layer, x, positions, visible, k_cache[layer], v_cache[layer])
            x = x + self._mlp(layer, x)
        first = 0 if config.sample_from_anchor else 1
        hidden = self._norm(x, "norm.weight")[:, first:]  # [B, K, h]
        return linear(hidden, w["lm_head.weight"]), hidden

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
            base_logits: [B, V]. hidden: [B, h].
            state: [B, r], zero at the first slot; used by the rnn head only.
            noise: [B] uniforms in [0, 1). temperature: [B]; 0 is argmax.

        Returns:
            token [B], q [B, V], confidence_logit [B] (``None`` without the head), next state [B, r].
        """
        bias, state = self.markov_bias(previous, hidden, state)
        token, q = sample(base_logits if bias is None else base_logits + bias, noise, temperature)
        return token, q, self.confidence_logit(previous, hidden), state

    def markov_loop(
        self, anchor: Tensor, base_logits: Tensor, hidden: Tensor, noise: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """K slots left to right, each given the token drawn before it.

        Args:
            anchor: [B]. base_logits: [B, K, V]. hidden: [B, K, h].
            noise: [B, K] uniforms in [0, 1), one per slot. temperature: [B]; 0 is argmax.

        Returns:
            tokens [B, K], q [B, K, V], confidence_logits [B, K], survival [B, K] (cumulative product of the
            confidences); the last two are ``None`` without a confidence head.
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
        """The head's correction [B, V] of the base logits, and its next state; ``None`` without a head."""
        w, kind = self.weights, self.config.markov_head_type
        if kind == "none":
            return None, state
        e = embedding(previous, w["markov_head.markov_w1.weight"])  # [B, r]
        if kind == "gated":
            gate = linear(
                torch.cat([hidden, e], dim=-1),
                w["markov_head.gate_proj.weight"],
                w["markov_head.gate_proj.bias"],
            )
            e = sigmoid(gate) * e
        if kind == "rnn":
            z = torch.cat([state, e, hidden], dim=-1)  # [B, 2r+h]
            z = linear(z, w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"])
            update, candidate, output = z.chunk(3, dim=-1)
            state = sigmoid(update) * state + (1 - sigmoid(update)) * torch.tanh(candidate)
            e = torch.tanh(output)
        return linear(e, w["markov_head.markov_w2.weight"]), state

    def confidence_logit(self, previous: Tensor, hidden: Tensor) -> Tensor | None:
        """[B] log-odds that the slot's token is accepted, given that all before it are (equation 7)."""
        if not self.config.confidence_head:
            return None
        x = hidden
        if self.config.confidence_head_with_markov:
            x = torch.cat([hidden, embedding(previous, self.weights["markov_head.markov_w1.weight"])], dim=-1)
        weight, bias = self.weights["confidence_head.proj.weight"], self.weights["confidence_head.proj.bias"]
        return linear(x, weight, bias)[..., 0]

    def _attention(
        self, layer: int, x: Tensor, positions: Tensor, visible: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        config, prefix = self.config, f"layers.{layer}.self_attn"
        n = self._norm(x, f"layers.{layer}.input_layernorm.weight")  # [B, γ, h]
        q = self._heads(self._project(f"{prefix}.q_proj", n), config.num_attention_heads)  # [B, nh, γ, D]
        q = self._rotate(self._norm(q, f"{prefix}.q_norm.weight"), positions)
        k, v = self._keys_values(layer, n, positions)  # [B, Hkv, γ, D]
        group = config.num_attention_heads // config.num_key_value_heads
        k = torch.cat([k_cache, k], dim=2).repeat_interleave(group, dim=1)  # [B, nh, C+γ, D]
        v = torch.cat([v_cache, v], dim=2).repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-1, -2) * config.head_dim**-0.5  # [B, nh, γ, C+γ]
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        mixed = softmax(scores, dim=-1) @ v  # [B, nh, γ, D]
        return self._project(f"{prefix}.o_proj", mixed.transpose(1, 2).flatten(2))

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        w, prefix = self.weights, f"layers.{layer}.mlp"
        m = self._norm(x, f"layers.{layer}.post_attention_layernorm.weight")
        gated = silu(linear(m, w[f"{prefix}.gate_proj.weight"])) * linear(m, w[f"{prefix}.up_proj.weight"])
        return linear(gated, w[f"{prefix}.down_proj.weight"])

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and plain values [B, Hkv, N, D] of rows x [B, N, h]."""
        heads, prefix = self.config.num_key_value_heads, f"layers.{layer}.self_attn"
        k = self._norm(self._heads(self._project(f"{prefix}.k_proj", x), heads), f"{prefix}.k_norm.weight")
        return self._rotate(k, positions), self._heads(self._project(f"{prefix}.v_proj", x), heads)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.config.head_dim).transpose(1, 2)  # [B, heads, N, D]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.weights[name]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [B, heads, N, D], halves rotated against each other, at positions [B, N]."""
        angles = positions[:, None, :, None].float() * self.inverse_frequencies  # [B, 1, N, D/2]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def inverse_frequencies(config: DrafterConfig) -> Tensor:
    """Rotary frequencies [D/2], fp32. At position 8192 one unit in the last place is 5e-4 rad, so the graphs take
    these very numbers."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.rope_theta**exponents


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
    q = torch.where(hot, softmax(logits / torch.where(hot, temperature[:, None], 1.0), dim=-1), one_hot)
    cumulative = q.double().cumsum(dim=-1)
    threshold = noise.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(hot[:, 0], drawn, greedy), q


def reference_from_tensors(config: DrafterConfig, load: Callable[[str], Tensor]) -> ReferenceDrafter:
    """A reference model in fp32 from a loader of canonical tensors, e.g. ``Checkpoint.load``."""
    return ReferenceDrafter(config, {name: load(name).float() for name in tensor_shapes(config)})
