"""Losslessness by exact enumeration of the verification code itself: every random choice is followed both ways."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime.sampling import Law, Sampling, law_from_logits, truncated
from dspark.runtime.verification import verify

Outcomes = defaultdict[tuple[int, ...], float]


class Enumerated:
    """Choices that replay a path of outcomes and record where it can branch."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path, self.weight, self.taken = path, 1.0, 0
        self.branches: list[tuple[int, ...]] = []

    def accept(self, probability: float) -> bool:
        return bool(self._take([1 - probability, probability]))

    def draw(self, law: Law) -> int:
        return self._take(list(law))

    def _take(self, weights: list[float]) -> int:
        if self.taken == len(self.path):
            options = [i for i, weight in enumerate(weights) if weight > 0]
            self.branches += [(*self.path, option) for option in options[1:]]
            self.path = (*self.path, options[0])
        choice = self.path[self.taken]
        self.weight *= weights[choice]
        self.taken += 1
        return choice


def enumerate_choices(function: Callable[[Enumerated], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    paths: list[tuple[int, ...]] = [()]
    while paths:
        choices = Enumerated(paths.pop())
        result = function(choices)
        paths += choices.branches
        yield result, choices.weight


def law_of_output(
    p: dict[int, Law], q: dict[int, Law], believed: dict[int, Law], drafts: int, length: int, anchor: int = 0
) -> Outcomes:
    """Law of the first ``length`` tokens: rounds of drafting from q and verifying with ``believed``."""

    def text(choices: Enumerated) -> tuple[int, ...]:
        tokens: list[int] = []
        previous = anchor
        while len(tokens) < length:
            draft: list[int] = []
            for _ in range(min(drafts, length - len(tokens) - 1)):
                draft.append(choices.draw(q[draft[-1] if draft else previous]))
            before = [previous, *draft]
            laws = [believed[token] for token in before[:-1]]
            accepted, token = verify(draft, laws, lambda i, before=before: p[before[i]], choices)
            tokens += [*draft[:accepted], token]
            previous = tokens[-1]
        return tuple(tokens)

    outcomes: Outcomes = defaultdict(float)
    for tokens, weight in enumerate_choices(text):
        outcomes[tokens] += weight
    return outcomes


def target_law(p: dict[int, Law], length: int, anchor: int = 0) -> Outcomes:
    outcomes: Outcomes = defaultdict(float)
    for tokens in itertools.product(range(len(p)), repeat=length):
        outcomes[tokens] = float(np.prod([p[a][b] for a, b in itertools.pairwise((anchor, *tokens))]))
    return outcomes


def total_variation(one: Outcomes, other: Outcomes) -> float:
    return sum(abs(one[tokens] - other[tokens]) for tokens in {*one, *other}) / 2


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
