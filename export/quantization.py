"""Weight-only quantisation: which matrices, in which numbers, and how their bytes lie in the weight file.

Symmetric, without zero points: block j of an output's weights has one scale, and a weight is its integer times that.
Matrices are stored as ONNX's ``DequantizeLinear`` and a product want them: integers [in, out], scales [in/block, out],
which is the one form that ONNX Runtime fuses into its low-bit product and that TensorRT reads as well. Two int4 lie in
a byte, the first in the low half (ONNX, ``TensorProto.raw_data``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError, UsageError
from dspark.drafter.tensors import tensor_shapes

if TYPE_CHECKING:
    import torch

    from dspark.drafter.parameters import Load

Kind = Literal["int8", "int4"]
KINDS: tuple[Kind, ...] = ("int8", "int4")
BLOCKS = (64, 128)  # what TensorRT's int4 takes, 32 aside
OPSET = 21  # the first with int4 and with blocks
_SCALES = ".scales"
_LARGEST = {"int8": 127, "int4": 7}  # of either sign, so that no weight is favoured by its sign


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a bundle are quantised. Checked when it is made.

    Raises:
        UsageError: no such kind or block.
    """

    kind: Kind
    block: int = 64  # weights of one output that share a scale

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"quantization {self.kind!r} is none of {', '.join(KINDS)}")
        if self.block not in BLOCKS:
            raise UsageError(f"quantization block {self.block} is none of {', '.join(map(str, BLOCKS))}")

    def __str__(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "block": self.block}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Quantization:
        return cls(data["kind"], data["block"])

    def check_fit(self, config: DrafterConfig) -> None:
        """Refuse a drafter with a matrix that does not fall into whole blocks; it would stay large unnoticed.

        Raises:
            BadInputError: with every such tensor and its sizes.
        """
        shapes = tensor_shapes(config)
        names = quantized_names(config)
        uneven = {name: shapes[name][1] for name in names if shapes[name][1] % self.block}
        if uneven:
            fitting = [block for block in BLOCKS if all(shapes[name][1] % block == 0 for name in names)]
            advice = f"use --quantize-block {fitting[-1]}" if fitting else "export without --quantize"
            raise BadInputError(
                f"{_first(uneven)} inputs, which are no whole blocks of {self.block}; {advice}", tensors=uneven
            )
        odd = {name: shapes[name][0] for name in names if shapes[name][0] % 2}
        if self.kind == "int4" and odd:
            raise BadInputError(
                f"{_first(odd)} outputs, and int4 lies two by two in bytes; use --quantize int8", tensors=odd
            )


def _first(sizes: dict[str, int]) -> str:
    """The first of several tensors with its size, and how many there are."""
    name, size = next(iter(sizes.items()))
    return f"{name} {f'(and {len(sizes) - 1} more) ' if len(sizes) > 1 else ''}has {size}"


def quantized_names(config: DrafterConfig) -> tuple[str, ...]:
    """The matrices of the layers and the head. Everything else is gathered, small, or fp32 by contract."""
    return tuple(
        name
        for name in tensor_shapes(config)
        if name == "lm_head.weight" or (name.startswith("layers.") and name.endswith("_proj.weight"))
    )


def scales_name(name: str) -> str:
    return f"{name}{_SCALES}"


def is_scales(name: str) -> bool:
    return name.endswith(_SCALES)


def quantize(matrix: torch.Tensor, how: Quantization, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a matrix [out, in] -> integers [out, in] int8 and scales [out, in/block] of ``dtype``.

    A weight is rounded against the scale as it is stored, so the two belong together whatever ``dtype`` holds.
    """
    import torch

    largest = _LARGEST[how.kind]
    blocks = matrix.float().reshape(len(matrix), -1, how.block)  # [out, in/block, block]
    scales = (blocks.abs().amax(dim=2) / largest).to(getattr(torch, dtype))
    scales = torch.where(scales == 0, 1, scales)  # a block of zeros; TensorRT wants a positive scale
    integers = (blocks / scales.float()[..., None]).round_().clamp_(-largest, largest)
    return integers.to(torch.int8).flatten(1), scales


def dequantize(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Integers [out, in] and scales [out, in/block] -> weights [out, in] fp32, exact."""
    blocks = integers.float().reshape(*scales.shape, -1)
    return (blocks * scales.float()[..., None]).flatten(1)


def packed(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """int4 values [rows, columns] as bytes [rows, columns/2]."""
    halves = integers.view(np.uint8) & 15
    return np.asarray(halves[:, ::2] | halves[:, 1::2] << 4, np.uint8)


def unpacked(data: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The inverse of :func:`packed`."""
    pairs = np.stack([data << 4, data & 0xF0], axis=-1).view(np.int8)
    return (pairs >> 4).reshape(len(data), -1)


def quantized_load(load: Load, config: DrafterConfig, how: Quantization, dtype: str) -> Load:
    """``load`` with quantised weights in the place of the matrices that ``how`` quantises, in fp32."""
    names = frozenset(quantized_names(config))

    def quantized(name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        tensor = load(name, rows)
        return dequantize(*quantize(tensor, how, dtype)) if name in names else tensor

    return quantized
