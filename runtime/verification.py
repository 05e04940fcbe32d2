"""Lossless verification: rejection sampling with residual and bonus (DSpark format sheet C).

Every random choice goes through ``Choices``, so the law of the output can be enumerated exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .sampling import Law, draw


class Choices(Protocol):
    """The random choices of one verification."""

    def accept(self, probability: float) -> bool: ...

    def draw(self, law: Law) -> int: ...


class RandomChoices:
    """Choices from a generator of uniforms."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        return probability >= 1 or self.generator.random() < probability

    def draw(self, law: Law) -> int:
        return draw(law, self.generator.random())


def verify(
    tokens: Sequence[int], q: Sequence[Law], target_law: Callable[[int], Law], choices: Choices
) -> tuple[int, int]:
    """Accept a prefix of the draft and draw the token after it; the outcome has the target's law.

    Args:
        tokens: draft d_0 … d_{ℓ−1}.
        q: for each, the law [V] that it was drawn from.
        target_law: row i to the target's law [V] after i draft tokens; asked for accepted rows and one more.

    Returns:
        number of accepted tokens, and the residual token after a rejection or the bonus token after none.
    """
    for i, token in enumerate(tokens):
        p = target_law(i)
        if not choices.accept(acceptance(p, q[i], token)):
            return i, choices.draw(residual(p, q[i]))
    return len(tokens), choices.draw(target_law(len(tokens)))


def acceptance(p: Law, q: Law, token: int) -> float:
    """min(1, p/q) of the drafted token."""
    return 1.0 if p[token] >= q[token] else float(p[token]) / float(q[token])


def residual(p: Law, q: Law) -> Law:
    """The law max(p − q, 0), normalised; p itself where rounding leaves nothing of it."""
    rest = np.maximum(p - q, 0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p
