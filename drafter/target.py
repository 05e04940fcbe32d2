"""The target as the drafter sees it: its contract, and the embedding and head that it may lend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import DrafterConfig
from .errors import BadInputError
from .formats.fields import Fields
from .tensor_folder import FLOATING_DTYPES, TensorFolder, open_tensor_folder, read_config, read_json_object

if TYPE_CHECKING:
    import torch

_TOKENIZER_BYTES = 1 << 28


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

    @property
    def embedding_rows(self) -> int:
        """Rows of the stored embedding: the vocabulary, and what pads it."""
        for name in self._candidates("embed_tokens.weight"):
            if name in self.folder.entries:
                return self.folder.entries[name].shape[0]
        return self.vocab_size

    def load(self, name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """``embed_tokens.weight`` or ``lm_head.weight``, [V, h], or some of its rows, as stored."""
        return self.folder.load(self._stored_name(name), rows)

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
            if wanted is not None and wanted != found:
                yield f"it was trained for a target with {what} {wanted}, {self.path} has {found}"
        if config.num_target_layers is None:
            yield from config.tap_faults(self.num_hidden_layers)

    def _candidates(self, name: str) -> list[str]:
        if name == "lm_head.weight" and self.tie_word_embeddings:
            name = "embed_tokens.weight"
        return [name, f"model.{name}", f"model.language_model.{name}", f"language_model.model.{name}"]

    def _stored_name(self, name: str) -> str:
        candidates = self._candidates(name)
        for candidate in candidates:
            entry = self.folder.entries.get(candidate)
            if entry is None:
                continue
            wanted = (self.vocab_size, self.hidden_size)
            fits = len(entry.shape) == 2 and entry.shape[0] >= wanted[0] and entry.shape[1] == wanted[1]
            if not fits or entry.dtype not in FLOATING_DTYPES:
                raise BadInputError(
                    f"{entry.file}: {candidate} is {entry.dtype} {list(entry.shape)}, "
                    f"the configuration says {list(wanted)}"
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


def tokenizer_identity(path: Path) -> dict[str, Any]:
    """What a folder's tokenizer is, as far as it has one.

    Returns:
        ``tokenizer_sha256`` over the sorted (token, id) pairs of ``tokenizer.json``, added tokens included;
        ``template_sha256`` over the chat template; ``thinking``, whether the template knows a thinking mode. A key
        is absent where the folder does not say.
    """
    if not path.is_dir():
        return {}
    identity: dict[str, Any] = {}
    file = path / "tokenizer.json"
    if file.is_file():
        identity["tokenizer_sha256"] = _sha256_of(_vocabulary(read_json_object(file, _TOKENIZER_BYTES)))
    template = _chat_template(path)
    if template is not None:
        identity["template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
        identity["thinking"] = "thinking" in template
    return identity


def tokenizer_tokens(path: Path) -> tuple[dict[int, str], list[str]] | None:
    """Token by id, and merges as "left right", of a folder's ``tokenizer.json``, if it has one."""
    file = path / "tokenizer.json"
    if not path.is_dir() or not file.is_file():
        return None
    data = read_json_object(file, _TOKENIZER_BYTES)
    model = data.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges or ()]
    return {number: token for token, number in _vocabulary(data).items()}, joined


def identity_differences(recorded: dict[str, Any], found: dict[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Faults and warnings of a tokenizer that is not the one recorded."""
    faults: list[str] = []
    warnings: list[str] = []
    for key, what, serious in (("tokenizer_sha256", "tokenizer", True), ("template_sha256", "chat template", False)):
        wanted, seen = recorded.get(key), found.get(key)
        if wanted and seen and wanted != seen:
            text = f"the {what} of {where} ({seen[:16]}…) is not the one of the drafter's target ({wanted[:16]}…)"
            (faults if serious else warnings).append(text)
    return faults, warnings


def _vocabulary(data: dict[str, Any]) -> dict[str, Any]:
    model, added = data.get("model"), data.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: [token, score] in order of id
        vocabulary = {str(item[0]): i for i, item in enumerate(vocabulary) if isinstance(item, list) and item}
    pairs = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            pairs[str(token.get("content"))] = token.get("id")
    return pairs


def _sha256_of(vocabulary: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocabulary.items()), default=str).encode()).hexdigest()


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file() and file.stat().st_size < 1 << 20:
        return file.read_text(errors="replace")
    file = path / "tokenizer_config.json"
    if file.is_file():
        template = read_json_object(file, _TOKENIZER_BYTES).get("chat_template")
        return template if isinstance(template, str) else None
    return None
