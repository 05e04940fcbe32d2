"""Losslessness by exact enumeration of the verification code itself: every random choice is followed both ways."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from enumeration import Outcomes, law_of_output, target_law, total_variation

from dspark.runtime.sampling import Law, Sampling, law_from_logits, truncated


def random_laws(seed: int, vocab: int = 3) -> dict[int, Law]:
    random = np.random.default_rng(seed)
    return {i: random.dirichlet(np.ones(vocab)) for i in range(vocab)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_the_first_three_tokens_have_the_targets_law(seed: int, drafts: int) -> None:
    p, q = random_laws(seed), random_laws(seed + 100)
    assert total_variation(law_of_output(p, q, q, drafts, 3), target_law(p, 3)) < 1e-12


@pytest.mark.parametrize("kind", ["one-hot q", "one-hot p", "both one-hot", "q equals p", "disjoint"])
def test_extreme_laws_are_lossless_too(kind: str) -> None:
    one_hot = {i: np.eye(3)[(i + 1) % 3] for i in range(3)}
    p, q = random_laws(1), random_laws(2)
    p, q = {
        "one-hot q": (p, one_hot),
        "one-hot p": (one_hot, q),
        "both one-hot": (one_hot, {i: np.eye(3)[i] for i in range(3)}),
        "q equals p": (p, p),
        "disjoint": (
            {i: np.array([0.5, 0.5, 0.0]) for i in range(3)},
            {i: np.array([0.0, 0.0, 1.0]) for i in range(3)},
        ),
    }[kind]
    assert total_variation(law_of_output(p, q, q, 2, 3), target_law(p, 3)) < 1e-12


def test_published_laws(shared: Path) -> None:
    """The laws and the exact target law of golden/lossless, for 2 and 3 drafts."""
    data = json.loads((shared / "golden" / "lossless" / "expected.json").read_text())
    p, q = ({int(k): np.array(v) for k, v in data[name].items()} for name in ("p", "q"))
    for name, case in data["cases"].items():
        drafts = int(name.partition("=")[2])
        wanted: Outcomes = defaultdict(float)
        wanted.update({tuple(map(int, text)): weight for text, weight in case["target"].items()})
        found = law_of_output(p, q, q, drafts, len(next(iter(case["target"]))))
        assert total_variation(found, wanted) < 1e-12


def test_a_wrong_q_is_seen() -> None:
    """Negative control: verifying with another law than the one drawn from bends the output's law."""
    p, q, wrong = random_laws(3), random_laws(4), random_laws(5)
    assert total_variation(law_of_output(p, q, wrong, 2, 3), target_law(p, 3)) > 0.01


def test_truncation_keeps_the_truncated_targets_law() -> None:
    """top-k and top-p on both sides: the output has the law of the truncated target."""
    sampling = Sampling(temperature=1.0, top_k=3, top_p=0.8)
    p = {i: truncated(law, sampling) for i, law in random_laws(6, 4).items()}
    q = {i: truncated(law, sampling) for i, law in random_laws(7, 4).items()}
    assert any((law == 0).any() for law in p.values())
    assert total_variation(law_of_output(p, q, q, 2, 3), target_law(p, 3)) < 1e-12


def test_laws_from_logits() -> None:
    logits = np.array([1.0, 3.0, 3.0, -1.0], np.float32)
    assert law_from_logits(logits, Sampling()).tolist() == [0, 1, 0, 0]
    warm = law_from_logits(logits, Sampling(temperature=2.0))
    np.testing.assert_allclose(warm, np.exp(logits / 2) / np.exp(logits / 2).sum())
    assert np.flatnonzero(law_from_logits(logits, Sampling(temperature=1, top_k=1))).tolist() == [1]
    nucleus = law_from_logits(logits, Sampling(temperature=1, top_p=0.9))
    assert np.flatnonzero(nucleus).tolist() == [1, 2]
    assert nucleus.sum() == pytest.approx(1)
