"""Any Hugging Face causal language model as a target: hooks on the tapped layers, a cache that is cut back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.drafter.errors import BadInputError, NotAvailableError

from ..target import Capabilities, RaggedBatch, Rows
from .packed_linear import pack_linear_layers


class TransformersTarget:
    """A target on PyTorch; each slot has its own cache, and requests of a ragged batch run one after another.

    Args:
        path: a local model folder.
        target_layer_ids: layers whose output becomes the feature rows, in this order; −1 is the embedding.
            Empty: no features.
        verify_rows: rows of one request's verification, K + 1, that the linear layers are packed for; 0: none.

    Raises:
        NotAvailableError: transformers is not installed.
        BadInputError: the folder holds no causal language model that transformers loads.
    """

    def __init__(self, path: Path, target_layer_ids: Sequence[int] = (), verify_rows: int = 0) -> None:
        self.torch, self.transformers = _import_transformers()
        self.model = self._load(path)
        pack_linear_layers(self.model, verify_rows)
        # transformers 5.24 renames the argument and warns of the old name
        named = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        self.caches: dict[int, Any] = {}
        self.committed: dict[int, int] = {}  # rows that are kept, per slot
        self._taps: list[Any] = []
        self._hook(target_layer_ids)
        config = self.model.config.get_text_config()
        self.capabilities = Capabilities(
            vocab_size=config.vocab_size,
            max_tokens=config.max_position_embeddings,
            stop_ids=stop_ids(path, self.model.generation_config.eos_token_id),
            features=bool(target_layer_ids),
        )

    def prefill(self, slot: int, token_ids: list[int]) -> Rows:
        self.caches[slot] = self.transformers.DynamicCache(config=self.model.config)
        self.committed[slot] = len(token_ids)
        return self._forward(slot, token_ids, 0, logits_to_keep=1)

    def verify(self, batch: RaggedBatch) -> Rows:
        parts = []
        for i, slot in enumerate(batch.slots):
            rows = slice(batch.cumulative[i], batch.cumulative[i + 1])
            start = int(batch.positions[rows][0])
            parts.append(self._forward(slot, batch.token_ids[rows].tolist(), start))
        if len(parts) == 1:
            return parts[0]
        features = [part.features for part in parts if part.features is not None]
        return Rows(np.concatenate([part.logits for part in parts]), np.concatenate(features) if features else None)

    def commit(self, slot: int, accepted: int) -> None:
        self.committed[slot] += accepted + 1
        surplus = self.caches[slot].get_seq_length() - self.committed[slot]
        if surplus > 0:
            self.caches[slot].crop(-surplus)

    def release(self, slot: int) -> None:
        self.caches.pop(slot, None)
        self.committed.pop(slot, None)

    def _forward(self, slot: int, token_ids: list[int], start: int, logits_to_keep: int = 0) -> Rows:
        torch = self.torch
        with torch.inference_mode():
            outputs = self.model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.arange(start, start + len(token_ids))[None],
                **{self._cache_argument: self.caches[slot]},
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        features = torch.cat(self._tapped, dim=-1)[0].float().numpy() if self._taps else None
        return Rows(outputs.logits[0].float().numpy(), features)

    def _hook(self, target_layer_ids: Sequence[int]) -> None:
        layers = self.model.get_decoder().layers
        self._tapped: list[Any] = [None] * len(target_layer_ids)
        for place, layer in enumerate(target_layer_ids):
            module = self.model.get_input_embeddings() if layer < 0 else layers[layer]

            def keep(module: Any, inputs: Any, output: Any, place: int = place) -> None:
                self._tapped[place] = output[0] if isinstance(output, tuple) else output

            self._taps.append(module.register_forward_hook(keep))

    def _load(self, path: Path) -> Any:
        self.transformers.utils.logging.disable_progress_bar()
        try:
            model = self.transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=self.torch.float32, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise BadInputError(f"{path}: transformers cannot load it as a causal model: {error}") from error
        return model.eval()


class TransformersTokenizer:
    """The tokenizer and chat template of a model folder."""

    def __init__(self, path: Path) -> None:
        _, transformers = _import_transformers()
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise BadInputError(f"{path}: no tokenizer that transformers loads: {error}") from error

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of the conversation by the model's template, up to where the assistant speaks."""
        if not self.tokenizer.chat_template:
            text = "\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def stream(self) -> TextStream:
        return TextStream(self.tokenizer.backend_tokenizer)


class TextStream:
    """Ids in, text out as soon as it is certain: a character of several tokens comes out whole."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.decoder = tokenizer, DecodeStream(skip_special_tokens=True)

    def add(self, token_ids: list[int]) -> str:
        return "".join(self.decoder.step(self.tokenizer, token) or "" for token in token_ids)


def stop_ids(path: Path, fallback: Any) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json, else what the model says (an id, a list, or none)."""
    file = path / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id", fallback) if file.is_file() else fallback
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


def _import_transformers() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise NotAvailableError("transformers is not installed; pip install 'dspark-export[transformers]'") from error
    return torch, transformers
