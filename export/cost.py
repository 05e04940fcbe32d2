"""What quantised weights cost: the reference with them against the reference without, over the rounds of parity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class CostRow:
    """One output over all rounds, for which ``agreement`` is the share of equal token ids."""

    graph: str
    output: str
    rounds: int
    max_abs: float | None = None  # largest difference
    rms: float | None = None  # of the difference
    magnitude: float | None = None  # root mean square of the output without quantisation
    agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass
class _Sums:
    rounds: int = 0
    largest: float = 0.0
    squares: float = 0.0  # of the difference
    energy: float = 0.0  # of the output
    equal: int = 0
    count: int = 0


@dataclass
class Costs:
    """Collects differences by graph and output."""

    sums: dict[tuple[str, str], _Sums] = field(default_factory=dict)

    def values(self, graph: str, output: str, before: torch.Tensor, after: torch.Tensor) -> None:
        sums, difference = self._entry(graph, output), after - before
        sums.largest = max(sums.largest, float(difference.abs().max()))
        sums.squares += float(difference.double().square().sum())
        sums.energy += float(before.double().square().sum())
        sums.count += before.numel()

    def ids(self, graph: str, output: str, before: torch.Tensor, after: torch.Tensor) -> None:
        sums = self._entry(graph, output)
        sums.equal += int((before == after).sum())
        sums.count += before.numel()

    def rows(self) -> Iterator[CostRow]:
        for (graph, output), s in self.sums.items():
            if s.energy or s.squares:
                rms, magnitude = math.sqrt(s.squares / s.count), math.sqrt(s.energy / s.count)
                yield CostRow(graph, output, s.rounds, s.largest, rms, magnitude)
            else:
                yield CostRow(graph, output, s.rounds, agreement=s.equal / s.count)

    def _entry(self, graph: str, output: str) -> _Sums:
        sums = self.sums.setdefault((graph, output), _Sums())
        sums.rounds += 1
        return sums
