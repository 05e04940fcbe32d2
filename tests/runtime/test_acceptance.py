"""Acceptance before and after: what is counted, and that a text that differs is no result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark.drafter.errors import BadInputError, CheckFailedError
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import Bundle
from dspark.runtime import acceptance
from dspark.runtime.acceptance import Trial, compare_acceptance
from dspark.runtime.generation import Generation, Request, generate
from dspark.runtime.lossless import NEAR_TIE, parting
from dspark.runtime.target import Capabilities, RaggedBatch, Rows
from dspark.runtime.targets.transformers import TransformersTarget

TRIALS = [
    Trial("maths", Request([5, 9, 11], max_new_tokens=12, stop_ids=())),
    Trial("chat", Request([40, 41], max_new_tokens=9, stop_ids=())),
    Trial("maths", Request([7, 7, 7, 8], max_new_tokens=12, stop_ids=())),
]


@pytest.fixture(scope="module")
def target(target_path: Path, bundle: Bundle) -> TransformersTarget:
    return TransformersTarget(target_path, bundle.config.target_layer_ids, bundle.config.proposals + 1)


def test_all_prompts_then_each_domain(bundle: Bundle, target: TransformersTarget) -> None:
    done: list[tuple[int, int]] = []
    backend = backend_from_name("onnxruntime", 1)
    rows = compare_acceptance(bundle, bundle, backend, target, TRIALS, lambda *place: done.append(place))
    assert [(row.domain, row.prompts, row.equal, row.near_ties) for row in rows] == [
        ("all", 3, 3, 0),
        ("maths", 2, 2, 0),
        ("chat", 1, 1, 0),
    ]
    for row in rows:
        assert row.before == row.after >= 1
        assert row.rounds_before == row.rounds_after
        assert row.loss == 0
    everything, maths, chat = rows
    assert everything.rounds_after == maths.rounds_after + chat.rounds_after
    # The first token of an answer comes from the prompt, not from a round
    assert everything.after * everything.rounds_after == pytest.approx((12 - 1) + (9 - 1) + (12 - 1))
    assert done == [(0, 3), (1, 3), (2, 3)]


def test_another_text_is_refused(bundle: Bundle, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: TransformersTarget, drafting: object, request: Request) -> Generation:
        result = generate(model, None, request)
        if drafting is not None:
            result.token_ids[3] += 1
        return result

    monkeypatch.setattr(acceptance, "generate", wrong)
    with pytest.raises(CheckFailedError, match="prompt 1: the text differs from plain decoding from token 3 on"):
        compare_acceptance(bundle, bundle, backend_from_name("onnxruntime", 1), target, TRIALS)


def test_answers_of_one_token_measure_nothing(bundle: Bundle, target: TransformersTarget) -> None:
    trials = [Trial("maths", Request([5, 9, 11], max_new_tokens=1))]
    with pytest.raises(BadInputError, match="end with their first token"):
        compare_acceptance(bundle, bundle, backend_from_name("onnxruntime", 1), target, trials)


class Torn:
    """A target that gives tokens 2 and 3 nearly the same logits."""

    capabilities = Capabilities(vocab_size=8, max_tokens=32, stop_ids=(), features=False)

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def prefill(self, slot: int, token_ids: list[int]) -> Rows:
        assert token_ids == [1, 1, 5]  # the prompt and what the texts share
        logits = np.zeros((1, 8), np.float32)
        logits[0, 3] = self.gap
        return Rows(logits, None)

    def verify(self, batch: RaggedBatch) -> Rows:
        raise NotImplementedError

    def commit(self, slot: int, accepted: int) -> None: ...

    def release(self, slot: int) -> None: ...


@pytest.mark.parametrize(("gap", "near"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)])
def test_texts_part_at_a_near_tie_or_not(gap: float, near: bool) -> None:
    request, plain = Request([1, 1]), Generation(2, token_ids=[5, 3, 0])
    found = parting(Torn(gap), request, plain, Generation(2, token_ids=[5, 2, 0]))
    assert found is not None
    assert found.place == 1
    assert found.near_tie is near
    assert parting(Torn(gap), request, plain, Generation(2, token_ids=[5, 3, 0])) is None
    with pytest.raises(CheckFailedError, match="different lengths"):
        parting(Torn(gap), request, plain, Generation(2, token_ids=[5, 3]))
