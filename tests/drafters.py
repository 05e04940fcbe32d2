"""Drafters and targets made for the tests: random weights in real layouts, in any geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark.drafter.config import DrafterConfig
from dspark.drafter.formats.deepspec import read
from dspark.drafter.formats.reading import Source
from dspark.drafter.tensors import tensor_shapes

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
