"""Windows, causality, sinks and rope against a literal reading of their definitions: one slot, one key at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from drafters import make_config, random_tensors

from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import ReferenceDrafter
from dspark.drafter.parameters import held
from dspark.drafter.rope import Rope
from dspark.export.contract import cache_rows

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "llama": {"architecture": "llama"},
    "sinks": {"attention_sinks": True},
    "bias": {"attention_bias": True},
    "interleaved": {"rope": Rope(theta=100.0, interleaved=True)},
    "partial": {"rope": Rope(theta=100.0, partial_rotary_factor=0.5)},
    "yarn": {
        "rope": Rope(theta=100.0, kind="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.138)
    },
    "anchored window": {"layer_windows": (7, 7), "layer_causal": (True, True)},
    "anchored, both ways": {"layer_windows": (7, 7)},
    "moving window": {"layer_windows": (7, 7), "layer_causal": (True, True), "window_moves": True},
    "moving, narrower than the block": {"layer_windows": (3, 3), "window_moves": True},
    "one layer of two": {"layer_windows": (None, 7), "layer_causal": (False, True), "window_moves": True},
}


@pytest.mark.parametrize("start", [0, 3, 20])
@pytest.mark.parametrize("case", CASES)
def test_block_is_what_the_definitions_say(case: str, start: int) -> None:
    config = make_config("specforge", **CASES[case])
    weights = {name: tensor.double() for name, tensor in random_tensors(config).items()}
    model = ReferenceDrafter(config, held({name: tensor.float() for name, tensor in weights.items()}))
    features = torch.randn(1, start, config.feature_size, generator=torch.Generator().manual_seed(1))
    capacity = config.ring or 32
    shape = (config.num_hidden_layers, 1, config.num_key_value_heads, capacity, config.head_dim)
    k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
    for position in range(start):  # row by row, as a runtime would
        k, v = model.context(features[:, position : position + 1], torch.tensor([[position]]))
        into, new = cache_rows(position, 1, capacity)
        k_cache[..., into, :], v_cache[..., into, :] = k[..., new, :], v[..., new, :]
    base, hidden = model.block(torch.tensor([5]), torch.tensor([start]), k_cache, v_cache)
    literal = _literal_hidden(config, weights, features[0].double(), start, 5)
    torch.testing.assert_close(hidden[0].double(), literal, rtol=0, atol=2e-5)
    torch.testing.assert_close(base[0].double(), literal @ weights["lm_head.weight"].T, rtol=0, atol=1e-4)


def _literal_hidden(
    config: DrafterConfig, w: dict[str, torch.Tensor], features: torch.Tensor, start: int, anchor: int
) -> torch.Tensor:
    """[γ, h] in float64: every query meets every key, and a rule says whether it may."""
    tokens = [anchor] + [config.mask_token_id] * (config.block_size - 1)
    x = w["embed_tokens.weight"][tokens]
    g = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], config)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        n = _norm(x, w[prefix + "input_layernorm.weight"], config)
        keys = [(p, g[p], False) for p in range(start)] + [(start + j, n[j], True) for j in range(config.block_size)]
        rows = [_attend(config, w, layer, n[j], start, j, keys) for j in range(config.block_size)]
        x = x + torch.stack(rows)
        m = _norm(x, w[prefix + "post_attention_layernorm.weight"], config)
        gate, up = (m @ w[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], config)


def _attend(
    config: DrafterConfig, w: dict[str, torch.Tensor], layer: int, n: torch.Tensor, start: int, slot: int, keys: Any
) -> torch.Tensor:
    attn, out = f"layers.{layer}.self_attn.", []
    group = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        q = _head(config, w, attn + "q", n, head, start + slot)
        scores, values = [], []
        for position, row, in_block in keys:
            if _sees(config, layer, start, slot, position, in_block):
                k = _head(config, w, attn + "k", row, head // group, position)
                scores.append(float(q @ k) / math.sqrt(config.head_dim))
                values.append(_head(config, w, attn + "v", row, head // group, None))
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(float(w[attn + "sinks"][head])) if config.attention_sinks else 0.0)
        out.append(sum(weight / total * value for weight, value in zip(weights, values, strict=True)))
    mixed = w[attn + "o_proj.weight"] @ torch.cat(out)
    return mixed + w[attn + "o_proj.bias"] if config.attention_bias else mixed


def _sees(config: DrafterConfig, layer: int, start: int, slot: int, position: int, in_block: bool) -> bool:
    window, query = config.layer_windows[layer], start + slot
    if in_block and config.layer_causal[layer] and position > query:
        return False
    if window is None:
        return True
    if config.window_moves:
        return query - position < window
    return in_block or position >= start - window


def _head(
    config: DrafterConfig, w: dict[str, torch.Tensor], name: str, row: torch.Tensor, head: int, position: int | None
) -> torch.Tensor:
    """One head's projection of a row, normed and rotated unless it is a value."""
    span = slice(head * config.head_dim, (head + 1) * config.head_dim)
    x = w[f"{name}_proj.weight"][span] @ row
    if config.attention_bias:
        x = x + w[f"{name}_proj.bias"][span]
    if position is None:
        return x
    if config.architecture != "llama":
        x = _norm(x, w[f"{name}_norm.weight"], config)
    rope, size = config.rope, config.rope.rotary_dim(config.head_dim)
    turned = x.clone()
    for pair, frequency in enumerate(rope.inverse_frequencies(config.head_dim)):
        first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + size // 2)
        angle = float(frequency) * position
        cos, sin = math.cos(angle) * rope.attention_factor, math.sin(angle) * rope.attention_factor
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[second] * cos + x[first] * sin
    return turned


def _norm(x: torch.Tensor, weight: torch.Tensor, config: DrafterConfig) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0}),
        ("yarn", {"factor": 8.0, "original_max_position_embeddings": 128, "truncate": False}),
        (
            "llama3",
            {
                "factor": 8.0,
                "original_max_position_embeddings": 512,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ],
)
def test_frequencies_are_the_library_s(kind: str, parameters: dict[str, Any]) -> None:
    """Against transformers' own functions, for the kinds that they know."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_parameters = {"rope_type": kind, "rope_theta": 5000.0, **parameters}
    library = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=1024,
        rope_parameters=rope_parameters,
    )  # fmt: skip
    rope = Rope(theta=5000.0, kind=kind, **parameters)  # type: ignore[arg-type]
    found = torch.from_numpy(rope.inverse_frequencies(64))
    if kind == "default":
        wanted, factor = 5000.0 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](library, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    if kind == "yarn":
        from dspark.drafter.rope import yarn_attention_factor

        assert yarn_attention_factor(parameters["factor"], None, None) == pytest.approx(factor)


def test_rotated_pairs_are_orthogonal_to_nothing_else() -> None:
    """A partial rotary factor leaves the rest of a head as it is."""
    rope = Rope(theta=100.0, partial_rotary_factor=0.5)
    assert rope.rotary_dim(16) == 8
    assert len(rope.inverse_frequencies(16)) == 4


def test_every_window_case_is_a_case_of_its_own() -> None:
    """Each rule changes the block, so that none of the cases above passes by accident."""
    outputs = {}
    for case, overrides in CASES.items():
        config = make_config("specforge", **overrides)
        weights = {name: tensor.double() for name, tensor in random_tensors(config).items()}
        features = torch.randn(20, config.feature_size, generator=torch.Generator().manual_seed(1)).double()
        outputs[case] = _literal_hidden(config, weights, features, 20, 5)
    for first, second in itertools.combinations(outputs, 2):
        assert (outputs[first] - outputs[second]).abs().max() > 1e-3, (first, second)
