"""What a checkpoint leaves open, decided by evidence: teacher-forced top-1 on a short text of the target's own.

The target answers a few prompts greedily. At every position of an answer, the first proposal of a block anchored
there is compared with the target's choice, under each reading of the checkpoint. A wrong reading predicts from the
wrong slot (dspark format sheet G.1). A Markov head guesses well from the token before under either reading, so they
are told apart by the backbone's own choice, position by position: a sign test where they differ.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.errors import BadInputError
from dspark.drafter.formats.reading import Settled
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors
from dspark.drafter.target import open_target
from dspark.drafter.tensors import DRAFT_TO_TARGET

from .generation import Request, generate
from .target import RaggedBatch
from .targets.transformers import TransformersTarget, TransformersTokenizer

_PROMPTS = (
    "How does rain form?",
    "A shop sells pens for 3 dollars each. Anna buys 14 pens and pays with a 50 dollar bill. How much change?",
    "Write a Python function that returns the largest number of a list.",
    "Give me three tips for sleeping better.",
)
_TOKENS = 96  # answered per prompt
_ANCHORS = 16  # blocks per forward
_SIGNIFICANT = 1e-3  # chance of a difference like this between readings that are equally good


@dataclass(frozen=True, slots=True)
class Probed:
    """Top-1 of one reading: whether the first proposal is the target's choice, at each position."""

    settled: Settled
    label: str
    hits: torch.Tensor  # [positions]
    backbone_hits: torch.Tensor  # [positions], without the Markov head

    @property
    def rate(self) -> float:
        return float(self.hits.float().mean())

    @property
    def backbone_rate(self) -> float:
        return float(self.backbone_hits.float().mean())


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
    probed = [Probed(readings[label], label, *_hits(checkpoint, texts)) for label, checkpoint in opened.items()]
    listed = "; ".join(f"{item.label} {item.rate:.1%} (backbone {item.backbone_rate:.1%})" for item in probed)
    text = (
        f"probe: teacher-forced top-1 of the first proposal at {len(probed[0].hits)} positions, "
        f"chance {chance:.1%}: {listed}"
    )
    best, *others = sorted(probed, key=lambda item: -item.backbone_rate)
    above_chance = best.rate > 2 * chance
    if not (above_chance and all(_clearly_better(best, other) for other in others)):
        raise BadInputError(
            f"{path}: {text}; no reading is clearly above chance and the others; settle it with {', '.join(options)}",
            settle_with=options,
            chance=chance,
            probe=[{"reading": item.label, "top1": item.rate, "backbone_top1": item.backbone_rate} for item in probed],
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
    token_ids: torch.Tensor  # [T]
    prompt: int  # tokens of it that are the prompt
    features: torch.Tensor  # [T, F·h_t]
    choices: torch.Tensor  # [T], the target's first choice after each token


def _texts(target: Path, taps: tuple[int, ...]) -> Iterator[_Text]:
    tokenizer, model = TransformersTokenizer(target), TransformersTarget(target, taps)
    for question in _PROMPTS:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        ids = [*prompt, *generate(model, None, Request(prompt, max_new_tokens=_TOKENS)).token_ids]
        first = model.prefill(0, ids[:1])
        rest = model.verify(RaggedBatch.of({0: (1, ids[1:])}))
        model.release(0)
        assert first.features is not None
        assert rest.features is not None
        features = np.concatenate([first.features, rest.features])
        choices = np.concatenate([first.logits, rest.logits]).argmax(axis=-1)
        yield _Text(torch.tensor(ids), len(prompt), torch.from_numpy(features), torch.from_numpy(choices))


def _chance(texts: list[_Text]) -> float:
    """The rate of always saying the target's commonest choice."""
    counts = Counter(token for text in texts for token in text.choices[text.prompt :].tolist())
    return counts.most_common(1)[0][1] / counts.total()


def _hits(checkpoint: Checkpoint, texts: list[_Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """[positions] over all texts: of the drafter, and of its backbone alone."""
    model = reference_from_tensors(checkpoint.config, checkpoint.load)
    with torch.inference_mode():
        hits = torch.cat([_text_hits(model, text) for text in texts], dim=1)
    return hits[0], hits[1]


def _text_hits(model: ReferenceDrafter, text: _Text) -> torch.Tensor:
    """[2, positions]"""
    config, length = model.config, len(text.token_ids)
    k, v = model.context(text.features[None], torch.arange(length)[None])  # [L, 1, Hkv, T, D]
    hits = []
    for starts in torch.split(torch.arange(text.prompt, length), _ANCHORS):
        anchors = text.token_ids[starts]
        base, hidden = model.block(anchors, starts, *(_cache(config.ring, cache, starts) for cache in (k, v)))
        bias, _ = model.markov_bias(anchors, hidden[:, 0], torch.zeros(len(starts), config.markov_rank))
        logits = torch.stack([base[:, 0] if bias is None else base[:, 0] + bias, base[:, 0]])  # [2, B, V']
        tokens = logits.argmax(dim=-1)
        if config.reduced_vocabulary:
            tokens = model.parameters[DRAFT_TO_TARGET][tokens]
        hits.append(tokens == text.choices[starts])
    return torch.cat(hits, dim=1)


def _cache(ring: int | None, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Rows [L, 1, Hkv, T, D] as the cache of each start; of a ring, position p lies in row p mod C."""
    if ring is None:
        return rows.expand(-1, len(starts), -1, -1, -1)
    cache = torch.zeros(rows.shape[0], len(starts), rows.shape[2], ring, rows.shape[4])
    for slot, start in enumerate(starts.tolist()):
        positions = torch.arange(max(0, start - ring), start)
        cache[:, slot][:, :, positions % ring] = rows[:, 0][:, :, positions]
    return cache


def _clearly_better(best: Probed, other: Probed) -> bool:
    """One-sided sign test over the positions where one reading's backbone is right and the other's is not."""
    won = int((best.backbone_hits & ~other.backbone_hits).sum())
    lost = int((other.backbone_hits & ~best.backbone_hits).sum())
    tail = sum(math.comb(won + lost, i) for i in range(won, won + lost + 1))
    return best.rate >= other.rate and tail < _SIGNIFICANT * 2.0 ** (won + lost)
