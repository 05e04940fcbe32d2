"""A folder of safetensors files: the headers of all tensors, and one tensor at a time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadInputError

if TYPE_CHECKING:
    import torch

FLOATING_DTYPES = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file's header states it."""

    name: str
    dtype: str  # safetensors code: F32, F16, BF16, …
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True, slots=True)
class TensorFolder:
    """``entries`` by stored name; no tensor data is read until :meth:`load`."""

    path: Path
    entries: dict[str, TensorEntry]

    def load(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype it is stored in."""
        from safetensors import SafetensorError, safe_open

        entry = self.entries[name]
        try:
            with safe_open(entry.file, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadInputError(f"{entry.file}: {name} cannot be read: {error}") from error
        return tensor

    def sha256(self) -> str:
        """Hash over ``config.json`` and every weight file, in order of file name."""
        digest = hashlib.sha256()
        for file in [self.path / "config.json", *sorted({entry.file for entry in self.entries.values()})]:
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
    return _json_object(file)


def open_tensor_folder(path: Path) -> TensorFolder:
    """Read the headers of ``model.safetensors``, or of every shard that its index names.

    Raises:
        BadInputError: no weight file, a damaged one, or a shard outside the folder.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(path):
        for entry in _header(file):
            if entry.name in entries:
                raise BadInputError(f"{file}: {entry.name} is also in {entries[entry.name].file.name}")
            entries[entry.name] = entry
    return TensorFolder(path, entries)


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = _json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise BadInputError(f"{index}: weight_map must be an object of tensor name to file name")
        for name in set(names.values()):
            if Path(name).name != name or not (path / name).is_file():
                raise BadInputError(f"{index}: names the shard {name!r}, which is no file of this folder")
        return [path / name for name in sorted(set(names.values()))]
    if (path / "pytorch_model.bin").exists():
        raise BadInputError(f"{path}: holds pytorch_model.bin only, a pickle; save it as safetensors")
    raise BadInputError(f"{path}: holds no model.safetensors and no {_INDEX}", path=str(path))


def _header(file: Path) -> list[TensorEntry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return [TensorEntry(name, str(s.get_dtype()), tuple(s.get_shape()), file) for name, s in slices.items()]
    except (OSError, SafetensorError) as error:
        size = file.stat().st_size
        raise BadInputError(
            f"{file}: not a complete safetensors file ({size} bytes): {error}; copy it again", size=size
        ) from error


def _json_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{file}: holds a JSON {type(data).__name__}, it must be an object")
    return data
