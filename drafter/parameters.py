"""The weights of the reference model: in fp32, held where the drafter is small, streamed where it is large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

Load = Callable[[str, "slice | Sequence[int] | None"], Tensor]
HELD_BYTES = 1 << 30  # fp32; a drafter over this is streamed
_ALWAYS_HELD = 1 << 20
_PIECE_BYTES = 1 << 24


class Parameters:
    """Canonical tensors by name.

    Args:
        load: a tensor, or some of its rows, in any floating dtype.
        shapes: of every tensor.
        held_bytes: up to how many bytes in fp32 all tensors are held. Over it, only the small ones are; the others
            are read again for every product, some rows at a time.
    """

    def __init__(self, load: Load, shapes: Mapping[str, tuple[int, ...]], held_bytes: int = HELD_BYTES) -> None:
        self._load, self._shapes = load, dict(shapes)
        sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
        self._all = sum(sizes.values()) <= held_bytes
        self._held: dict[str, Tensor] = {
            name: self._fp32(name, None) for name, size in sizes.items() if self._all or size <= _ALWAYS_HELD
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor in fp32 (a map of ids stays int64)."""
        held = self._held.get(name)
        return self._fp32(name, None) if held is None else held

    def linear(self, x: Tensor, name: str, bias: str | None = None) -> Tensor:
        """x [..., in] · Wᵀ (+ b) with W [out, in]."""
        offset = self[bias] if bias is not None and bias in self else None
        held = self._held.get(name)
        if held is not None:
            return linear(x, held, offset)
        out, width = self._shapes[name]
        step = min(out, max(1, _PIECE_BYTES // (4 * width)))
        # One buffer for all pieces: pieces of their own would leave holes that the allocator cannot close.
        buffer, product = torch.empty(step, width), torch.empty(*x.shape[:-1], out)
        for start in range(0, out, step):
            stop = min(start + step, out)
            piece = buffer[: stop - start].copy_(self._load(name, slice(start, stop)))
            product[..., start:stop] = linear(x, piece)
        return product if offset is None else product + offset

    def embedding(self, ids: Tensor, name: str) -> Tensor:
        """Rows of a table [V, width] for ids of any shape."""
        held = self._held.get(name)
        if held is not None:
            return embedding(ids, held)
        unique, places = torch.unique(ids, return_inverse=True)
        return embedding(places, self._fp32(name, unique.tolist()))

    def _fp32(self, name: str, rows: slice | Sequence[int] | None) -> Tensor:
        tensor = self._load(name, rows)
        return tensor.float() if tensor.is_floating_point() else tensor


def held(tensors: Mapping[str, Tensor]) -> Parameters:
    """Parameters over tensors that are in memory already."""

    def load(name: str, rows: slice | Sequence[int] | None) -> Tensor:
        return tensors[name] if rows is None else tensors[name][rows]

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Parameters(load, shapes, held_bytes=1 << 62)
