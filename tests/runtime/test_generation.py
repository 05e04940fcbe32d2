"""The loop of a request: lossless, and it ends where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted

from dspark.drafter.errors import BadInputError, UsageError
from dspark.engines.backend import Backend, backend_from_name
from dspark.export.bundle import Bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Generation, Request, generate
from dspark.runtime.sampling import Sampling
from dspark.runtime.scheduler import Fixed, policy_from_name
from dspark.runtime.targets.transformers import TransformersTarget

PROMPT = [5, 9, 44, 71, 13, 8]


@pytest.fixture(scope="module")
def target(target_path: Path) -> TransformersTarget:
    return TransformersTarget(target_path, (0, 2), verify_rows=6)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return backend_from_name("onnxruntime", threads=1)


def plain(target: TransformersTarget, tokens: int, prompt: list[int] = PROMPT, **more: Any) -> Generation:
    return generate(target, None, Request(prompt, Sampling(**more), tokens, stop_ids=()))


def test_plain_decoding_is_transformers_own(target: TransformersTarget) -> None:
    with torch.inference_mode():
        wanted = target.model.generate(
            torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert plain(target, 40).token_ids == wanted[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("markov", ["loop", "step"])
def test_greedy_equals_plain_decoding(
    target: TransformersTarget, bundle: Bundle, backend: Backend, markov: Any
) -> None:
    request = Request(PROMPT, max_new_tokens=100, stop_ids=())
    fast = generate(target, Drafting(bundle, backend, markov=markov), request)
    assert fast.token_ids == plain(target, 100).token_ids
    assert fast.stop_reason == "length"
    assert sum(fast.committed) == 99


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_every_verified_length_gives_the_same_text(
    target: TransformersTarget, bundle: Bundle, backend: Backend, k: int
) -> None:
    wanted = plain(target, 60).token_ids
    for accept in (lambda r: r % 6, lambda r: 5, lambda r: 0):
        drafter = Scripted(bundle, backend, wanted, len(PROMPT), accept)
        fast = generate(target, drafter, Request(PROMPT, max_new_tokens=60, stop_ids=()), Fixed(k))
        assert fast.token_ids == wanted
        assert max(fast.accepted) <= k
        assert all(c == a + 1 for a, c in zip(fast.accepted, fast.committed, strict=True))


def test_full_accepts_in_a_row_neither_double_nor_lose(
    target: TransformersTarget, bundle: Bundle, backend: Backend
) -> None:
    wanted = plain(target, 61).token_ids
    drafter = Scripted(bundle, backend, wanted, len(PROMPT), lambda r: 99)
    fast = generate(target, drafter, Request(PROMPT, max_new_tokens=61, stop_ids=()))
    assert fast.token_ids == wanted
    assert fast.accepted == [5] * 10
    assert fast.acceptance_length == 6
    assert fast.accepted_per_position == [1.0] * 5


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_cuts_the_accepted_prefix(
    target: TransformersTarget, bundle: Bundle, backend: Backend, place: int
) -> None:
    """Wherever in a block the stop token falls, the text ends with it, and nothing behind it is emitted."""
    text = plain(target, 40).token_ids
    index = next(i for i in range(1 + place, 40, 6) if text[i] not in text[:i]) if place < 6 else 0
    streamed: list[int] = []
    drafter = Scripted(bundle, backend, text, len(PROMPT), lambda r: 99)
    request = Request(PROMPT, max_new_tokens=40, stop_ids=(text[index],))
    fast = generate(target, drafter, request, on_tokens=streamed.extend)
    assert fast.token_ids == streamed == text[: index + 1]
    assert fast.stop_reason == "stop"
    assert fast.token_ids == generate(target, None, request).token_ids


def test_a_stop_token_from_the_prompt_ends_at_once(
    target: TransformersTarget, bundle: Bundle, backend: Backend
) -> None:
    first = plain(target, 1).token_ids
    fast = generate(target, Drafting(bundle, backend), Request(PROMPT, stop_ids=tuple(first)))
    assert (fast.token_ids, fast.stop_reason, fast.rounds) == (first, "stop", 0)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7])
def test_never_more_tokens_than_asked_for(
    target: TransformersTarget, bundle: Bundle, backend: Backend, tokens: int
) -> None:
    wanted = plain(target, tokens).token_ids
    drafter = Scripted(bundle, backend, plain(target, 40).token_ids, len(PROMPT), lambda r: 99)
    fast = generate(target, drafter, Request(PROMPT, max_new_tokens=tokens, stop_ids=()))
    assert fast.token_ids == wanted
    assert fast.stop_reason == "length"


@pytest.mark.parametrize("prompt", [186, 190, 191])
def test_ends_at_the_context_capacity_with_its_reason(
    target: TransformersTarget, bundle: Bundle, backend: Backend, prompt: int
) -> None:
    """192 is the bundle's largest capacity; the caches go through both of its sizes."""
    ids = [int(i) for i in np.random.default_rng(0).integers(2, 131, prompt)]
    text = plain(target, 40, ids).token_ids
    for drafter in (Drafting(bundle, backend), Scripted(bundle, backend, text, prompt, lambda r: 99)):
        fast = generate(target, drafter, Request(ids, max_new_tokens=40, stop_ids=()))
        assert fast.token_ids == text[: 192 - prompt]
        assert fast.stop_reason == "capacity"


def test_growing_through_the_capacities_changes_nothing(
    target: TransformersTarget, bundle: Bundle, backend: Backend
) -> None:
    """A text from 6 to 190 tokens crosses from C = 64 to C = 192; the next request starts small again."""
    wanted = plain(target, 184).token_ids
    drafter = Scripted(bundle, backend, wanted, len(PROMPT), lambda r: r % 6)
    request = Request(PROMPT, max_new_tokens=184, stop_ids=())
    for _ in range(2):
        drafter.round = 0
        assert generate(target, drafter, request).token_ids == wanted
        assert drafter.length.tolist() == [0]


def test_a_prompt_without_room_is_refused(target: TransformersTarget, bundle: Bundle, backend: Backend) -> None:
    with pytest.raises(BadInputError, match="prompt has 192 tokens, target and drafter hold 192"):
        generate(target, Drafting(bundle, backend), Request([7] * 192))
    with pytest.raises(BadInputError, match="prompt is empty"):
        Request([])
    with pytest.raises(UsageError, match="max-new-tokens 0"):
        Request([7], max_new_tokens=0)


@pytest.mark.parametrize("how", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9}])
def test_a_seed_gives_its_text_again(
    target: TransformersTarget, bundle: Bundle, backend: Backend, how: dict[str, Any]
) -> None:
    drafter = Drafting(bundle, backend)

    def text(seed: int) -> list[int]:
        sampling = Sampling(temperature=0.9, seed=seed, **how)
        return generate(target, drafter, Request(PROMPT, sampling, 50, stop_ids=())).token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_loop_and_steps_draft_the_same(bundle: Bundle, backend: Backend) -> None:
    features = np.random.default_rng(0).standard_normal((30, 64)).astype(np.float32)
    noise = np.random.default_rng(1).random(5, dtype=np.float32)
    drafts = []
    for markov in ("loop", "step"):
        drafting = Drafting(bundle, backend, markov=markov)  # type: ignore[arg-type]
        drafting.append({0: features})
        drafts.append(drafting.draft({0: 17}, {0: noise}, {0: Sampling(temperature=0.8)}))
    one, other = drafts
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_array_equal(one.q, other.q)
    assert one.confidence_logits is not None
    assert other.confidence_logits is not None
    np.testing.assert_allclose(one.confidence_logits, other.confidence_logits, atol=1e-5)


def test_rows_move_into_the_larger_cache(bundle: Bundle, backend: Backend) -> None:
    """A context that grew from C = 64 to C = 192 drafts what the same context appended at once does."""
    features = np.random.default_rng(0).standard_normal((80, 64)).astype(np.float32)
    noise = np.random.default_rng(1).random(5, dtype=np.float32)
    laws = []
    for cut in (40, 80):
        drafting = Drafting(bundle, backend)
        for part in (features[:cut], features[cut:]):
            if len(part):
                drafting.append({0: part})
        laws.append(drafting.draft({0: 17}, {0: noise}, {0: Sampling(temperature=0.8)}).q)
    np.testing.assert_allclose(laws[0], laws[1], atol=1e-5)


def test_truncated_drafts_stay_inside_their_law(bundle: Bundle, backend: Backend) -> None:
    drafting = Drafting(bundle, backend)
    sampling = Sampling(temperature=1.5, top_k=4, top_p=0.95)
    for seed in range(20):
        draft = drafting.draft({0: 17}, {0: np.random.default_rng(seed).random(5, dtype=np.float32)}, {0: sampling})
        assert ((draft.q[0] > 0).sum(axis=-1) <= 4).all()
        np.testing.assert_allclose(draft.q[0].sum(axis=-1), 1, atol=1e-6)
        assert (np.take_along_axis(draft.q[0], draft.tokens[0][:, None], axis=-1) > 0).all()


def test_slots_do_not_see_each_other(bundle: Bundle, backend: Backend) -> None:
    """Three slots of different lengths draft what each drafts alone."""
    random = np.random.default_rng(0)
    features = {
        slot: random.standard_normal((length, 64)).astype(np.float32) for slot, length in ((0, 3), (1, 40), (2, 75))
    }
    noise = {slot: random.random(5, dtype=np.float32) for slot in features}
    sampling = {slot: Sampling(temperature=0.7 * slot) for slot in features}
    anchors = {0: 5, 1: 50, 2: 100}
    together = Drafting(bundle, backend, batch=3)
    together.append({0: features[0], 2: features[2]})
    together.append({1: features[1]})
    draft = together.draft(anchors, noise, sampling)
    for slot in features:
        alone = Drafting(bundle, backend)
        alone.append({0: features[slot]})
        single = alone.draft({0: anchors[slot]}, {0: noise[slot]}, {0: sampling[slot]})
        assert draft.tokens[slot].tolist() == single.tokens[0].tolist()
        np.testing.assert_allclose(draft.q[slot], single.q[0], atol=1e-5)


def test_a_batch_that_was_not_exported_is_refused(bundle: Bundle, backend: Backend) -> None:
    with pytest.raises(BadInputError, match=r"exported for batch \[1, 3\], not 2"):
        Drafting(bundle, backend, batch=2)


@pytest.mark.parametrize("name", ["fixed:0", "fixed:x", "greedy", "fixed:-1"])
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="give fixed or fixed:k"):
        policy_from_name(name)


@pytest.mark.parametrize(
    "how",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"seed": -1}],
)
def test_sampling_out_of_range_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**how)
