"""GGUF: what llama.cpp's converter writes is read, what is written comes back, damaged headers are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from drafters import make_checkpoint, make_config, random_tensors, write_layout

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.convert import convert
from dspark.drafter.errors import BadInputError
from dspark.drafter.formats.reading import Settled
from dspark.drafter.gguf_file import open_gguf
from dspark.drafter.rope import Rope, yarn_attention_factor
from dspark.drafter.target import TargetFolder, open_target
from dspark.drafter.tensors import tensor_shapes


@pytest.fixture(scope="module")
def target(target_path: Path) -> TargetFolder:
    return open_target(target_path)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"layout": "speculators"},
    "fill-in": {"layout": "speculators", "sample_from_anchor": False},
    "reduced": {"layout": "speculators", "draft_vocab_size": 40},
    "no confidence": {"layout": "speculators", "confidence_head": False, "confidence_head_with_markov": False},
    "sinks": {"layout": "speculators", "attention_sinks": True},
    "softcap": {"layout": "speculators", "final_logit_softcapping": 30.0},
    "partial": {"layout": "specforge", "rope": Rope(theta=1e6, partial_rotary_factor=0.25)},
    "yarn": {
        "layout": "specforge",
        "rope": Rope(
            theta=1e6,
            kind="yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            attention_factor=yarn_attention_factor(4.0, None, None),
        ),
    },
    "window": {
        "layout": "z-lab",
        "sample_from_anchor": False,
        "markov_rank": 0,
        "markov_head_type": "none",
        "confidence_head": False,
        "confidence_head_with_markov": False,
        "layer_windows": (24, None),
        "window_moves": True,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path: Path, target: TargetFolder, case: str, dtype: torch.dtype) -> None:
    config = make_config(**CASES[case])
    tensors = random_tensors(config, dtype=dtype)
    folder = write_layout(tmp_path / "start", config, tensors)
    convert(open_checkpoint(folder, target), "gguf", tmp_path / "gguf")
    between = open_checkpoint(tmp_path / "gguf")
    assert between.config.layout == "gguf"
    assert open_checkpoint(tmp_path / "gguf" / "drafter.gguf").config == between.config
    convert(open_checkpoint(tmp_path / "gguf", target), config.layout, tmp_path / "back")
    back = open_checkpoint(tmp_path / "back", target)
    assert back.config == config
    for name in tensor_shapes(config):
        tensor = back.load(name)
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name


def test_vectors_are_fp32_for_ggml(tmp_path: Path, target: TargetFolder) -> None:
    folder = make_checkpoint(tmp_path / "start", dtype=torch.bfloat16)
    convert(open_checkpoint(folder, target), "gguf", tmp_path / "gguf")
    file = open_gguf(tmp_path / "gguf" / "drafter.gguf")
    assert file.tensors.entries["blk.0.attn_norm.weight"].dtype == "F32"
    assert file.tensors.entries["blk.0.attn_q.weight"].dtype == "BF16"
    assert file.tensors.load("blk.0.attn_norm.weight").dtype == torch.bfloat16
    assert file.metadata["dflash.target_layers"] == [1, 3], "taps are counted as layer inputs"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"markov_head_type": "gated"}, "a Markov head of type gated"),
        ({"markov_head_type": "rnn"}, "a Markov head of type rnn"),
        (
            {"markov_rank": 0, "markov_head_type": "none", "confidence_head_with_markov": False},
            "a confidence head without a Markov head",
        ),
        ({"confidence_head_with_markov": False}, "a confidence head without the Markov feature"),
        (
            {
                "markov_rank": 0,
                "markov_head_type": "none",
                "confidence_head": False,
                "confidence_head_with_markov": False,
            },
            "an anchor-first drafter without a Markov head",
        ),
        ({"architecture": "llama"}, "a drafter without q and k norms"),
        ({"attention_bias": True}, "attention biases"),
        ({"rope": Rope(theta=1e4, interleaved=True)}, "interleaved rope"),
        ({"layer_windows": (24, 24), "layer_causal": (True, True)}, "a sliding window that is anchored"),
    ],
)
def test_what_it_cannot_hold_is_named(
    tmp_path: Path, target: TargetFolder, overrides: dict[str, Any], words: str
) -> None:
    config = make_config("speculators", **overrides)
    folder = write_layout(tmp_path / "start", config, random_tensors(config))
    with pytest.raises(BadInputError, match=f"the gguf layout cannot hold {words}"):
        convert(open_checkpoint(folder, target), "gguf", tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


def test_a_tokenizer_is_needed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "start")
    with pytest.raises(BadInputError, match="needs the target's tokenizer"):
        convert(open_checkpoint(folder), "gguf", tmp_path / "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start"]


def write_by_hand(file: Path, arch: str = "dflash", rename: Any = None, quantise: str = "", **extra: Any) -> Path:
    """A file as llama.cpp's converter writes it, with the gguf library alone."""
    config = make_config(hidden_size=64, target_hidden_size=64, num_hidden_layers=1)
    writer = gguf.GGUFWriter(file, arch)
    keys: dict[str, Any] = {
        "block_count": 1, "context_length": 512, "embedding_length": 64, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.value_length": 8, "block_size": 5,
    }  # fmt: skip
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array(f"{arch}.target_layers", [1, 3])
    writer.add_uint32("tokenizer.ggml.mask_token_id", 130)
    for key, value in extra.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"{arch}.{key.replace('__', '.')}", value)
    from dspark.drafter.formats.gguf import tensor_names

    names = tensor_names(config)
    for name, tensor in random_tensors(config).items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        stored = (rename or {}).get(names[name], names[name])
        data = tensor.numpy()
        if quantise and data.ndim == 2 and data.shape[1] % 32 == 0 and "proj" in name and "conf" not in name:
            kind = getattr(gguf.GGMLQuantizationType, quantise)
            writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_converter_s_file(tmp_path: Path) -> None:
    """No vocabulary, no flag: V is the rows of W1, and a Markov head means anchor first."""
    checkpoint = open_checkpoint(write_by_hand(tmp_path / "drafter.gguf"))
    config = checkpoint.config
    assert (config.vocab_size, config.target_layer_ids, config.sample_from_anchor) == (131, (0, 2), True)
    assert config.rms_norm_eps == 1e-6, "the shortest decimal of the fp32 number"
    assert checkpoint.missing_shared == ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_dequantised_by_the_library(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write_by_hand(tmp_path / "drafter.gguf", quantise=kind))
    entry = checkpoint.folder.entries["blk.0.attn_q.weight"]
    assert entry.dtype == kind
    found = checkpoint.load("layers.0.self_attn.q_proj.weight")
    config = make_config(hidden_size=64, target_hidden_size=64, num_hidden_layers=1)
    original = random_tensors(config)["layers.0.self_attn.q_proj.weight"]
    quantisation = getattr(gguf.GGMLQuantizationType, kind)
    wanted = gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), quantisation), quantisation)
    assert np.array_equal(found.numpy(), wanted)
    rows = checkpoint.load("layers.0.self_attn.q_proj.weight", slice(3, 7))
    assert torch.equal(rows, found[3:7])
    assert (found - original).abs().max() < 0.1


def test_names_of_a_fork(tmp_path: Path) -> None:
    """Architecture ``dspark``; how it counts its taps is nowhere settled, so they are asked for."""
    rename = {
        "fc.weight": "dspark.fc.weight",
        "enc.output_norm.weight": "dspark.hidden_norm.weight",
        "markov_w1.weight": "dspark.markov_head_a.weight",
        "markov_w2.weight": "dspark.markov_head_b.weight",
        "conf_proj.weight": "dspark.confidence_head.weight",
        "conf_proj.bias": "dspark.confidence_head.bias",
    }
    file = write_by_hand(tmp_path / "drafter.gguf", "dspark", rename)
    with pytest.raises(BadInputError, match="--target-layer-ids"):
        open_checkpoint(file)
    checkpoint = open_checkpoint(file, settled=Settled(target_layer_ids=(0, 2)))
    assert checkpoint.config.markov_rank == 8
    assert checkpoint.load("confidence_head.proj.bias").shape == (1,)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"hidden_act": "gelu"}, "dflash.hidden_act is 'gelu'"),
        ({"rope__scaling__type": "longrope"}, "dflash.rope.scaling.type is 'longrope'"),
        ({"sample_from_anchor": "yes"}, "dflash.sample_from_anchor is 'yes', it must be true or false"),
    ],
)
def test_unknown_metadata_is_refused(tmp_path: Path, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        open_checkpoint(write_by_hand(tmp_path / "drafter.gguf", **extra))


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    counts = struct.calcsize("<4sIQQ")
    magic, version, tensors, pairs = struct.unpack("<4sIQQ", data[:counts])
    rest = data[counts:]
    huge = 1 << 60
    return {
        "magic": (b"GGML" + data[4:], "does not begin with GGUF"),
        "version": (struct.pack("<4sIQQ", magic, 9, tensors, pairs) + rest, "GGUF version 9"),
        "tensors": (struct.pack("<4sIQQ", magic, version, huge, pairs) + rest, f"claims {huge} tensors"),
        "metadata": (struct.pack("<4sIQQ", magic, version, tensors, huge) + rest, f"claims {huge} metadata entries"),
        "more metadata": (struct.pack("<4sIQQ", magic, version, tensors, pairs + 1) + rest, "file"),
        "string": (data[:counts] + struct.pack("<Q", huge) + rest[8:], f"a string of {huge} bytes"),
        "empty": (b"", "does not begin with GGUF"),
        "head only": (data[:10], "ends within its header"),
        "half": (data[: len(data) // 2], "copy it again"),
        "one byte short": (data[:-40], "copy it again"),
    }


@pytest.mark.parametrize("case", list(damaged(b"GGUF" + bytes(40))))
def test_a_damaged_file_is_refused(tmp_path: Path, case: str) -> None:
    file = write_by_hand(tmp_path / "drafter.gguf")
    data, words = damaged(file.read_bytes())[case]
    file.write_bytes(data)
    with pytest.raises(BadInputError, match=words) as caught:
        open_checkpoint(file)
    assert str(file) in caught.value.message
