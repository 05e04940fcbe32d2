"""Acceptance length of a drafter before and after quantisation, by greedy decoding of the same prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.drafter.errors import BadInputError, CheckFailedError
from dspark.engines.backend import Backend
from dspark.export.bundle import Bundle
from dspark.export.quantization_report import OVERALL, Acceptance
from dspark.export.shadow import fp32_shadow

from .drafting import Drafting
from .generation import Generation, Request, generate
from .lossless import parting
from .target import Target


@dataclass(frozen=True, slots=True)
class Trial:
    """A request, and the domain that it stands for."""

    domain: str
    request: Request


@dataclass(frozen=True, slots=True)
class _Answers:
    domain: str
    before: Generation
    after: Generation
    near_tie: bool


def compare_acceptance(
    before: Bundle,
    after: Bundle,
    backend: Backend,
    target: Target,
    trials: Sequence[Trial],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Acceptance]:
    """Answer every request plainly and with both drafters: all prompts first, then each domain.

    A dtype that the backend has no kernels for is decoded through the fp32 shadow of its graphs.

    Raises:
        CheckFailedError: a text differs from plain decoding's.
        BadInputError: every answer ends with its first token, which no drafter has a part in.
    """
    drafters = [Drafting(_runnable(bundle, backend), backend, bundle.batches[0]) for bundle in (before, after)]
    answers = []
    for number, trial in enumerate(trials):
        progress(number, len(trials))
        plain = generate(target, None, trial.request)
        was, now = fast = [generate(target, drafting, trial.request) for drafting in drafters]
        partings = [p for text in fast if (p := parting(target, trial.request, plain, text)) is not None]
        if faults := [p for p in partings if not p.near_tie]:
            raise CheckFailedError(
                f"prompt {number + 1}: the text differs from plain decoding from token {faults[0].place} on, "
                f"where the two logits differ by {faults[0].gap:.2e}"
            )
        answers.append(_Answers(trial.domain, was, now, bool(partings)))
    if not any(answer.before.rounds for answer in answers):
        raise BadInputError(
            "the prompts' answers end with their first token, so no acceptance is measured; give others"
        )
    domains = list(dict.fromkeys(answer.domain for answer in answers))
    return [
        _acceptance(OVERALL, answers),
        *(_acceptance(domain, [a for a in answers if a.domain == domain]) for domain in domains),
    ]


def _runnable(bundle: Bundle, backend: Backend) -> Bundle:
    if backend.supports(bundle.dtype):
        return bundle
    return dataclasses.replace(bundle, graphs=tuple(fp32_shadow(graph) for graph in bundle.graphs))


def _acceptance(domain: str, answers: Sequence[_Answers]) -> Acceptance:
    before, after = [a.before for a in answers], [a.after for a in answers]
    near_ties = sum(a.near_tie for a in answers)
    return Acceptance(
        domain,
        len(answers),
        _acceptance_length(before),
        _acceptance_length(after),
        sum(g.rounds for g in before),
        sum(g.rounds for g in after),
        len(answers) - near_ties,
        near_ties,
    )


def _acceptance_length(answers: Sequence[Generation]) -> float:
    rounds = sum(g.rounds for g in answers)
    return sum(sum(g.committed) for g in answers) / rounds if rounds else 0.0
