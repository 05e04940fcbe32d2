"""How ``export --quantize`` measures acceptance: prompts as requests to the target, both drafters on one backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError
from dspark.engines.backend import Backend
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions
from dspark.export.quantization_report import Acceptance, AcceptanceTrial
from dspark.runtime.acceptance import Trial, compare_acceptance
from dspark.runtime.generation import Request
from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer

from .common import Console
from .prompts import Prompt


def acceptance_trial(
    console: Console,
    backend: Backend,
    target: Path,
    prompts: Sequence[Prompt],
    config: DrafterConfig,
    options: ExportOptions,
    max_loss: float,
) -> AcceptanceTrial:
    """The trial of an export; prompts are encoded now, the target is loaded when it is measured.

    Raises:
        BadInputError: a prompt leaves no room in the largest context.
    """
    capacity = options.context[-1] if config.ring is None else config.max_position_embeddings
    tokenizer = TransformersTokenizer(target)
    trials = []
    for number, prompt in enumerate(prompts, 1):
        ids = tokenizer.encode_chat(prompt.messages)
        room = capacity - len(ids)
        if room < 1:
            raise BadInputError(
                f"prompt {number} has {len(ids)} tokens, the largest context holds {capacity}, answer included",
                prompt_tokens=len(ids),
                capacity=capacity,
            )
        trials.append(Trial(prompt.domain, Request(ids, max_new_tokens=min(prompt.max_new_tokens, room))))

    def measure(before: Bundle, after: Bundle) -> list[Acceptance]:
        model = TransformersTarget(target, config.target_layer_ids, config.proposals + 1)

        def progress(done: int, total: int) -> None:
            console.progress("acceptance", done, total)

        return compare_acceptance(before, after, backend, model, trials, progress)

    return AcceptanceTrial(measure, max_loss)
