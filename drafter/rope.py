"""Rotary embedding: the kinds that drafters use, and their frequencies.

Sources: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071, §3.2 and §3.4), Llama 3.1's scaling as Hugging Face
transformers computes it, Gemma4's "proportional" kind, which leaves the slow pairs unrotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "yarn", "llama3", "proportional"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding; what a kind does not use keeps its default."""

    theta: float
    kind: RopeKind = "default"
    partial_rotary_factor: float = 1.0  # share of the head that is rotated
    interleaved: bool = False  # pairs are neighbours (GPT-J), not the halves of the head (NeoX)
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def rotary_dim(self, head_dim: int) -> int:
        """Leading entries of a head that are rotated; the others pass."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def faults(self) -> list[str]:
        faults = []
        if self.kind not in KINDS:
            faults.append(f"rope_type {self.kind!r} is none of {', '.join(KINDS)}")
        if not 0 < self.theta < 1e30:
            faults.append(f"rope_theta {self.theta} must be positive")
        if not 0 < self.partial_rotary_factor <= 1:
            faults.append(f"partial_rotary_factor {self.partial_rotary_factor} must be over 0 and at most 1")
        if self.factor < 1 or self.attention_factor <= 0:
            faults.append(f"rope factor {self.factor} must be at least 1, attention_factor {self.attention_factor} > 0")
        if self.kind in ("yarn", "llama3") and self.original_max_position_embeddings < 1:
            faults.append(f"rope_type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "yarn" and not self.beta_fast > self.beta_slow > 0:
            faults.append(f"yarn needs beta_fast {self.beta_fast} over beta_slow {self.beta_slow} over 0")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            faults.append(
                f"llama3 needs high_freq_factor {self.high_freq_factor} over low_freq_factor {self.low_freq_factor}"
            )
        return faults

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """[rotary_dim/2] fp32: angle per position of each rotated pair; 0 leaves a pair as it is.

        At position 8192 one unit in the last place is 5e-4 rad, so model and graphs take these very numbers.
        """
        size = self.rotary_dim(head_dim)
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        frequencies: NDArray[np.float32] = np.float32(1.0) / np.power(np.float32(self.theta), exponents)
        match self.kind:
            case "linear":
                frequencies /= np.float32(self.factor)
            case "proportional":
                frequencies[int(self.partial_rotary_factor * size // 2) :] = 0
                frequencies /= np.float32(self.factor)
            case "yarn":
                frequencies = self._yarn(frequencies, size)
            case "llama3":
                frequencies = self._llama3(frequencies)
        return frequencies

    def _yarn(self, plain: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        def dimension(turns: float) -> float:
            """The pair that turns this often within the original context."""
            per_turn = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return size * math.log(per_turn) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
        interpolated = np.clip(ramp, 0, 1)
        mixed: NDArray[np.float32] = plain / np.float32(self.factor) * interpolated + plain * (1 - interpolated)
        return mixed

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        wavelength = 2 * np.float32(math.pi) / plain
        original = self.original_max_position_embeddings
        slow, fast = original / self.low_freq_factor, original / self.high_freq_factor
        scaled = plain / np.float32(self.factor)
        smooth = (original / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - smooth) * scaled + smooth * plain
        result = np.where(wavelength > slow, scaled, np.where(wavelength < fast, plain, between))
        return result.astype(np.float32)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What YaRN multiplies cos and sin by where the configuration does not say (arXiv 2309.00071 §3.4)."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
