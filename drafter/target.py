"""The target as the drafter sees it: its contract, and the embedding and head that it may lend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import DrafterConfig
from .errors import BadInputError
from .formats.fields import Fields
from .tensor_folder import FLOATING_DTYPES, TensorFolder, open_tensor_folder, read_config

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A Hugging Face folder of a causal language model, opened without reading weights."""

    path: Path
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    folder: TensorFolder

    def load(self, name: str) -> torch.Tensor:
        """``embed_tokens.weight`` or ``lm_head.weight``, [V, h], as stored."""
        return self.folder.load(self._stored_name(name))

    def sha256(self) -> str:
        return self.folder.sha256()

    def faults(self, config: DrafterConfig) -> Iterable[str]:
        """What keeps this drafter and this target apart, one sentence each."""
        pairs = (
            ("hidden size", config.target_hidden_size, self.hidden_size),
            ("number of layers", config.num_target_layers, self.num_hidden_layers),
            ("vocabulary size", config.vocab_size, self.vocab_size),
        )
        for what, wanted, found in pairs:
            if wanted != found:
                yield f"it was trained for a target with {what} {wanted}, {self.path} has {found}"

    def _stored_name(self, name: str) -> str:
        candidates = [name, f"model.{name}", f"model.language_model.{name}"]
        if name == "lm_head.weight" and self.tie_word_embeddings:
            candidates = ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"]
        for candidate in candidates:
            entry = self.folder.entries.get(candidate)
            if entry is None:
                continue
            if entry.shape != (self.vocab_size, self.hidden_size) or entry.dtype not in FLOATING_DTYPES:
                raise BadInputError(
                    f"{entry.file}: {candidate} is {entry.dtype} {list(entry.shape)}, "
                    f"the configuration says {[self.vocab_size, self.hidden_size]}"
                )
            return candidate
        raise BadInputError(f"{self.path}: the target holds none of {', '.join(candidates)}")


def open_target(path: Path) -> TargetFolder:
    """Read a target's configuration and tensor headers.

    Raises:
        BadInputError: no such folder, or no causal language model in it.
    """
    data = read_config(path)
    source = str(path / "config.json")
    fields = Fields(data, source).object("text_config") or Fields(data, source)
    return TargetFolder(
        path=path,
        hidden_size=fields.integer("hidden_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        folder=open_tensor_folder(path),
    )
