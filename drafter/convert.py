"""A checkpoint in another layout: the same weights bit for bit, the same configuration, or a refusal by name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomic import atomic_folder, check_output, check_space
from .checkpoint import Checkpoint, open_checkpoint
from .errors import BadInputError, CheckFailedError, UsageError
from .formats import NAMES, gguf
from .formats.writing import Unwritable
from .tensor_folder import TORCH_DTYPES, write_safetensors
from .tensors import DRAFT_TO_TARGET, SHARED_TENSORS, tensor_shapes

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]
_PIECE_ROWS = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CODES = {name: code for code, name in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write; ``rows`` gives some of its rows."""

    name: str  # in the new layout
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    rows: Callable[[slice], torch.Tensor]

    def pieces(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.shape[0], _PIECE_ROWS):
            yield self.rows(slice(start, min(start + _PIECE_ROWS, self.shape[0])))


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion writes, known before any weight is read."""

    module: ModuleType
    config: dict[str, Any]
    tensors: tuple[Tensor, ...]
    left_out: tuple[str, ...]  # shared tensors that are the target's own, bit for bit

    @property
    def bytes(self) -> int:
        sizes = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}
        return sum(int(np.prod(tensor.shape)) * sizes[tensor.dtype] for tensor in self.tensors)


def plan_conversion(checkpoint: Checkpoint, layout: str) -> Conversion:
    """Lay out the new checkpoint.

    Raises:
        BadInputError: the layout has no place for something, or a tensor has to come from a target.
    """
    module, config = NAMES[layout], checkpoint.config
    try:
        data = module.config_to_json(config)
    except Unwritable as error:
        raise BadInputError(f"{checkpoint.path}: the {layout} layout cannot hold {error.message}") from error
    names: dict[str, str] = module.tensor_names(config)
    left_out = _left_to_target(checkpoint, layout)
    tensors = []
    for canonical in tensor_shapes(config):
        if canonical in left_out:
            continue
        if canonical == DRAFT_TO_TARGET:
            tensors += _draft_vocabulary(checkpoint, module)
        else:
            tensors.append(_stored(checkpoint, canonical, names[canonical]))
    return Conversion(module, data, tuple(tensors), left_out)


def convert(
    checkpoint: Checkpoint,
    layout: str,
    output: Path,
    force: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Conversion:
    """Write ``checkpoint`` to the folder ``output`` in another layout, read it back and compare.

    Raises:
        BadInputError: the layout cannot hold it. CheckFailedError: what was written reads differently.
        UsageError, NotAvailableError: the output cannot be written; nothing is left.
    """
    check_output(output, force)
    if output.is_dir() and any(output.iterdir()) and not _is_checkpoint(output):
        raise UsageError(f"{output}: holds something that is no checkpoint, --force does not replace it")
    conversion = plan_conversion(checkpoint, layout)
    check_space(output, conversion.bytes + (1 << 20))
    with atomic_folder(output, force) as staging:
        _write(checkpoint, conversion, staging, progress)
        _compare(checkpoint, conversion, staging, progress)
    return conversion


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _left_to_target(checkpoint: Checkpoint, layout: str) -> tuple[str, ...]:
    """Embedding and head that the new layout takes from the target.

    They are left out where they are the target's own; without a target to compare with they stay.
    """
    import torch

    absent = checkpoint.missing_shared
    if layout == "deepspec":
        if absent and checkpoint.target is None:
            raise BadInputError(
                f"{checkpoint.path}: holds no {', '.join(absent)}, which the {layout} layout stores; "
                "give the target with --target",
                missing=list(absent),
            )
        return ()
    if checkpoint.target is None:
        return absent
    if layout == "speculators":  # stores them
        return ()
    left_out = list(absent)
    for name in SHARED_TENSORS:
        if name in absent:
            continue
        rows, target = tensor_shapes(checkpoint.config)[name][0], checkpoint.target
        pieces = [slice(i, min(i + _PIECE_ROWS, rows)) for i in range(0, rows, _PIECE_ROWS)]
        if all(torch.equal(checkpoint.load(name, piece), target.load(name, piece)) for piece in pieces):
            left_out.append(name)
    return tuple(left_out)


def _stored(checkpoint: Checkpoint, canonical: str, name: str) -> Tensor:
    """A tensor as the files hold it, rows that pad the vocabulary included."""
    if canonical in checkpoint.missing_shared:
        first = checkpoint.load(canonical, slice(0, 1))
        shape = tensor_shapes(checkpoint.config)[canonical]
        return Tensor(name, _CODES[str(first.dtype).removeprefix("torch.")], shape,
                      lambda rows: checkpoint.load(canonical, rows))  # fmt: skip
    stored = checkpoint.names[canonical]
    entry = checkpoint.folder.entries[stored]
    return Tensor(name, entry.loaded_dtype, entry.shape, lambda rows: checkpoint.folder.load(stored, rows))


def _draft_vocabulary(checkpoint: Checkpoint, module: ModuleType) -> list[Tensor]:
    import torch

    assert checkpoint.d2t is not None
    ids = torch.from_numpy(checkpoint.d2t)  # [V']
    if module.DRAFT_TO_TARGET == "absolute":
        return [Tensor(DRAFT_TO_TARGET, "I64", tuple(ids.shape), lambda rows: ids[rows])]
    offsets = ids - torch.arange(len(ids))
    marked = torch.zeros(checkpoint.config.vocab_size, dtype=torch.bool)
    marked[ids] = True
    return [
        Tensor(DRAFT_TO_TARGET, "I64", tuple(offsets.shape), lambda rows: offsets[rows]),
        Tensor("t2d", "BOOL", tuple(marked.shape), lambda rows: marked[rows]),
    ]


def _write(checkpoint: Checkpoint, conversion: Conversion, folder: Path, progress: Progress) -> None:
    total = len(conversion.tensors)
    if conversion.module is gguf:
        file = folder / "drafter.gguf"
        gguf.write(file, conversion.config, conversion.tensors, checkpoint, lambda n: progress("weights", n, total))
    else:
        (folder / "config.json").write_text(json.dumps(conversion.config, indent=2) + "\n")
        file = folder / "model.safetensors"
        shapes = [(tensor.name, tensor.dtype, tensor.shape) for tensor in conversion.tensors]
        write_safetensors(file, shapes, _bytes(conversion.tensors, progress))
        for name in _TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _bytes(tensors: tuple[Tensor, ...], progress: Progress) -> Iterator[Iterable[memoryview]]:
    import torch

    for number, tensor in enumerate(tensors):
        progress("weights", number, len(tensors))
        yield (piece.contiguous().view(torch.uint8).numpy().data.cast("B") for piece in tensor.pieces())


def _compare(checkpoint: Checkpoint, conversion: Conversion, folder: Path, progress: Progress) -> None:
    """Read back: the canonical configuration and every weight must be what they were."""
    written = open_checkpoint(folder, checkpoint.target)
    found = dataclasses.replace(written.config, layout=checkpoint.config.layout)
    if found != checkpoint.config:
        pairs = zip(*(dataclasses.asdict(config).items() for config in (checkpoint.config, found)), strict=True)
        differing = [f"{name} {old!r} as {new!r}" for (name, old), (_, new) in pairs if old != new]
        raise CheckFailedError(f"what was written reads back differently: {'; '.join(differing)}")
    for number, name in enumerate(tensor_shapes(checkpoint.config)):
        progress("comparing", number, len(conversion.tensors))
        if name in written.missing_shared:
            continue
        rows = tensor_shapes(checkpoint.config)[name][0]
        for start in range(0, rows, _PIECE_ROWS):
            piece = slice(start, min(start + _PIECE_ROWS, rows))
            if not _same_bits(checkpoint.load(name, piece), written.load(name, piece)):
                raise CheckFailedError(f"{name} reads back differently, from row {start}")


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
