"""The law that tokens are drawn from: temperature, top-k, top-p; and drawing from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import UsageError

Law = NDArray[Any]  # [V], non-negative, sums to 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled. Checked once, when it is made.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # 1: all tokens
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature {self.temperature} must be between 0 and 100")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} must be over 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed} must be between 0 and 2^63 - 1")

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p leaves tokens out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def law_from_logits(logits: NDArray[Any], sampling: Sampling) -> Law:
    """The law [V] of the next token, float64, of logits [V]; one-hot at temperature 0."""
    if sampling.temperature == 0:
        law = np.zeros(logits.shape[-1])
        law[int(logits.argmax())] = 1.0
        return law
    scaled = logits.astype(np.float64) / sampling.temperature
    law = np.exp(scaled - scaled.max())
    return truncated(law / law.sum(), sampling)


def truncated(law: Law, sampling: Sampling) -> Law:
    """``law`` restricted to its top-k tokens, then to the smallest set that holds top-p of what is left."""
    if not sampling.truncates:
        return law
    order = np.argsort(-law, kind="stable")  # ties by token id
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        mass = law[order].cumsum(dtype=np.float64)
        order = order[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    kept = np.zeros_like(law)
    kept[order] = law[order]
    normalised: Law = kept / kept.sum()
    return normalised


def draw(law: Law, noise: float) -> int:
    """The token whose interval of the cumulative law holds ``noise`` in [0, 1); never one without mass."""
    cumulative = law.cumsum(dtype=np.float64)
    token = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(law)[-1]))
