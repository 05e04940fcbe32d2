"""The exact law of what verification puts out: every random choice is followed both ways."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from dspark.runtime.sampling import Law
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
    p: dict[int, Law],
    q: dict[int, Law],
    believed: dict[int, Law],
    drafts: int,
    length: int,
    anchor: int = 0,
    verified: Callable[[list[int]], int] = len,
) -> Outcomes:
    """Law of the first ``length`` tokens: rounds of drafting from q and verifying with ``believed``.

    Args:
        verified: how many tokens of a draft are verified.
    """

    def text(choices: Enumerated) -> tuple[int, ...]:
        tokens: list[int] = []
        previous = anchor
        while len(tokens) < length:
            draft: list[int] = []
            for _ in range(min(drafts, length - len(tokens) - 1)):
                draft.append(choices.draw(q[draft[-1] if draft else previous]))
            draft = draft[: verified(draft)]
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
