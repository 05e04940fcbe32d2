"""Policies: how many tokens of a draft are verified. Pure functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import UsageError


class Policy(Protocol):
    """confidence [R, K] to the number of tokens to verify [R], 0 … K."""

    def lengths(self, confidence: NDArray[Any]) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The first k tokens of every draft, or all of them."""

    k: int | None = None

    def lengths(self, confidence: NDArray[Any]) -> NDArray[np.int64]:
        requests, proposals = confidence.shape
        return np.full(requests, proposals if self.k is None else min(self.k, proposals))


def policy_from_name(name: str) -> Policy:
    """``fixed`` or ``fixed:k``.

    Raises:
        UsageError: no such policy.
    """
    kind, _, value = name.partition(":")
    if kind == "fixed" and (not value or (value.isdecimal() and int(value) >= 1)):
        return Fixed(int(value) if value else None)
    raise UsageError(f"policy {name!r} is not known; give fixed or fixed:k with k of at least 1")
