"""A drafter's checkpoint, opened and checked before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import DrafterConfig
from .errors import BadInputError
from .formats import format_of
from .target import TargetFolder
from .tensor_folder import FLOATING_DTYPES, TensorFolder, open_tensor_folder, read_config
from .tensors import SHARED_TENSORS, tensor_shapes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Canonical view of a checkpoint; ``target`` supplies the shared tensors that it leaves out."""

    path: Path
    config: DrafterConfig
    folder: TensorFolder
    names: dict[str, str]  # canonical name -> name in the files
    target: TargetFolder | None = None

    @property
    def missing_shared(self) -> tuple[str, ...]:
        """Embedding and head, where the checkpoint does not hold them."""
        return tuple(name for name in SHARED_TENSORS if self.names[name] not in self.folder.entries)

    def load(self, name: str) -> torch.Tensor:
        """The tensor of this canonical name, in the dtype it is stored in.

        Raises:
            BadInputError: it is the target's, and no target was given.
        """
        if name not in self.missing_shared:
            return self.folder.load(self.names[name])
        if self.target is None:
            raise BadInputError(
                f"{self.path}: holds no {name}; give the target that it was trained for with --target",
                missing=list(self.missing_shared),
            )
        return self.target.load(name)

    def parameters(self) -> int:
        """Number of weights in the files."""
        total = 0
        for entry in self.folder.entries.values():
            count = 1
            for size in entry.shape:
                count *= size
            total += count
        return total

    def sha256(self) -> str:
        """Identity of what is exported: the checkpoint's files, and the target's where its tensors are used."""
        own = self.folder.sha256()
        return own if not self.missing_shared or self.target is None else f"{own}+{self.target.sha256()}"


def open_checkpoint(path: Path, target: TargetFolder | None = None) -> Checkpoint:
    """Read configuration and headers, and check each against the other and against the target.

    Raises:
        BadInputError: everything that is wrong, in one message.
    """
    data = read_config(path)
    source = str(path / "config.json")
    module = format_of(data, source)
    config: DrafterConfig = module.config_from_json(data, source)
    checkpoint = Checkpoint(path, config, open_tensor_folder(path), module.tensor_names(config), target)
    faults = [*_tensor_faults(checkpoint), *(target.faults(config) if target else ())]
    if faults:
        raise BadInputError(f"{path}: " + "; ".join(faults), path=str(path), faults=faults)
    return checkpoint


def _tensor_faults(checkpoint: Checkpoint) -> Iterable[str]:
    entries, optional = checkpoint.folder.entries, set(SHARED_TENSORS)
    for name, shape in tensor_shapes(checkpoint.config).items():
        entry = entries.get(checkpoint.names[name])
        if entry is None:
            if name not in optional:
                yield f"the tensor {checkpoint.names[name]} {list(shape)} is missing"
        elif entry.shape != shape:
            yield f"{entry.name} is {list(entry.shape)} in {entry.file.name}, the configuration says {list(shape)}"
        elif entry.dtype not in FLOATING_DTYPES:
            yield f"{entry.name} has dtype {entry.dtype}, read are {', '.join(FLOATING_DTYPES)}"
    unread = sorted(set(entries) - set(checkpoint.names.values()))
    if unread:
        yield f"tensors that this layout does not have: {', '.join(unread)}"
