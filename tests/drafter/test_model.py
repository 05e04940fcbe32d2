"""The reference model against DeepSpec's own numbers (golden/deepspec, commit afdfa7c)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden import CASES, Golden, load_golden

from dspark.drafter import parameters
from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors, sample
from dspark.drafter.parameters import Parameters
from dspark.drafter.tensors import tensor_shapes


@pytest.mark.parametrize("case", CASES)
def test_matches_deepspec(shared: Path, case: str) -> None:
    golden = load_golden(shared / "golden" / "deepspec" / case)
    checkpoint = open_checkpoint(golden.folder)
    model = reference_from_tensors(checkpoint.config, checkpoint.load)
    for found, wanted, name in _rounds(model, golden):
        error = float((found - wanted).abs().max() / wanted.abs().max())
        assert error < 1e-5, f"{name}: {error}"


def _rounds(model: ReferenceDrafter, golden: Golden):  # type: ignore[no-untyped-def]
    config = model.config
    shape = (config.num_hidden_layers, 1, config.num_key_value_heads, 64, config.head_dim)
    k, v = torch.zeros(shape), torch.zeros(shape)
    for r in golden.rounds:
        first, last = r.feature_positions
        k[..., first:last, :], v[..., first:last, :] = model.context(
            r.tensor("features")[None], torch.arange(first, last)[None]
        )
        base, hidden = model.block(torch.tensor([r.anchor]), torch.tensor([r.start]), k, v)
        yield base[0], r.tensor("base_logits"), "base_logits"
        yield hidden[0], r.tensor("hidden"), "hidden"
        state, logits, confidence = torch.zeros(1, config.markov_rank), [], []
        for slot, previous in enumerate(r.tensor("previous")):
            bias, state = model.markov_bias(previous[None], hidden[:, slot], state)
            logits.append(base[:, slot] if bias is None else base[:, slot] + bias)
            confidence.append(model.confidence_logit(previous[None], hidden[:, slot]))
        yield torch.cat(logits), r.tensor("logits"), "logits"
        if config.confidence_head:
            yield torch.cat(confidence), r.tensor("confidence_logits"), "confidence_logits"


def test_sample_is_greedy_at_temperature_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    token, q = sample(logits, torch.tensor([0.99, 0.0]), torch.tensor([0.0, 1.0]))
    assert token.tolist() == [1, 0]
    assert q[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(q[1], torch.softmax(logits[1], dim=0))


def test_streamed_weights_give_the_same(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter over the limit is read again for every product, some rows at a time."""
    checkpoint = open_checkpoint(checkpoint_folder)
    config, shapes = checkpoint.config, tensor_shapes(checkpoint.config)
    features, positions = torch.randn(2, 3, config.feature_size), torch.arange(3).expand(2, 3)
    anchor, length = torch.tensor([1, 7]), torch.tensor([3, 3])
    loads: list[tuple[str, Any]] = []

    def load(name: str, rows: Any = None) -> torch.Tensor:
        loads.append((name, rows))
        return checkpoint.load(name, rows)

    def outputs(held_bytes: int) -> list[torch.Tensor]:
        model = ReferenceDrafter(config, Parameters(load, shapes, held_bytes))
        k, v = model.context(features, positions)
        base, hidden = model.block(anchor, length, k, v)
        bias, _ = model.markov_bias(anchor, hidden[:, 0], torch.zeros(2, config.markov_rank))
        assert bias is not None
        return [k, v, base, hidden, bias]

    whole = outputs(held_bytes=1 << 30)
    monkeypatch.setattr(parameters, "_ALWAYS_HELD", 0)
    monkeypatch.setattr(parameters, "_PIECE_BYTES", 4 * config.hidden_size * 7)  # 7 rows: divides no table
    for found, wanted in zip(outputs(held_bytes=0), whole, strict=True):
        torch.testing.assert_close(found, wanted)
    assert ("lm_head.weight", slice(7, 14)) in loads


def test_the_law_of_a_large_vocabulary_sums_to_one() -> None:
    """One token that holds most of the mass, and 49,151 that share the rest: a plain fp32 sum loses those."""
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(3)) * 2
    logits[0, 5] = logits.max() + 8
    _, q = sample(logits, torch.tensor([0.5]), torch.ones(1))
    assert abs(float(q.double().sum()) - 1) < 5e-7
