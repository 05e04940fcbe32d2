"""Rows of weights that are no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

_PIECE_ROWS = 4096
_NAMED = 10  # rows of one tensor


def non_finite_rows(
    checkpoint: Checkpoint, progress: Callable[[str, int, int], None]
) -> Iterator[tuple[str, list[int]]]:
    """Read every weight of the files; yields stored name and the first rows that hold NaN or Inf."""
    from .checkpoint import is_weight

    entries = [entry for entry in checkpoint.folder.entries.values() if is_weight(entry)]
    for number, entry in enumerate(entries):
        progress("scanning", number, len(entries))
        rows: list[int] = []
        for start in range(0, entry.shape[0] if entry.shape else 0, _PIECE_ROWS):
            piece = entry.load(slice(start, start + _PIECE_ROWS))
            bad = (~piece.isfinite()).reshape(piece.shape[0], -1).any(dim=1).nonzero()[:, 0]
            rows += (bad + start).tolist()
            if len(rows) >= _NAMED:
                break
        if rows:
            yield entry.name, rows[:_NAMED]
