"""Drafters and targets made for the tests: random weights in real layouts, in any geometry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark.drafter.checkpoint import Checkpoint
from dspark.drafter.config import DrafterConfig
from dspark.drafter.formats import NAMES
from dspark.drafter.formats.deepspec import read
from dspark.drafter.formats.reading import Source
from dspark.drafter.tensor_folder import open_tensor_folder
from dspark.drafter.tensors import DRAFT_TO_TARGET, SHARED_TENSORS, tensor_shapes

DEFAULTS: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 131,
    "block_size": 5,
    "mask_token_id": 130,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "num_anchors": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "attention_bias": False,
    "hidden_act": "silu",
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def config_from_json(data: dict[str, Any], file: str = "config.json") -> DrafterConfig:
    """The canonical configuration of a DeepSpec ``config.json``."""
    return read(Source(Path(file), file, data, {})).config


def make_checkpoint(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, shared: bool = True, **overrides: Any
) -> Path:
    """Write a DeepSpec folder; ``shared=False`` leaves embedding and head to the target."""
    data = {**DEFAULTS, **overrides}
    if data["markov_rank"] == 0:
        data["confidence_head_with_markov"] = False
    config = config_from_json(data, "test")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if not shared and name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        scale = 0.3 if len(shape) == 1 else 1.0 / shape[-1] ** 0.5
        values = torch.randn(shape, generator=generator) * scale
        tensors[name] = (values + 1 if "norm" in name else values).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_config(layout: str = "deepspec", **overrides: Any) -> DrafterConfig:
    """A small canonical configuration; a reduced vocabulary by ``draft_vocab_size``."""
    base = config_from_json(DEFAULTS)
    layers = overrides.get("num_hidden_layers", base.num_hidden_layers)
    windows = {"layer_windows": (None,) * layers, "layer_causal": (False,) * layers}
    return dataclasses.replace(base, **{"layout": layout, **windows, **overrides})


def random_tensors(config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Canonical tensors of a configuration, sized so that activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name == "d2t":
            tensors[name] = torch.randperm(config.vocab_size, generator=generator)[: shape[0]].sort().values
            continue
        if config.draft_vocab_size > config.vocab_size and name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            shape = (config.draft_vocab_size, *shape[1:])
        scale = 0.3 if len(shape) == 1 else 1.0 / shape[-1] ** 0.5
        values = torch.randn(shape, generator=generator) * scale
        tensors[name] = (values + 1 if "norm" in name or "scalar" in name else values).to(dtype)
    return tensors


def write_layout(folder: Path, config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in the layout that ``config`` names."""
    module = NAMES[config.layout]
    names = module.tensor_names(config)
    stored = {names[name]: tensor.contiguous() for name, tensor in tensors.items()}
    if "d2t" in tensors:
        ids = tensors["d2t"]
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(module.config_to_json(config)))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def canonical_checkpoint(
    folder: Path, config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """A checkpoint under canonical names, for configurations that no layout holds."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed, dtype)
    ids = tensors.pop(DRAFT_TO_TARGET, None)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    names = {name: name for name in tensor_shapes(config)}
    return Checkpoint(folder, config, open_tensor_folder(folder), names, d2t=None if ids is None else ids.numpy())


def lend_target(drafter: Path, folder: Path) -> Path:
    """A target folder that holds nothing but a DeepSpec checkpoint's embedding and head."""
    data = json.loads((drafter / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("hidden_size", "vocab_size", "max_position_embeddings")
    config = {key: data[key] for key in keys} | {"num_hidden_layers": data["num_target_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(drafter / "model.safetensors")
    shared = {f"model.{name}" if name.startswith("embed") else name: tensors[name] for name in SHARED_TENSORS}
    save_file(shared, folder / "model.safetensors")
    return folder


def make_target(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a small random Llama with a byte-level tokenizer and a chat template, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {
        "hidden_size": DEFAULTS["hidden_size"],
        "num_hidden_layers": DEFAULTS["num_target_layers"],
        "vocab_size": DEFAULTS["vocab_size"],
    }
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            **sizes,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            "initializer_range": 0.3,
            **overrides,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Two specials, then single bytes as far as the vocabulary goes
    vocabulary = {token: i for i, token in enumerate(["<bos>", "<eos>", *alphabet][: config.vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return folder
