"""The one external weight file of a bundle: planned from the configuration, then written as a stream.

Matrices keep the checkpoint's orientation [out, in], so that tensors that lie behind each other can be read as
one: q, k, v of a layer are one [q+2·kv, h] matrix for ``block``, and k, v the last rows of it for ``context``.
Quantised matrices are turned, and lie with their scales behind them (``quantization``).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError
from dspark.drafter.tensor_folder import TensorEntry
from dspark.drafter.tensors import DRAFT_TO_TARGET, tensor_shapes

from .contract import Dtype
from .quantization import KINDS, Quantization, dequantize, packed, quantize, quantized_names, scales_name, unpacked

if TYPE_CHECKING:
    import torch

    from dspark.drafter.parameters import Load

FILE = "graphs/weights.data"
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int64": "I64"}
PAGE = 4096  # a group of tensors starts on a page, so that it can be memory-mapped
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4, "int64": 64}
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
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def quantized(self) -> bool:
        """Integers [in, out] of a canonical [out, in] matrix; their scales are a tensor of their own."""
        return self.dtype in KINDS

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "offset": self.offset}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WeightRegion:
        return cls(data["name"], data["dtype"], tuple(data["shape"]), data["offset"])


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where every canonical tensor goes, and the scales of quantised ones; ``tied``: the head reads the embedding."""

    tensors: dict[str, WeightRegion]
    tied: bool
    quantization: Quantization | None = None

    def quantized(self, name: str) -> bool:
        return self.tensors[name].quantized

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


def plan_weights(
    config: DrafterConfig, dtype: Dtype, tied: bool, quantization: Quantization | None = None
) -> WeightPlan:
    """Offsets of all tensors: layer matrices, embedding and head in ``dtype``, everything else fp32.

    What is quantised is integers, with scales in ``dtype``; a head that is the embedding then has bytes of its own.
    """
    shapes, regions, end = tensor_shapes(config), dict[str, WeightRegion](), 0
    integers = frozenset(quantized_names(config) if quantization else ())
    tied = tied and not integers
    for group in _groups(config):
        offset = -(-end // PAGE) * PAGE
        for name in group:
            if name == "lm_head.weight" and tied:
                continue
            stored, shape = stored_dtype(name, dtype), shapes[name]
            parts = [(name, stored, shape)]
            if quantization is not None and name in integers:
                rows, width = shape
                scales = (scales_name(name), stored, (width // quantization.block, rows))
                parts = [(name, quantization.kind, (width, rows)), scales]
            for part, kind, extents in parts:
                regions[part] = WeightRegion(part, kind, extents, offset)
                offset += regions[part].bytes
        end = offset
    if tied:
        embedding = regions["embed_tokens.weight"]
        regions["lm_head.weight"] = WeightRegion("lm_head.weight", embedding.dtype, embedding.shape, embedding.offset)
    return WeightPlan(regions, tied, quantization)


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
    with path.open("w+b") as stream:

        def write(data: bytes | memoryview) -> None:
            stream.write(data)
            digest.update(data)

        for region in regions:
            if region.offset < stream.tell():  # the tied head, and scales, which came with their matrix
                continue
            write(bytes(region.offset - stream.tell()))
            if region.quantized:
                _write_quantized(stream, plan, region, load, lambda done: progress(done, total))
                for data in _read_back(stream, region.offset):
                    digest.update(data)
                continue
            for piece in row_pieces(region.shape, region.bytes):
                write(_bytes(_converted(region.name, region.dtype, load(region.name, piece), piece.start)).data)
                progress(stream.tell(), total)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def row_pieces(shape: tuple[int, ...], size: int, of: int = 1) -> Iterator[slice]:
    """Rows of a tensor of ``size`` bytes in pieces of bounded size, each of a multiple of ``of`` rows but the last."""
    step = max(1, _PIECE_BYTES * shape[0] // max(size, 1) // of) * of
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def read_tensor(
    path: Path, tensors: Mapping[str, WeightRegion], name: str, rows: slice | Sequence[int] | None = None
) -> torch.Tensor:
    """A canonical tensor, or some of its rows, back from the file: in its stored dtype, or dequantised, in fp32."""
    region = tensors[name]
    if region.quantized:
        return _read_quantized(path, region, tensors[scales_name(name)], rows)
    return TensorEntry(name, _CODES[region.dtype], region.shape, path, region.offset, region.bytes).load(rows)


def _write_quantized(
    stream: BinaryIO, plan: WeightPlan, region: WeightRegion, load: Load, progress: Callable[[int], None]
) -> None:
    """Integers and scales of one matrix; rows that are read at a time are columns of both in the file."""
    assert plan.quantization is not None
    scales_region = plan.tensors[scales_name(region.name)]
    width, count = region.shape
    stream.flush()
    for piece in row_pieces((count, width), 4 * width * count, of=2):  # two int4 share a byte
        matrix = load(region.name, piece)
        _converted(region.name, scales_region.dtype, matrix, piece.start)
        integers, scales = quantize(matrix, plan.quantization, scales_region.dtype)
        turned = np.ascontiguousarray(integers.numpy().T)  # [in, rows]
        _write_columns(stream, region, piece.start, packed(turned) if region.dtype == "int4" else turned)
        _write_columns(stream, scales_region, piece.start, _bytes(scales.T.contiguous()).reshape(scales.shape[1], -1))
        progress(region.offset + (region.bytes + scales_region.bytes) * piece.stop // count)
    stream.seek(0, os.SEEK_END)


def _write_columns(stream: BinaryIO, region: WeightRegion, first: int, data: NDArray[Any]) -> None:
    """Rows of bytes from column ``first`` of a matrix of the file on."""
    rows = region.shape[0]
    row_bytes, start = region.bytes // rows, first * BITS[region.dtype] // 8
    for row, values in enumerate(data):
        os.pwrite(stream.fileno(), values, region.offset + row * row_bytes + start)


def _read_back(stream: BinaryIO, start: int) -> Iterator[bytes]:
    stream.seek(start)
    while data := stream.read(_PIECE_BYTES):
        yield data


def _read_quantized(
    path: Path, region: WeightRegion, scales_region: WeightRegion, rows: slice | Sequence[int] | None
) -> torch.Tensor:
    import torch

    count = region.shape[1]
    wanted = range(count)[rows if isinstance(rows, slice) else slice(None)]
    first, last = wanted.start // 2 * 2, min(count, -(-wanted.stop // 2) * 2)  # whole bytes of int4
    columns = _columns(path, region, first, last)
    integers = unpacked(columns) if region.dtype == "int4" else columns.view(np.int8)
    scales = torch.from_numpy(_columns(path, scales_region, first, last)).view(getattr(torch, scales_region.dtype))
    matrix = dequantize(torch.from_numpy(integers).T, scales.T)
    chosen = slice(wanted.start - first, wanted.stop - first) if rows is None or isinstance(rows, slice) else list(rows)
    return matrix[chosen]


def _columns(path: Path, region: WeightRegion, first: int, last: int) -> NDArray[np.uint8]:
    """Bytes of columns ``first`` to ``last`` of a matrix of the file, a copy."""
    bits, rows = BITS[region.dtype], region.shape[0]
    data = np.memmap(path, np.uint8, "r", region.offset, (rows, region.bytes // rows))
    return np.array(data[:, first * bits // 8 : -(-last * bits // 8)])


def _converted(name: str, dtype: str, tensor: torch.Tensor, first_row: int) -> torch.Tensor:
    import torch

    if not bool(tensor.isfinite().all()):
        bad = (~tensor.isfinite()).reshape(tensor.shape[0], -1).any(dim=1).nonzero()[:5, 0]
        rows = (bad + first_row).tolist()
        raise BadInputError(f"{name} holds NaN or Inf, in rows {rows}", tensor=name, rows=rows)
    converted = tensor.to(getattr(torch, dtype)).contiguous()
    if dtype != "int64" and not bool(converted.isfinite().all()):
        largest = float(tensor.abs().max())
        raise BadInputError(
            f"{name} reaches {largest:.4g}, which {dtype} cannot hold; use --dtype bf16 or fp32",
            tensor=name,
            largest=largest,
        )
    return converted


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor as they lie in the file."""
    import torch

    data: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return data


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
