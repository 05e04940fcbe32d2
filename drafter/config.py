"""The canonical configuration of a DSpark drafter, whatever layout it was read from."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal

from .errors import BadInputError

MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What a drafter is: geometry, taps, heads. Checked once, when it is made.

    Raises:
        BadInputError: values that contradict each other; the message lists every fault.
    """

    layout: str  # checkpoint family it was read from, e.g. "deepspec"
    hidden_size: int  # h
    intermediate_size: int
    num_hidden_layers: int  # L, draft layers
    num_attention_heads: int
    num_key_value_heads: int  # Hkv
    head_dim: int  # D
    vocab_size: int  # V, the target's
    block_size: int  # γ: slots of the parallel block
    sample_from_anchor: bool  # True: slot k predicts start+k+1; False: slot k predicts start+k (fill-in)
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # tapped at the OUTPUT of decoder layer id; −1 is the embedding output
    num_target_layers: int
    target_hidden_size: int  # h_t
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool
    markov_head_type: MarkovHeadType
    markov_rank: int  # r; 0 without a Markov head
    confidence_head: bool
    confidence_head_with_markov: bool

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise BadInputError("the drafter's configuration contradicts itself: " + "; ".join(faults), faults=faults)

    @property
    def proposals(self) -> int:
        """K, tokens proposed per round: γ, or γ − 1 in the fill-in layout."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def feature_size(self) -> int:
        """F·h_t, the width of one context feature row."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Canonical names to JSON values, with both γ and the number of proposals."""
        return {**dataclasses.asdict(self), "proposals": self.proposals}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """The inverse of :meth:`to_json`."""
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "target_layer_ids": tuple(fields["target_layer_ids"])})

    def _faults(self) -> list[str]:
        faults = []
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "block_size", "num_target_layers", "target_hidden_size",
            "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                faults.append(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            faults.append(f"head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        if self.proposals < 1:
            faults.append(f"block_size {self.block_size} leaves no slot that proposes a token")
        if not 0 <= self.mask_token_id < self.vocab_size:
            faults.append(f"mask_token_id {self.mask_token_id} is outside the vocabulary 0..{self.vocab_size - 1}")
        faults += self._layer_faults()
        if self.rms_norm_eps <= 0 or self.rope_theta <= 0:
            faults.append(f"rms_norm_eps {self.rms_norm_eps} and rope_theta {self.rope_theta} must be positive")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            faults.append(f"markov_head_type {self.markov_head_type!r} is none of {', '.join(MARKOV_HEAD_TYPES)}")
        if (self.markov_rank > 0) != (self.markov_head_type != "none"):
            faults.append(f"markov_rank {self.markov_rank} does not fit markov_head_type {self.markov_head_type!r}")
        if self.confidence_head_with_markov and not (self.confidence_head and self.markov_rank > 0):
            faults.append("confidence_head_with_markov needs a confidence head and markov_rank > 0")
        return faults

    def _layer_faults(self) -> list[str]:
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        if not ids:
            return ["target_layer_ids is empty"]
        faults = []
        if any(b <= a for a, b in itertools.pairwise(ids)):
            faults.append(f"target_layer_ids {list(ids)} must be strictly increasing")
        if ids[0] < -1 or ids[-1] > last:
            faults.append(f"target_layer_ids {list(ids)} must lie in -1..{last} (num_target_layers {last + 1})")
        elif ids[-1] == last:
            faults.append(
                f"target_layer_ids {list(ids)} tap the last layer {last}, whose output is recorded before the final "
                "norm by some tools and after it by others"
            )
        return faults
