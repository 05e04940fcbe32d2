"""One request: draft → schedule → verify → commit, until a stop token, a limit, or the end of the context.

Plain decoding is the same loop without a drafter, so both ways are compared on one path.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dspark.drafter.errors import BadInputError, UsageError

from .drafting import Draft, Drafting
from .sampling import Law, Sampling, law_from_logits
from .scheduler import Fixed, Policy
from .target import RaggedBatch, Rows, Target
from .verification import RandomChoices, verify

StopReason = Literal["stop", "length", "capacity"]
_SLOT = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it.

    Raises:
        BadInputError: the prompt is empty. UsageError: no token is asked for.
    """

    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] | None = None  # None: the target's own

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise BadInputError("the prompt is empty")
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens {self.max_new_tokens} must be at least 1")


@dataclass(slots=True)
class Generation:
    """What came of a request. Figures follow dspark format sheet C: the bonus token counts."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason = "length"
    proposed: list[int] = field(default_factory=list)  # per round, tokens sent to verification
    accepted: list[int] = field(default_factory=list)  # per round
    committed: list[int] = field(default_factory=list)  # per round, bonus or residual token included
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def rounds(self) -> int:
        return len(self.committed)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per round; the first token, which comes from the prompt, is not counted."""
        return sum(self.committed) / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the rounds that proposed k+1 or more tokens in which token k was accepted (prefix survival)."""
        survival = []
        for k in range(max(self.proposed, default=0)):
            accepted = [a > k for a, p in zip(self.accepted, self.proposed, strict=True) if p > k]
            survival.append(sum(accepted) / len(accepted))
        return survival

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.seconds["total"] - self.seconds["prefill"]

    @property
    def tokens_per_second(self) -> float:
        """Decoding only: tokens after the first over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_seconds if len(self.token_ids) > 1 else 0.0


def generate(
    target: Target,
    drafting: Drafting | None,
    request: Request,
    policy: Policy | None = None,
    on_tokens: Callable[[list[int]], None] = lambda tokens: None,
) -> Generation:
    """Answer one request; without ``drafting`` by plain decoding.

    Args:
        on_tokens: called with tokens as soon as they are committed.

    Raises:
        BadInputError: the prompt leaves no room in the context of target or drafter.
    """
    return _Session(target, drafting, request, policy or Fixed(), on_tokens).run()


class _Session:
    def __init__(
        self,
        target: Target,
        drafting: Drafting | None,
        request: Request,
        policy: Policy,
        on_tokens: Callable[[list[int]], None],
    ) -> None:
        self.target, self.drafting, self.request, self.policy = target, drafting, request, policy
        self.on_tokens = on_tokens
        self.stop_ids = target.capabilities.stop_ids if request.stop_ids is None else request.stop_ids
        self.capacity = target.capabilities.max_tokens  # tokens, prompt included
        if drafting is not None:
            self.capacity = min(self.capacity, drafting.capacity)
        prompt = len(request.prompt_ids)
        if prompt >= self.capacity:
            raise BadInputError(
                f"the prompt has {prompt} tokens, target and drafter hold {self.capacity}, answer included",
                prompt_tokens=prompt,
                capacity=self.capacity,
            )
        self.generator = np.random.default_rng(request.sampling.seed)
        self.choices = RandomChoices(self.generator)
        self.result = Generation(prompt)
        self.limit = min(request.max_new_tokens, self.capacity - prompt)

    def run(self) -> Generation:
        begun = time.perf_counter()
        try:
            anchor = self._prefill()
            self.result.seconds["prefill"] = time.perf_counter() - begun
            before = dict(self.drafting.seconds) if self.drafting else {}
            while not self._finished():
                anchor = self._round(anchor)
        finally:
            self.target.release(_SLOT)
            if self.drafting is not None:
                self.drafting.release(_SLOT)
        self.result.seconds["total"] = time.perf_counter() - begun
        if self.drafting is not None:
            for part, seconds in self.drafting.seconds.items():
                self.result.seconds[part] = seconds - before.get(part, 0.0)
        return self.result

    def _prefill(self) -> int:
        """The prompt through target and drafter; returns the first token."""
        rows = self.target.prefill(_SLOT, self.request.prompt_ids)
        token = self.choices.draw(self._law(rows, 0))
        self._commit([token])
        if self.drafting is not None and not self._finished():
            self._append(rows, len(self.request.prompt_ids))
        return token

    def _round(self, anchor: int) -> int:
        """Draft after the anchor, verify, commit; returns the next anchor."""
        start = self.result.prompt_tokens + len(self.result.token_ids) - 1  # the anchor's absolute position
        tokens, draft = self._draft(anchor)
        clock = time.perf_counter()
        rows = self.target.verify(RaggedBatch.of({_SLOT: (start, [anchor, *tokens])}))
        verified = time.perf_counter()
        q = [self.drafting.target_law(law) for law in draft.q[_SLOT, : len(tokens)]] if self.drafting and draft else ()
        accepted, token = verify(tokens, q, lambda i: self._law(rows, i), self.choices)
        self.target.commit(_SLOT, accepted)
        committed = [*tokens[:accepted], token]
        self.result.seconds["verify"] += verified - clock
        self.result.seconds["sampling"] += time.perf_counter() - verified
        self.result.proposed.append(len(tokens))
        self.result.accepted.append(accepted)
        self.result.committed.append(self._commit(committed))
        if self.drafting is not None and not self._finished():
            self._append(rows, accepted + 1)
        return token

    def _draft(self, anchor: int) -> tuple[list[int], Draft | None]:
        """The tokens to verify: none without a drafter, or where only one more token is wanted."""
        # The limit hangs on committed tokens only, so it does not bend the law.
        room = self.limit - len(self.result.token_ids) - 1
        if self.drafting is None or room < 1:
            return [], None
        noise = self.generator.random(self.drafting.config.proposals, dtype=np.float32)
        draft = self.drafting.draft({_SLOT: anchor}, {_SLOT: noise}, {_SLOT: self.request.sampling})
        clock = time.perf_counter()
        confidence = _confidence(draft)
        count = min(int(self.policy.lengths(confidence)[0]), room)
        self.result.seconds["scheduler"] += time.perf_counter() - clock
        return [int(token) for token in draft.tokens[_SLOT, :count]], draft

    def _append(self, rows: Rows, count: int) -> None:
        assert self.drafting is not None
        if rows.features is None:
            raise BadInputError("the target gives no features; it was loaded without the drafter's target layers")
        self.drafting.append({_SLOT: rows.features[:count]})

    def _law(self, rows: Rows, row: int) -> Law:
        return law_from_logits(rows.logits[row], self.request.sampling)

    def _commit(self, tokens: list[int]) -> int:
        """Emit tokens up to a stop token, which is kept; returns how many."""
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                tokens = tokens[: i + 1]
                self.result.stop_reason = "stop"
                break
        self.result.token_ids += tokens
        self.on_tokens(tokens)
        return len(tokens)

    def _finished(self) -> bool:
        if self.result.stop_reason == "stop":
            return True
        done = len(self.result.token_ids) >= self.limit
        if done and self.limit < self.request.max_new_tokens:
            self.result.stop_reason = "capacity"
        return done


def _confidence(draft: Draft) -> np.ndarray:
    """Per-step confidence [B, K]; certainty where the drafter has no confidence head."""
    if draft.confidence_logits is None:
        return np.ones(draft.tokens.shape)
    return 1.0 / (1.0 + np.exp(-draft.confidence_logits.astype(np.float64)))
