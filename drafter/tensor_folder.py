"""Tensors in safetensors files: all headers checked at once, and the rows of one tensor at a time.

The header of a file is read here, not by the safetensors library, so that a damaged one is told with file, tensor
and both numbers, and so that rows can be read without mapping a file into memory. Source: the safetensors format
(8 bytes of header length, JSON, then the tensors without gap or overlap).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import BadInputError

if TYPE_CHECKING:
    import torch

FLOATING_DTYPES = ("F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"
CONFIG_BYTES = 1 << 24  # a configuration is some kilobytes
_HEADER_BYTES = 100_000_000  # what the safetensors library allows
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
TORCH_DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file's header states it."""

    name: str
    dtype: str  # safetensors code: F32, F16, BF16, …; of a GGUF file its own, Q4_K, …
    shape: tuple[int, ...]
    file: Path
    offset: int = 0  # of the first byte, from the start of the file
    bytes: int = 0  # in the file

    @property
    def loaded_dtype(self) -> str:
        """The safetensors code of what :meth:`load` gives."""
        return self.dtype

    def load(self, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, or some of its rows, in the dtype it is stored in; nothing else is read."""
        import torch

        if self.dtype not in TORCH_DTYPES:
            raise BadInputError(f"{self.file}: {self.name} has dtype {self.dtype}, which cannot be read")
        dtype, width = getattr(torch, TORCH_DTYPES[self.dtype]), self.shape[1:]
        wanted = range(self.shape[0])[rows] if isinstance(rows, slice) else rows
        try:
            with self.file.open("rb") as stream:
                data = _read(stream, self, wanted)
        except OSError as error:
            raise BadInputError(f"{self.file}: {self.name} cannot be read: {error.strerror}") from error
        if not data:
            return torch.empty((0, *width), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(self.shape if wanted is None else (len(wanted), *width))

    def integers(self) -> NDArray[np.int64]:
        """A tensor of integers or booleans, flat; without torch."""
        kinds = {"I64": "<i8", "I32": "<i4", "BOOL": "u1", "U8": "u1"}
        with self.file.open("rb") as stream:
            return np.frombuffer(_read(stream, self), dtype=kinds[self.dtype]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TensorFolder:
    """``entries`` by stored name; no tensor data is read until one is loaded."""

    path: Path
    entries: dict[str, TensorEntry]

    def load(self, name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, or some of its rows, in the dtype it is stored in."""
        return self.entries[name].load(rows)

    def sha256(self) -> str:
        """Hash over ``config.json`` and every weight file, in order of file name."""
        digest = hashlib.sha256()
        config = [self.path / "config.json"] if self.path.is_dir() else []
        for file in [*config, *sorted({entry.file for entry in self.entries.values()})]:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a model folder.

    Raises:
        BadInputError: no such folder, no ``config.json`` in it, or no JSON object in that.
    """
    if not path.exists():
        raise BadInputError(f"{path}: no such file or folder", path=str(path))
    if not path.is_dir():
        raise BadInputError(f"{path}: is a file; give the folder that holds config.json", path=str(path))
    file = path / "config.json"
    if not file.is_file():
        raise BadInputError(f"{path}: holds no config.json, so it is no checkpoint", path=str(path))
    return read_json_object(_inside(path, file), CONFIG_BYTES)


def read_json_object(file: Path, limit: int) -> dict[str, Any]:
    """A JSON object of at most ``limit`` bytes; a key that stands twice is refused."""
    size = file.stat().st_size
    if size > limit:
        raise BadInputError(f"{file}: has {size} bytes, over {limit} it is no such file", size=size)
    try:
        data = json.loads(file.read_bytes(), object_pairs_hook=_unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{file}: not readable as JSON: {_short(error)}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{file}: holds a JSON {type(data).__name__}, it must be an object")
    return data


def open_tensor_folder(path: Path) -> TensorFolder:
    """Read the headers of ``model.safetensors``, or of every shard that its index names.

    Raises:
        BadInputError: no weight file, a damaged one, or a shard outside the folder; all of them in one message.
    """
    faults: list[str] = []
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(path, faults):
        try:
            for entry in read_header(file):
                if entry.name in entries:
                    faults.append(f"{file}: {shown(entry.name)} is also in {entries[entry.name].file.name}")
                entries[entry.name] = entry
        except BadInputError as error:
            faults.append(error.message)
    if not entries and not faults:
        faults.append(f"{path}: its weight files hold no tensors")
    if faults:
        raise BadInputError("; ".join(faults), path=str(path), faults=faults)
    return TensorFolder(path, entries)


def read_header(file: Path) -> list[TensorEntry]:
    """Every tensor of a safetensors file; sizes and offsets are checked against each other and the file.

    Raises:
        BadInputError: the file is cut short or damaged.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_HEADER_BYTES, size - 8):
                raise BadInputError(
                    f"{file}: not a complete safetensors file: it has {size} bytes, its header claims {length}; "
                    "copy it again",
                    size=size,
                    header=length,
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{file}: its safetensors header is no JSON: {_short(error)}; copy it again") from error
    if not isinstance(header, dict):
        raise BadInputError(f"{file}: its safetensors header is a JSON {type(header).__name__}, no object")
    entries = [_entry(file, name, data, 8 + length) for name, data in header.items() if name != "__metadata__"]
    _check_layout(file, entries, 8 + length, size)
    return entries


def write_safetensors(
    file: Path, shapes: Sequence[tuple[str, str, tuple[int, ...]]], data: Iterable[Iterable[bytes | memoryview]]
) -> None:
    """Stream tensors to a file.

    Args:
        shapes: name, safetensors dtype and shape of each tensor, in file order.
        data: for each tensor its bytes, in pieces.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in shapes:
        size = math.prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for pieces in data:
            for piece in pieces:
                stream.write(piece)
    if file.stat().st_size != 8 + len(text) + offset:
        raise AssertionError(f"{file}: tensors are not of the size that was announced")


def _weight_files(path: Path, faults: list[str]) -> list[Path]:
    single, index = path / "model.safetensors", path / INDEX
    if single.is_file():
        return [_inside(path, single)]
    if index.is_file():
        names = read_json_object(_inside(path, index), _HEADER_BYTES).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise BadInputError(f"{index}: weight_map must be an object of tensor name to file name")
        files = []
        for name in sorted(set(names.values())):
            try:
                if Path(name).name != name or "\0" in name or not (path / name).is_file():
                    raise BadInputError(f"{index}: names the shard {name[:200]!r}, which is no file of this folder")
                files.append(_inside(path, path / name))
            except BadInputError as error:
                faults.append(error.message)
            except OSError as error:  # a name too long
                faults.append(f"{index}: names the shard {name[:80]!r}: {error.strerror}")
        return files
    if (path / "pytorch_model.bin").exists():
        raise BadInputError(f"{path}: holds pytorch_model.bin only, a pickle; save it as safetensors")
    raise BadInputError(f"{path}: holds no model.safetensors and no {INDEX}", path=str(path))


def _inside(folder: Path, file: Path) -> Path:
    """The file, if it lies in the folder behind all links; a hub snapshot links to the blobs beside it."""
    try:
        root, real = folder.resolve(strict=True), file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise BadInputError(f"{file}: cannot be followed to a file: {error}") from error
    allowed = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(place) for place in allowed):
        raise BadInputError(f"{file}: links to {real}, outside of {folder}", file=str(file), link=str(real))
    return file


def _entry(file: Path, name: str, data: Any, start: int) -> TensorEntry:
    """One header entry; every number is checked before anything is computed from it."""

    def wrong(what: str) -> BadInputError:
        return BadInputError(f"{file}: {shown(name)}: {what}", file=str(file), tensor=shown(name))

    if not isinstance(data, dict):
        raise wrong(f"the header holds {_short(data)}, no object")
    dtype, shape, offsets = data.get("dtype"), data.get("shape"), data.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise wrong(f"dtype is {_short(dtype)}, none of {', '.join(_BITS)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_natural(extent) for extent in shape):
        raise wrong(f"shape is {_short(shape)}, it must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(offset) for offset in offsets):
        raise wrong(f"data_offsets is {_short(offsets)}, it must be two offsets")
    begin, end = offsets
    wanted = -(-math.prod(shape) * _BITS[dtype] // 8)
    if end - begin != wanted:
        raise wrong(f"data_offsets {offsets} hold {end - begin} bytes, {dtype} {shape} takes {wanted}")
    return TensorEntry(name, dtype, tuple(shape), file, start + begin, wanted)


def _check_layout(file: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """Tensors follow each other without gap or overlap, to the end of the file."""
    end, last = start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.bytes)):
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a gap to"
            raise BadInputError(
                f"{file}: {shown(entry.name)} at {entry.offset} {what} {shown(last)}, which ends at {end}; "
                "copy it again",
                file=str(file),
                tensor=shown(entry.name),
            )
        end, last = entry.offset + entry.bytes, entry.name
    if end != size:
        raise BadInputError(
            f"{file}: not a complete safetensors file: it has {size} bytes, its tensors end at {end}; copy it again",
            size=size,
            expected=end,
        )


def _read(stream: BinaryIO, entry: TensorEntry, rows: Sequence[int] | None = None) -> bytearray:
    """The tensor's bytes, or those of some rows; rows that follow each other are read at once."""
    size = entry.bytes // max(entry.shape[0], 1) if rows is not None else entry.bytes
    data = bytearray(size * (1 if rows is None else len(rows)))
    view, filled = memoryview(data), 0
    runs = (
        [(0, 1)] if rows is None else [(rows.start, len(rows))] if isinstance(rows, range) else [(r, 1) for r in rows]
    )
    for first, count in runs:
        stream.seek(entry.offset + first * size)
        if stream.readinto(view[filled : filled + count * size]) != count * size:  # type: ignore[attr-defined]
            raise BadInputError(f"{entry.file}: was cut short while it was read")
        filled += count * size
    return data


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands twice")
    return data


def shown(name: str) -> str:
    """A name out of a file, fit for a message."""
    return (name if name.isprintable() else ascii(name))[:200]


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else ascii(value)
    return text if len(text) <= 200 else text[:200] + "…"
