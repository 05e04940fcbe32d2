"""A drafter whose acceptance is chosen: it knows the text, and errs where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.engines.backend import Backend
from dspark.export.bundle import Bundle
from dspark.runtime.drafting import Draft, Drafting


class Scripted(Drafting):
    """A drafter that knows the plain text, and errs where it is told to: acceptance of every length."""

    def __init__(self, bundle: Bundle, backend: Backend, text: list[int], prompt: int, accept: Callable[[int], int]):
        super().__init__(bundle, backend)
        self.text, self.prompt, self.accept, self.round = text, prompt, accept, 0

    def draft(self, anchors: Mapping[int, int], noise: Any, sampling: Any) -> Draft:
        draft = super().draft(anchors, noise, sampling)
        start = int(self.length[0])  # the anchor's position: cached rows + pending = start
        done = start - self.prompt + 1
        assert self.text[done - 1] == anchors[0], "the anchor is the last committed token"
        tokens = np.zeros_like(draft.tokens)
        right = self.text[done : done + tokens.shape[1]]
        tokens[0, : len(right)] = right
        wrong = self.accept(self.round)
        if wrong < tokens.shape[1]:
            tokens[0, wrong] = (tokens[0, wrong] + 1) % 131
        self.round += 1
        q: NDArray[np.float32] = np.eye(131, dtype=np.float32)[tokens]
        return Draft(tokens, q, draft.confidence_logits)
