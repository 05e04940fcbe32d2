"""The canonical configuration of a DSpark drafter, whatever layout it was read from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

from .errors import BadInputError
from .rope import Rope

Architecture = Literal["qwen3", "llama", "gemma4"]
MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]
ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "llama", "gemma4")
_MAX_LAYERS = 1024  # of a drafter, and taps of its target: over it no model is known
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What a drafter is: geometry, taps, heads. Checked once, when it is made.

    Raises:
        BadInputError: values that contradict each other; the message lists every fault.
    """

    layout: str  # checkpoint family it was read from, e.g. "deepspec"
    architecture: Architecture  # qwen3; llama: without q/k norms; gemma4: sandwich norms, GELU, scores unscaled
    hidden_size: int  # h
    intermediate_size: int
    num_hidden_layers: int  # L, draft layers
    num_attention_heads: int
    num_key_value_heads: int  # Hkv
    head_dim: int  # D
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # V' as stored: V; fewer rows with a map d2t; or more, where the target's are padded
    block_size: int  # γ: slots of the parallel block
    sample_from_anchor: bool  # True: slot k predicts start+k+1; False: slot k predicts start+k (fill-in)
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # tapped at the OUTPUT of decoder layer id; −1 is the embedding output
    num_target_layers: int | None  # None: the layout does not say
    target_hidden_size: int  # h_t
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    attention_bias: bool
    attention_sinks: bool  # one learned logit per query head in the softmax's denominator
    k_eq_v: bool  # values are the key projection, without a matrix of their own (gemma4)
    layer_windows: tuple[int | None, ...]  # per draft layer: width of its sliding window, None: the whole context
    layer_causal: tuple[bool, ...]  # per draft layer: slots see earlier slots only, or the whole block
    window_moves: bool  # the window starts at slot − W (True), or at anchor − W for every slot (False)
    embed_scale: float
    final_logit_softcapping: float | None  # applied to base logits, before the Markov bias
    logit_scale: float
    markov_head_type: MarkovHeadType
    markov_rank: int  # r; 0 without a Markov head
    confidence_head: bool
    confidence_head_with_markov: bool

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise BadInputError("the configuration contradicts itself: " + "; ".join(faults), faults=faults)

    @property
    def proposals(self) -> int:
        """K, tokens proposed per round: γ, or γ − 1 in the fill-in layout."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def proposal_vocab_size(self) -> int:
        """V', the tokens that a draft may consist of; rows that pad the vocabulary are none."""
        return min(self.draft_vocab_size, self.vocab_size)

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether head rows are draft tokens that the tensor ``d2t`` maps to target ids."""
        return self.draft_vocab_size < self.vocab_size

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

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normed per head, with a weight."""
        return self.architecture != "llama"

    @property
    def attention_scale(self) -> float:
        return 1.0 if self.architecture == "gemma4" else self.head_dim**-0.5

    @property
    def ring(self) -> int | None:
        """Rows of the context that any layer ever sees, where all layers have a window; else None."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_hidden_layers else None

    def to_json(self) -> dict[str, Any]:
        """Canonical names to JSON values, with both γ and the number of proposals."""
        return {**dataclasses.asdict(self), "proposals": self.proposals}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """The inverse of :meth:`to_json`."""
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        lists = {name: tuple(fields[name]) for name in ("target_layer_ids", "layer_windows", "layer_causal")}
        return cls(**{**fields, **lists, "rope": Rope(**fields["rope"])})

    def _faults(self) -> list[str]:
        faults = []
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "draft_vocab_size", "block_size", "target_hidden_size",
            "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                faults.append(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_target_layers is not None and self.num_target_layers < 1:
            faults.append(f"num_target_layers is {self.num_target_layers}, it must be at least 1")
        for name, limit in (("num_hidden_layers", _MAX_LAYERS), ("block_size", 4096), ("num_attention_heads", 65536)):
            if getattr(self, name) > limit:
                faults.append(f"{name} is {getattr(self, name)}, over {limit} no drafter is known")
        if self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            faults.append(f"head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        if self.architecture not in ARCHITECTURES:
            faults.append(f"architecture {self.architecture!r} is none of {', '.join(ARCHITECTURES)}")
        if self.proposals < 1:
            faults.append(f"block_size {self.block_size} leaves no slot that proposes a token")
        if not 0 <= self.mask_token_id < self.vocab_size:
            faults.append(f"mask_token_id {self.mask_token_id} is outside the vocabulary 0..{self.vocab_size - 1}")
        if self.rms_norm_eps <= 0:
            faults.append(f"rms_norm_eps {self.rms_norm_eps} must be positive")
        if self.k_eq_v and self.architecture != "gemma4":
            faults.append("values equal to keys (attention_k_eq_v) are Gemma4's only")
        return faults + self._layer_faults() + self._window_faults() + self._head_faults() + self.rope.faults()

    def _head_faults(self) -> list[str]:
        faults = []
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            faults.append(f"markov_head_type {self.markov_head_type!r} is none of {', '.join(MARKOV_HEAD_TYPES)}")
        if self.markov_rank < 0 or (self.markov_rank > 0) != (self.markov_head_type != "none"):
            faults.append(f"markov_rank {self.markov_rank} does not fit markov_head_type {self.markov_head_type!r}")
        if self.confidence_head_with_markov and not (self.confidence_head and self.markov_rank > 0):
            faults.append("confidence_head_with_markov needs a confidence head and markov_rank > 0")
        cap, scale = self.final_logit_softcapping, self.logit_scale
        if cap is not None and cap <= 0:
            faults.append(f"final_logit_softcapping {cap} must be positive")
        if not (math.isfinite(scale) and scale > 0 and math.isfinite(self.embed_scale) and self.embed_scale > 0):
            faults.append(f"logit_scale {scale} and embed_scale {self.embed_scale} must be positive")
        elif cap is not None and scale != 1:
            faults.append(f"final_logit_softcapping {cap} and logit_scale {scale}: which comes first is not settled")
        return faults

    def _layer_faults(self) -> list[str]:
        ids = self.target_layer_ids
        if not ids or len(ids) > _MAX_LAYERS:
            return [f"target_layer_ids has {len(ids)} entries, it must have 1 to {_MAX_LAYERS}"]
        faults = []
        if any(b <= a for a, b in itertools.pairwise(ids)):
            faults.append(f"target_layer_ids {list(ids)} must be strictly increasing")
        if min(ids) < -1:
            faults.append(f"target_layer_ids {list(ids)} must be -1 (the embedding) or more")
        return faults + (self.tap_faults(self.num_target_layers) if self.num_target_layers else [])

    def tap_faults(self, num_target_layers: int) -> list[str]:
        """What is wrong with the taps on a target of this many layers."""
        ids, last = self.target_layer_ids, num_target_layers - 1
        if max(ids) > last:
            return [f"target_layer_ids {list(ids)} must lie in -1..{last} (num_target_layers {num_target_layers})"]
        if max(ids) == last:
            return [
                f"target_layer_ids {list(ids)} tap the last layer {last}, whose output is recorded before the final "
                "norm by some tools and after it by others"
            ]
        return []

    def _window_faults(self) -> list[str]:
        faults = []
        for name in ("layer_windows", "layer_causal"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                faults.append(
                    f"{name} has {len(getattr(self, name))} entries for num_hidden_layers {self.num_hidden_layers}"
                )
        wrong = [window for window in self.layer_windows if window is not None and window < 1]
        if wrong:
            faults.append(f"layer_windows has a window of {wrong[0]}, it must be at least 1")
        return faults
