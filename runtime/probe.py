"""What a checkpoint leaves open, decided by evidence: teacher-forced top-1 on the target's own text.

The target answers a few prompts greedily; under each reading of the checkpoint the drafter predicts that text, given
the true tokens before each slot. A wrong reading is near chance (dspark format sheet G.1).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.errors import BadInputError
from dspark.drafter.formats.reading import Settled
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors
from dspark.drafter.target import open_target

from .generation import Request, generate
from .targets.transformers import TransformersTarget, TransformersTokenizer

_PROMPTS = (
    "Explain in three sentences how rain forms.",
    "What is 17 times 6? Show the steps.",
    "Write a Python function that returns the largest number of a list.",
)
_TOKENS = 64  # answered per prompt
_SLOTS = 3  # first proposals of a block, which any drafter predicts best
_ANCHORS = 16  # blocks per forward
_MARGIN = 3.0  # standard deviations


@dataclass(frozen=True, slots=True)
class Probed:
    """Top-1 of one reading."""

    settled: Settled
    label: str
    correct: int
    trials: int

    @property
    def rate(self) -> float:
        return self.correct / self.trials


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The reading that the target's text confirms."""

    settled: Settled
    readings: tuple[Probed, ...]
    chance: float
    text: str


def probe_readings(path: Path, target: Path, settled: Settled, error: BadInputError) -> ProbeResult:
    """Decide what ``error`` leaves open.

    Args:
        error: of opening the checkpoint; its ``settle_with`` names the options that are open.

    Raises:
        BadInputError: something is open that no text decides, or no reading is clearly above chance and the others.
    """
    options = list(error.details["settle_with"])
    faults = error.details.get("faults", ())
    if "--target-layer-ids" in options or len(options) < len(faults):
        raise error
    folder = open_target(target)
    readings = dict(_readings(settled, options))
    opened = {label: open_checkpoint(path, folder, how) for label, how in readings.items()}
    taps = next(iter(opened.values())).config.target_layer_ids
    texts = list(_texts(target, taps))
    chance = _chance(texts)
    probed = [Probed(readings[label], label, *_top1(checkpoint, texts)) for label, checkpoint in opened.items()]
    listed = "; ".join(f"{item.label}: {item.correct} of {item.trials} ({item.rate:.1%})" for item in probed)
    text = f"probe: teacher-forced top-1 over the first {_SLOTS} proposals, chance {chance:.1%}: {listed}"
    best, *others = sorted(probed, key=lambda item: -item.rate)
    if not all(_clearly_above(best, rate) for rate in (2 * chance, *(other.rate for other in others))):
        raise BadInputError(
            f"{path}: {text}; no reading is clearly above chance and the others; settle it with {', '.join(options)}",
            settle_with=options,
            probe=[{"reading": item.label, "top1": item.rate, "trials": item.trials} for item in probed],
        )
    return ProbeResult(best.settled, tuple(probed), chance, f"{text}; taken: {best.label}")


def _readings(settled: Settled, options: list[str]) -> Iterator[tuple[str, Settled]]:
    """Every combination of what is open, labelled by the options that would say it."""
    choices: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
        "--sample-from-anchor": ("sample_from_anchor", (("yes", True), ("no", False))),
        "--d2t": ("d2t", (("offset", "offset"), ("absolute", "absolute"))),
    }
    for picked in itertools.product(*(choices[option][1] for option in options)):
        label = " ".join(f"{option} {word}" for option, (word, _) in zip(options, picked, strict=True))
        values = {choices[option][0]: value for option, (_, value) in zip(options, picked, strict=True)}
        yield label, replace(settled, **values)


@dataclass(frozen=True, slots=True)
class _Text:
    token_ids: list[int]
    prompt: int  # tokens of it that are the prompt
    features: torch.Tensor  # [T, F·h_t]


def _texts(target: Path, taps: tuple[int, ...]) -> Iterator[_Text]:
    tokenizer, model = TransformersTokenizer(target), TransformersTarget(target, taps)
    for prompt in _PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        answer = generate(model, None, Request(ids, max_new_tokens=_TOKENS, stop_ids=())).token_ids
        rows = model.prefill(0, [*ids, *answer])
        model.release(0)
        assert rows.features is not None
        yield _Text([*ids, *answer], len(ids), torch.from_numpy(rows.features))


def _chance(texts: list[_Text]) -> float:
    """The rate of always saying the answers' commonest token."""
    counts = Counter(token for text in texts for token in text.token_ids[text.prompt :])
    return counts.most_common(1)[0][1] / counts.total()


def _top1(checkpoint: Checkpoint, texts: list[_Text]) -> tuple[int, int]:
    model = reference_from_tensors(checkpoint.config, checkpoint.load)
    correct = trials = 0
    with torch.inference_mode():
        for text in texts:
            hits = _hits(model, text)
            correct, trials = correct + int(hits.sum()), trials + hits.numel()
    return correct, trials


def _hits(model: ReferenceDrafter, text: _Text) -> torch.Tensor:
    """[anchors, slots]: whether the drafter's first choice is the token that the target wrote."""
    config, ids, slots = model.config, torch.tensor(text.token_ids), min(_SLOTS, model.config.proposals)
    length = len(ids)
    k, v = model.context(text.features[None], torch.arange(length)[None])  # [L, 1, Hkv, T, D]
    anchors = torch.arange(text.prompt, length - slots)
    hits = []
    for group in torch.split(anchors, _ANCHORS):
        caches = [_cache(config.ring, cache, group) for cache in (k, v)]
        base, hidden = model.block(ids[group], group, *caches)
        state = torch.zeros(len(group), config.markov_rank)
        found = []
        for slot in range(slots):
            bias, state = model.markov_bias(ids[group + slot], hidden[:, slot], state)
            logits = base[:, slot] if bias is None else base[:, slot] + bias
            token = logits.argmax(dim=-1)
            if config.reduced_vocabulary:
                token = model.parameters["d2t"][token]
            found.append(token == ids[group + slot + 1])
        hits.append(torch.stack(found, dim=1))
    return torch.cat(hits)


def _cache(ring: int | None, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Rows [L, 1, Hkv, T, D] as the cache of each start; of a ring, position p lies in row p mod C."""
    if ring is None:
        return rows.expand(-1, len(starts), -1, -1, -1)
    cache = torch.zeros(rows.shape[0], len(starts), rows.shape[2], ring, rows.shape[4])
    for slot, start in enumerate(starts.tolist()):
        positions = torch.arange(max(0, start - ring), start)
        cache[:, slot][:, :, positions % ring] = rows[:, 0][:, :, positions]
    return cache


def _clearly_above(best: Probed, rate: float) -> bool:
    spread = math.sqrt((best.rate * (1 - best.rate) + rate * (1 - rate)) / best.trials)
    return best.rate - rate > _MARGIN * max(spread, 1e-9)
