"""What the runtime needs of a target: a language model that keeps a cache per slot and verifies drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do, as data."""

    vocab_size: int
    max_tokens: int  # longest sequence, prompt included
    stop_ids: tuple[int, ...]
    features: bool  # whether rows carry the tapped hidden states


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward pass gives for each row asked for."""

    logits: NDArray[np.float32]  # [T, V]
    features: NDArray[np.float32] | None  # [T, F·h_t]; of every prompt row after a prefill


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of several requests, flattened; request r owns rows cumulative[r] … cumulative[r+1] − 1."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T], absolute
    cumulative: NDArray[np.int64]  # [R+1]
    slots: tuple[int, ...]  # [R]

    @classmethod
    def of(cls, requests: dict[int, tuple[int, list[int]]]) -> RaggedBatch:
        """From slot to (position of the first row, tokens)."""
        tokens = [token for _, row in requests.values() for token in row]
        positions = [start + i for start, row in requests.values() for i in range(len(row))]
        lengths = [len(row) for _, row in requests.values()]
        return cls(
            np.array(tokens, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            tuple(requests),
        )


class Target(Protocol):
    """A causal language model behind a cache per slot."""

    capabilities: Capabilities

    def prefill(self, slot: int, token_ids: list[int]) -> Rows:
        """Start a sequence: logits [1, V] of its last row, features of every row."""

    def verify(self, batch: RaggedBatch) -> Rows:
        """Logits and features of every row; the cache grows by all of them."""

    def commit(self, slot: int, accepted: int) -> None:
        """Keep the first ``accepted`` + 1 rows of the slot's last verification, drop the others."""

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""


class ChatTokenizer(Protocol):
    """Text to ids by the target's own template, and back as a stream."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def stream(self) -> Any: ...
