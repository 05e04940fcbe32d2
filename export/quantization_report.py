"""What a quantised bundle says of itself: bytes, cost and acceptance length, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.drafter.errors import CheckFailedError

from .bundle import Bundle
from .parity import ParityReport
from .quantization import Quantization

OVERALL = "all"
MAX_TAU_LOSS = 0.05


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy decoding of some prompts with the drafter before and after quantisation.

    ``equal`` counts the prompts that plain decoding and both drafters answer with the same text; ``near_ties`` those
    whose texts part where two logits of the target are equal to rounding, which is no fault of a drafter.
    """

    domain: str
    prompts: int
    before: float  # τ: tokens committed per round
    after: float
    rounds_before: int
    rounds_after: int
    equal: int
    near_ties: int

    @property
    def loss(self) -> float:
        """Share of τ that is lost; negative where it grew."""
        return 1 - self.after / self.before if self.before else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "prompts": self.prompts,
            "before": self.before,
            "after": self.after,
            "loss": self.loss,
            "rounds_before": self.rounds_before,
            "rounds_after": self.rounds_after,
            "equal_to_plain": self.equal,
            "near_ties": self.near_ties,
        }


@dataclass(frozen=True, slots=True)
class AcceptanceTrial:
    """How acceptance is measured, and how much of it may go.

    ``measure`` decodes with the bundle before and after quantisation and gives all prompts first, then each domain.
    """

    measure: Callable[[Bundle, Bundle], Sequence[Acceptance]]
    max_loss: float = MAX_TAU_LOSS  # share of τ over all prompts


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The record ``quantization`` of a manifest."""

    how: Quantization
    tensors: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    before: ParityReport
    after: ParityReport
    acceptance: tuple[Acceptance, ...]
    max_loss: float

    def require(self) -> None:
        """Raises ``CheckFailedError`` where more of τ went than is allowed."""
        overall = self.acceptance[0]
        if overall.loss > self.max_loss:
            raise CheckFailedError(
                f"{self.how} takes acceptance length τ from {overall.before:.3f} to {overall.after:.3f}, "
                f"{overall.loss:.1%} less; {self.max_loss:.1%} may go (--max-tau-loss)",
                quantization=self.to_json(),
            )

    def to_json(self) -> dict[str, Any]:
        return {
            **self.how.to_json(),
            "tensors": list(self.tensors),
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "max_tau_loss": self.max_loss,
            "tau": [row.to_json() for row in self.acceptance],
            "cost": [row.to_json() for row in self.after.costs],
            "parity_before": self.before.to_json(),
        }
