"""Golden rounds of drafting, as ``../shared/golden/README.md`` lays them out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CASES = (
    "qwen3-vanilla",
    "qwen3-gated",
    "qwen3-rnn",
    "qwen3-dflash",
    "qwen3-vanilla-noconf",
    "qwen3-conf-without-markov",
    "gemma4-k-eq-v",
    "gemma4-separate-v",
)


# Layouts of the weights of deepspec/qwen3-vanilla; each README or about.json says which of its values apply.
FORMATS = (
    "modelopt",
    "specforge",
    "specforge-legacy-prefix",
    "speculators-anchor-first",
    "speculators-fill-in",
    "speculators-reduced-vocabulary",
    "zlab-dflash",
)


@dataclass(frozen=True)
class Round:
    number: int
    start: int
    anchor: int
    feature_positions: tuple[int, int]
    tensors: dict[str, torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[f"round{self.number}.{name}"]


@dataclass(frozen=True)
class Golden:
    folder: Path
    rounds: tuple[Round, ...]


def load_golden(folder: Path) -> Golden:
    data: dict[str, Any] = json.loads((folder / "golden.json").read_text())
    tensors = load_file(folder / "golden.safetensors")
    rounds = (
        Round(r["round"], r["start"], r["anchor"], tuple(r["feature_positions"]), tensors) for r in data["rounds"]
    )
    return Golden(folder, tuple(rounds))
