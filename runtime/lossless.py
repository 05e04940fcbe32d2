"""Where two greedy texts part, and whether the target itself is of two minds there."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.drafter.errors import CheckFailedError

from .generation import Generation, Request
from .target import Target

NEAR_TIE = 1e-4  # gap of two logits that another order of fp32 sums may close
_SLOT = 1


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token that differs, and the gap of the two tokens' logits there."""

    place: int
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def parting(target: Target, request: Request, plain: Generation, fast: Generation) -> Parting | None:
    """Where a greedy text leaves that of plain decoding; ``None`` where they are equal.

    Raises:
        CheckFailedError: one text is a beginning of the other.
    """
    if plain.token_ids == fast.token_ids:
        return None
    pairs = zip(plain.token_ids, fast.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        raise CheckFailedError(
            "a speculative text and plain decoding's end at different lengths, one the beginning of the other"
        )
    logits = target.prefill(_SLOT, request.prompt_ids + plain.token_ids[:place]).logits[-1]
    target.release(_SLOT)
    return Parting(place, abs(float(logits[plain.token_ids[place]] - logits[fast.token_ids[place]])))
