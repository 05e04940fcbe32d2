"""A drafter's checkpoint, opened and checked before any weight is read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .config import DrafterConfig
from .draft_vocabulary import draft_to_target
from .errors import BadInputError
from .formats import format_of
from .formats.gguf import bare_name
from .formats.reading import OPEN, Settled, Source
from .target import TargetFolder
from .tensor_folder import FLOATING_DTYPES, TensorEntry, TensorFolder, open_tensor_folder, read_config, shown
from .tensors import DRAFT_TO_TARGET, SHARED_TENSORS, stored_rows, tensor_shapes

if TYPE_CHECKING:
    import torch

_PREFIXES = ("model.", "draft_model.", "logit_head.")  # of containers that the tensors were once part of
_LISTED = 100  # faults in one message
_UNUSED = re.compile(r"t2d|(.*\.)?rotary_emb\..*|verifier_(norm|lm_head)\.weight")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Canonical view of a checkpoint; ``target`` supplies the shared tensors that it leaves out."""

    path: Path
    config: DrafterConfig
    folder: TensorFolder
    names: dict[str, str]  # canonical name -> name in the files
    target: TargetFolder | None = None
    origins: dict[str, str] = field(default_factory=dict)  # canonical key -> which key of which file said so
    warnings: tuple[str, ...] = ()
    target_said: dict[str, Any] = field(default_factory=dict)  # what the checkpoint says of its target
    d2t: NDArray[np.int64] | None = None  # target id of each draft token

    @property
    def missing_shared(self) -> tuple[str, ...]:
        """Embedding and head, where the checkpoint does not hold them."""
        return tuple(name for name in SHARED_TENSORS if self.names[name] not in self.folder.entries)

    def load(self, name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """The tensor of this canonical name, or some of its rows, in the dtype it is stored in.

        Raises:
            BadInputError: it is the target's, and no target was given.
        """
        if name == DRAFT_TO_TARGET:
            import torch

            assert self.d2t is not None
            return torch.from_numpy(self.d2t)[slice(None) if rows is None else rows]
        used = tensor_shapes(self.config)[name][0]
        if rows is None and self._stored_rows(name) > used:
            rows = slice(0, used)
        if name not in self.missing_shared:
            return self.folder.load(self.names[name], rows)
        if self.target is None:
            raise BadInputError(
                f"{self.path}: holds no {name}; give the target that it was trained for with --target",
                missing=list(self.missing_shared),
            )
        return self.target.load(name, rows)

    def parameters(self) -> int:
        """Number of weights in the files."""
        return sum(math.prod(entry.shape) for entry in self.folder.entries.values() if is_weight(entry))

    def sha256(self) -> str:
        """Identity of what is exported: the checkpoint's files, and the target's where its tensors are used."""
        own = self.folder.sha256()
        return own if not self.missing_shared or self.target is None else f"{own}+{self.target.sha256()}"

    def _stored_rows(self, name: str) -> int:
        if name not in self.missing_shared:
            return self.folder.entries[self.names[name]].shape[0]
        return self.target.embedding_rows if self.target is not None else 0


def open_checkpoint(path: Path, target: TargetFolder | None = None, settled: Settled = OPEN) -> Checkpoint:
    """Read configuration and headers, and check each against the other and against the target.

    Args:
        path: a model folder, a GGUF file, or a folder that holds one.
        settled: what the user says where the checkpoint leaves it open.

    Raises:
        BadInputError: everything that is wrong, in one message.
    """
    faults: list[str] = []
    details: dict[str, Any] = {}
    source, folder, stored = _open_source(path, settled, faults)
    module = format_of(source)
    try:
        reading = module.read(source)
    except BadInputError as error:
        said = dict(error.details)
        said["faults"] = [*said.get("faults", ()), *faults]
        raise BadInputError("; ".join([_placed(error.message, source), *faults]), **said) from error
    config = reading.config
    if target is not None:
        config = _for_target(config, target)
    names = {canonical: stored.get(name, name) for canonical, name in module.tensor_names(config).items()}
    checkpoint = Checkpoint(
        path, config, folder, names, target, reading.origins, reading.warnings, dict(reading.target)
    )
    faults += _tensor_faults(checkpoint, module)
    d2t, vocabulary_faults, vocabulary_warnings, option = draft_to_target(config, source, module)
    faults += vocabulary_faults
    if option:
        details["settle_with"] = [option]
    faults += target.faults(config) if target else ()
    if faults:
        listed = "; ".join([*faults[:_LISTED], *([f"and {len(faults) - _LISTED} more"] if faults[_LISTED:] else [])])
        raise BadInputError(f"{path}: {listed}", path=str(path), layout=config.layout, faults=faults, **details)
    warnings = (*reading.warnings, *vocabulary_warnings, *_ignored(checkpoint))
    return dataclasses.replace(checkpoint, d2t=d2t, warnings=warnings)


def _placed(message: str, source: Source) -> str:
    """A message about the configuration, with the place that it came from."""
    return message if str(source.path) in message else f"{source.file}: {message}"


def _open_source(path: Path, settled: Settled, faults: list[str]) -> tuple[Source, TensorFolder, dict[str, str]]:
    """What a layout reads, the tensors, and stored names by name without a container's prefix."""
    stored: dict[str, str]
    gguf = _gguf_file(path)
    if gguf is not None:
        from .gguf_file import open_gguf

        file = open_gguf(gguf)
        stored = {bare_name(name): name for name in file.tensors.entries}
        entries = {bare: file.tensors.entries[name] for bare, name in stored.items()}
        return Source(path, str(gguf), file.metadata, entries, settled), file.tensors, stored
    data = read_config(path)
    try:
        folder = open_tensor_folder(path)
    except BadInputError as error:
        faults.append(error.message)
        folder = TensorFolder(path, {})
    stored = {}
    for name in folder.entries:
        bare = _without_prefix(name)
        if bare in stored:
            faults.append(f"{shown(name)} and {shown(stored[bare])} are the same tensor by their names")
        stored[bare] = name
    entries = {bare: folder.entries[name] for bare, name in stored.items()}
    return Source(path, str(path / "config.json"), data, entries, settled), folder, stored


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that ``path`` is or holds."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise BadInputError(f"{path}: holds {len(files)} GGUF files; give the one that is the drafter")
        return files[0] if files else None
    return None


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _for_target(config: DrafterConfig, target: TargetFolder) -> DrafterConfig:
    """What only the target can say: its depth, and which rows of a vocabulary are padding."""
    changes: dict[str, Any] = {}
    if config.num_target_layers is None:
        if config.tap_faults(target.num_hidden_layers):
            return config  # told by the target's faults
        changes["num_target_layers"] = target.num_hidden_layers
    rows = target.embedding_rows
    if config.vocab_size == config.draft_vocab_size == rows > target.vocab_size > config.mask_token_id:
        changes["vocab_size"] = target.vocab_size
    return dataclasses.replace(config, **changes) if changes else config


def _tensor_faults(checkpoint: Checkpoint, module: ModuleType) -> Iterable[str]:
    entries, config = checkpoint.folder.entries, checkpoint.config
    if not entries:
        return  # told by the files' own fault
    readable = getattr(module, "DTYPES", FLOATING_DTYPES)
    for name, shape in tensor_shapes(config).items():
        entry = entries.get(checkpoint.names[name])
        if entry is None:
            # Rows of a reduced vocabulary are the drafter's own; the target's would be other tokens
            if name not in SHARED_TENSORS or (name == "lm_head.weight" and config.reduced_vocabulary):
                yield f"the tensor {checkpoint.names[name]} {list(shape)} is missing"
        elif entry.shape not in [(rows, *shape[1:]) for rows in stored_rows(config, name)]:
            wanted = [stored_rows(config, name)[-1], *shape[1:]]
            yield f"{shown(entry.name)} is {list(entry.shape)} in {entry.file.name}, the configuration says {wanted}"
        elif name != DRAFT_TO_TARGET and entry.dtype not in readable:
            yield f"{shown(entry.name)} has dtype {entry.dtype}, read are {', '.join(readable)}"
    unread = sorted(name for name in _unread(checkpoint) if not _UNUSED.fullmatch(_without_prefix(name)))
    if unread:
        listed = ", ".join(shown(name) for name in unread[:20]) + (", …" if len(unread) > 20 else "")
        yield f"tensors that this layout does not have ({len(unread)}): {listed}"


def _unread(checkpoint: Checkpoint) -> set[str]:
    read = set(checkpoint.names.values())
    if not checkpoint.config.reduced_vocabulary:
        read.add(DRAFT_TO_TARGET)  # the identity, checked apart
    return {
        name
        for name in checkpoint.folder.entries
        if name not in read and _without_prefix(name) not in read and bare_name(name) not in read
    }


def _ignored(checkpoint: Checkpoint) -> Iterable[str]:
    ignored = sorted(name for name in _unread(checkpoint) if _without_prefix(name) != "t2d")
    if ignored:
        yield f"not used: {', '.join(shown(name) for name in ignored)}"


def is_weight(entry: TensorEntry) -> bool:
    """Whether the tensor is a weight, not a map of ids."""
    return entry.dtype not in ("I64", "I32", "BOOL")
