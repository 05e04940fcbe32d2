"""The one external weight file of a bundle: planned from the configuration, then written as a stream.

Matrices keep the checkpoint's orientation [out, in], so that tensors that lie behind each other can be read as
one: q, k, v of a layer are one [q+2·kv, h] matrix for ``block``, and k, v the last rows of it for ``context``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError
from dspark.drafter.tensor_folder import TensorEntry
from dspark.drafter.tensors import DRAFT_TO_TARGET, tensor_shapes

from .contract import Dtype

if TYPE_CHECKING:
    import torch

    from dspark.drafter.parameters import Load

FILE = "graphs/weights.data"
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
PAGE = 4096  # a group of tensors starts on a page, so that it can be memory-mapped
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
_PIECE_BYTES = 1 << 24  # of a tensor in memory at a time


@dataclass(frozen=True, slots=True)
class WeightRegion:
    """A tensor, or several that lie behind each other, inside the weight file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "offset": self.offset}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WeightRegion:
        return cls(data["name"], data["dtype"], tuple(data["shape"]), data["offset"])


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where every canonical tensor goes; ``tied`` says that the head reads the embedding's bytes."""

    tensors: dict[str, WeightRegion]
    tied: bool

    @property
    def bytes(self) -> int:
        return max(region.offset + region.bytes for region in self.tensors.values())

    def region(self, *names: str) -> WeightRegion:
        """One tensor, or several neighbours of equal width as one matrix (or vector) over all their rows."""
        parts = [self.tensors[name] for name in names]
        for left, right in itertools.pairwise(parts):
            assert left.offset + left.bytes == right.offset, (left, right)
        rows = sum(part.shape[0] for part in parts)
        return WeightRegion("+".join(names), parts[0].dtype, (rows, *parts[0].shape[1:]), parts[0].offset)


def plan_weights(config: DrafterConfig, dtype: Dtype, tied: bool) -> WeightPlan:
    """Offsets of all tensors: layer matrices, embedding and head in ``dtype``, everything else fp32."""
    shapes, regions, end = tensor_shapes(config), dict[str, WeightRegion](), 0
    for group in _groups(config):
        offset = -(-end // PAGE) * PAGE
        for name in group:
            if name == "lm_head.weight" and tied:
                continue
            regions[name] = WeightRegion(name, stored_dtype(name, dtype), shapes[name], offset)
            offset += regions[name].bytes
        end = offset
    if tied:
        embedding = regions["embed_tokens.weight"]
        regions["lm_head.weight"] = WeightRegion("lm_head.weight", embedding.dtype, embedding.shape, embedding.offset)
    return WeightPlan(regions, tied)


def stored_dtype(name: str, dtype: Dtype) -> str:
    """fc, norms, Markov and confidence heads stay fp32 (DESIGN §3)."""
    if name == DRAFT_TO_TARGET:
        return "int64"
    projections = ("_proj.weight", "_proj.bias")
    in_layer = name.startswith("layers.") and name.endswith(projections)
    return dtype if in_layer or name in ("embed_tokens.weight", "lm_head.weight") else "float32"


def write_weights(
    plan: WeightPlan,
    load: Load,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Stream every tensor to ``path``, some rows in memory at a time; flushed to disk.

    Args:
        load: canonical tensor by name, or some of its rows, any floating dtype.
        progress: called with bytes written and bytes in all.

    Returns:
        sha256 of the file.

    Raises:
        BadInputError: a tensor holds NaN or Inf, or a value that the target dtype cannot hold.
    """
    digest, total = hashlib.sha256(), plan.bytes
    regions = sorted(plan.tensors.values(), key=lambda region: region.offset)
    with path.open("wb") as stream:

        def write(data: memoryview | bytes) -> None:
            stream.write(data)
            digest.update(data)

        for region in regions:
            if region.offset < stream.tell():  # the tied head
                continue
            write(bytes(region.offset - stream.tell()))
            for piece in row_pieces(region.shape, region.bytes):
                write(_converted(region, load(region.name, piece), piece.start))
                progress(stream.tell(), total)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def row_pieces(shape: tuple[int, ...], size: int) -> Iterator[slice]:
    """Rows of a tensor of ``size`` bytes in pieces of bounded size."""
    step = max(1, _PIECE_BYTES * shape[0] // max(size, 1))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def read_tensor(path: Path, region: WeightRegion, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
    """The tensor, or some of its rows, back from the file, in its stored dtype."""
    return TensorEntry(region.name, _CODES[region.dtype], region.shape, path, region.offset, region.bytes).load(rows)


def _converted(region: WeightRegion, tensor: torch.Tensor, first_row: int) -> memoryview:
    import torch

    if not bool(tensor.isfinite().all()):
        bad = (~tensor.isfinite()).reshape(tensor.shape[0], -1).any(dim=1).nonzero()[:5, 0]
        rows = (bad + first_row).tolist()
        raise BadInputError(f"{region.name} holds NaN or Inf, in rows {rows}", tensor=region.name, rows=rows)
    converted = tensor.to(getattr(torch, region.dtype)).contiguous()
    if region.dtype != "int64" and not bool(converted.isfinite().all()):
        largest = float(tensor.abs().max())
        raise BadInputError(
            f"{region.name} reaches {largest:.4g}, which {region.dtype} cannot hold; use --dtype bf16 or fp32",
            tensor=region.name,
            largest=largest,
        )
    return converted.view(torch.uint8).numpy().data.cast("B")


def _groups(config: DrafterConfig) -> list[list[str]]:
    """Tensors in file order; those of one group lie behind each other without a gap."""
    fused, remaining = [], list(tensor_shapes(config))
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        for suffix in ("weight", "bias") if config.attention_bias else ("weight",):
            fused.append([f"{attention}.{p}_proj.{suffix}" for p in ("qk" if config.k_eq_v else "qkv")])
        fused.append([f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"])
    members = {name for group in fused for name in group}
    return [*fused, *([name] for name in remaining if name not in members)]
