"""GGUF files: metadata and tensor headers, every count checked against the file's size before it is believed.

The header is read here, since the ``gguf`` library trusts counts and reads every string of a vocabulary; quantised
tensors are dequantised by that library. Source: the GGUF specification of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from .errors import BadInputError, NotAvailableError
from .tensor_folder import TORCH_DTYPES, TensorEntry, TensorFolder, shown

if TYPE_CHECKING:
    import torch

PLAIN = {0: "F32", 1: "F16", 30: "BF16", 27: "I64", 26: "I32"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT = 4096  # an array with more entries (a vocabulary) is skipped over, and stands as its length
_MAX_ENTRIES = 1 << 16  # of metadata and of tensors; a drafter has some hundred


@dataclass(frozen=True, slots=True)
class Skipped:
    """A metadata array that was not read."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufEntry(TensorEntry):
    """A tensor of a GGUF file; ``shape`` is in the usual order, rows first."""

    kind: int = 0  # ggml type
    narrowed: str = ""  # what an fp32 vector was before it was widened for ggml

    @property
    def loaded_dtype(self) -> str:
        return (self.narrowed or self.dtype) if self.kind in PLAIN else "F32"

    def load(self, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, or some of its rows: plain types as they are, quantised ones as fp32."""
        if self.kind in PLAIN:
            tensor = TensorEntry.load(self, rows)
            return tensor.to(_dtype(self.narrowed)) if self.narrowed else tensor
        import torch

        quants = import_gguf().quants
        raw = TensorEntry(self.name, "U8", (self.shape[0], self.bytes // self.shape[0]), self.file, self.offset,
                          self.bytes)  # fmt: skip
        data = quants.dequantize(raw.load(rows).numpy(), import_gguf().GGMLQuantizationType(self.kind))
        return torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).view(-1, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """``metadata`` by key; long arrays are :class:`Skipped`."""

    metadata: dict[str, Any]
    tensors: TensorFolder


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise NotAvailableError("gguf is not installed; pip install 'dspark-export[gguf]'") from error
    return gguf


def open_gguf(file: Path) -> GgufFile:
    """Read a GGUF file's header.

    Raises:
        BadInputError: it is cut short or damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            return _Header(file, stream, size).read()
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read: {error.strerror}") from error


def _dtype(code: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[code])
    return dtype


class _Header:
    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.stream, self.size = file, stream, size

    def read(self) -> GgufFile:
        if self.stream.read(4) != b"GGUF":
            raise self._wrong("does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._wrong(f"has GGUF version {version}, read are 2 and 3")
        tensors, pairs = self._count("tensors"), self._count("metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            if key in metadata:
                raise self._wrong(f"the key {shown(key)} stands twice")
            metadata[key] = self._value(self._scalar("I"), key)
        infos = [self._tensor_info() for _ in range(tensors)]
        if not infos:
            raise self._wrong("holds no tensors")
        narrowed = metadata.get("dspark_export.vector_dtype")
        self.narrowed = narrowed if narrowed in ("F16", "BF16") else ""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._wrong(f"general.alignment is {alignment!r}")
        start = -(-self.stream.tell() // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in infos:
            if name in entries:
                raise self._wrong(f"the tensor {shown(name)} stands twice")
            entries[name] = self._entry(name, shape, kind, start + offset)
        self._check_overlap(entries)
        return GgufFile(metadata, TensorFolder(self.file, entries))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._scalar("I")
        if dims > 4:
            raise self._wrong(f"the tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        return name, shape, kind, offset

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufEntry:
        block, bytes_per_block, dtype = self._layout(name, kind)
        elements = math.prod(shape)
        if shape and shape[-1] % block:
            raise self._wrong(f"the tensor {shown(name)} {list(shape)} is no multiple of {dtype}'s block of {block}")
        size = elements // block * bytes_per_block
        if offset + size > self.size:
            raise self._wrong(
                f"the tensor {shown(name)} {dtype} {list(shape)} ends at {offset + size}, the file at {self.size}; "
                "copy it again"
            )
        narrowed = self.narrowed if len(shape) == 1 and dtype == "F32" else ""
        return GgufEntry(name, dtype, shape, self.file, offset, size, kind, narrowed)

    def _layout(self, name: str, kind: int) -> tuple[int, int, str]:
        """Elements and bytes of one block of a ggml type, and its name."""
        plain = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
        if kind in PLAIN:
            return 1, plain[PLAIN[kind]], PLAIN[kind]
        gguf = import_gguf()
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
            block, size = gguf.GGML_QUANT_SIZES[quantisation]
        except (ValueError, KeyError) as error:
            raise self._wrong(f"the tensor {shown(name)} has the unknown type {kind}") from error
        return block, size, str(quantisation.name)

    def _check_overlap(self, entries: dict[str, TensorEntry]) -> None:
        end, last = 0, ""
        for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.bytes)):
            if entry.offset < end:
                raise self._wrong(f"the tensors {shown(last)} and {shown(entry.name)} overlap")
            end, last = entry.offset + entry.bytes, entry.name

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._wrong(f"the key {shown(key)} has the unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            width = struct.calcsize(_SCALARS[item])
            self._require(count * width, f"the array {shown(key)} of {count} entries")
            if count <= _KEPT:
                return [self._scalar(_SCALARS[item]) for _ in range(count)]
            self.stream.seek(count * width, 1)
            return Skipped(count)
        if item != _STRING:
            raise self._wrong(f"the array {shown(key)} has entries of the type {item}")
        self._require(count * 8, f"the array {shown(key)} of {count} entries")
        if count <= _KEPT:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            length = self._scalar("Q")
            self._require(length, f"an entry of the array {shown(key)}")
            self.stream.seek(length, 1)
        return Skipped(count)

    def _string(self) -> str:
        length = self._scalar("Q")
        self._require(length, f"a string of {length} bytes")
        return self.stream.read(length).decode("utf-8", errors="replace")

    def _count(self, what: str) -> int:
        count: int = self._scalar("Q")
        if count > _MAX_ENTRIES:
            raise self._wrong(f"claims {count} {what}")
        return count

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        data = self.stream.read(size)
        if len(data) != size:
            raise self._wrong(f"ends within its header, at {self.size} bytes; copy it again")
        value = struct.unpack(f"<{code}", data)[0]
        # The shortest decimal that is this fp32 number: 1e-05, not 9.999999747378752e-06
        return float(str(np.float32(value))) if code == "f" else value

    def _require(self, size: int, what: str) -> None:
        if size > self.size - self.stream.tell():
            raise self._wrong(f"{what} is more than the file holds ({self.size} bytes); copy it again")

    def _wrong(self, what: str) -> BadInputError:
        return BadInputError(f"{self.file}: {what}", file=str(self.file), size=self.size)
