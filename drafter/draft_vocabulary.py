"""The map from draft tokens to target ids, which the layouts write in two ways.

``offset`` (speculators, vLLM): target id = i + d2t[i]. ``absolute`` (GGUF): target id = d2t[i]. Which one it is
shows in the numbers (dspark format sheet G.7): the ids that ``t2d`` marks are the evidence; without it, ascending
ids make an offset vector non-decreasing and an absolute one strictly increasing.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from .config import DrafterConfig
from .errors import BadInputError
from .formats.reading import Source
from .tensors import DRAFT_TO_TARGET

Ids = NDArray[np.int64]
OPTION = "--d2t"


def draft_to_target(
    config: DrafterConfig, source: Source, module: ModuleType
) -> tuple[Ids | None, list[str], list[str], str | None]:
    """The absolute map [V'] of a reduced vocabulary.

    Returns:
        the map (None where draft tokens are target ids), faults, warnings, and the option that settles what is open.
    """
    entry = source.entries.get(DRAFT_TO_TARGET)
    if entry is None:
        return None, [], [], None
    rows = config.draft_vocab_size if config.reduced_vocabulary else config.vocab_size
    if entry.dtype not in ("I64", "I32") or entry.shape != (rows,):
        return None, [f"{entry.name} is {entry.dtype} {list(entry.shape)}, it must be I64 {[rows]}"], [], None
    try:
        stored = entry.integers()
        marked = _marked(source, config.vocab_size)
    except BadInputError as error:
        return None, [error.message], [], None
    readings = {"offset": stored + np.arange(rows), "absolute": stored}
    fitting = {kind: ids for kind, ids in readings.items() if _fits(ids, stored, kind, marked, config.vocab_size)}
    family = getattr(module, "DRAFT_TO_TARGET", "offset")
    kind = source.settled.d2t or _chosen(fitting, family)
    if kind is None and fitting:
        message = f"{entry.file}: d2t may be offsets or absolute ids; settle it with {OPTION} offset|absolute"
        return None, [message], [], OPTION
    if kind is None or kind not in fitting:
        return None, [f"{entry.file}: {_why_not(stored, marked, config)}"], [], None
    ids = fitting[kind]
    warnings = [f"{entry.file}: d2t holds {kind} ids, where this layout writes {family}"] if kind != family else []
    if not config.reduced_vocabulary:
        if not np.array_equal(ids, np.arange(rows)):
            return None, [f"{entry.file}: d2t of a full vocabulary is not the identity"], [], None
        return None, [], [], None
    return ids, [], warnings, None


def _chosen(fitting: dict[str, Ids], family: str) -> str | None:
    """The one reading that fits; where both do, strictly increasing ids are absolute if the layout says so too."""
    if len(fitting) == 1:
        return next(iter(fitting))
    if len(fitting) == 2 and (family == "absolute" or np.array_equal(fitting["offset"], fitting["absolute"])):
        return family
    return None


def _fits(ids: Ids, stored: Ids, kind: str, marked: Ids | None, vocab_size: int) -> bool:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        return False
    if marked is not None:
        return np.array_equal(np.sort(ids), marked)
    steps = np.diff(stored)
    return bool((steps >= 0).all() if kind == "offset" else (steps > 0).all())


def _marked(source: Source, vocab_size: int) -> Ids | None:
    """Target ids that ``t2d`` marks, ascending."""
    entry = source.entries.get("t2d")
    if entry is None:
        return None
    if entry.dtype not in ("BOOL", "U8") or entry.shape != (vocab_size,):
        raise BadInputError(f"t2d is {entry.dtype} {list(entry.shape)}, it must be BOOL {[vocab_size]}")
    return np.flatnonzero(entry.integers())


def _why_not(stored: Ids, marked: Ids | None, config: DrafterConfig) -> str:
    if marked is not None and len(marked) != len(stored):
        return f"t2d marks {len(marked)} ids, d2t has {len(stored)}"
    evidence = "the ids that t2d marks" if marked is not None else "ascending ids"
    low, high = (int(stored.min()), int(stored.max())) if stored.size else (0, 0)
    return (
        f"d2t ({low} to {high}) read as offsets or as absolute ids does not give {evidence} "
        f"of a vocabulary of {config.vocab_size}"
    )
