"""Configuration and headers, checked before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafters import DEFAULTS, config_from_json, make_checkpoint

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError


def test_reads_what_deepspec_writes(checkpoint_folder: Path) -> None:
    config = open_checkpoint(checkpoint_folder).config
    assert (config.layout, config.block_size, config.proposals, config.sample_from_anchor) == ("deepspec", 5, 5, True)
    assert config.target_layer_ids == (0, 2)
    assert config.feature_size == 64
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_rank_zero_has_no_head() -> None:
    config = config_from_json({**DEFAULTS, "markov_rank": 0, "enable_confidence_head": False}, "test")
    assert config.markov_head_type == "none"
    assert not config.confidence_head_with_markov


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"block_size": "7"}, "block_size is '7', it must be an integer"),
        ({"block_size": True}, "block_size is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"target_layer_ids": [2, 0]}, "strictly increasing"),
        ({"target_layer_ids": [0, 4]}, "must lie in -1..3"),
        ({"target_layer_ids": [0, 3]}, "tap the last layer 3"),
        ({"target_layer_ids": []}, "0 entries"),
        ({"mask_token_id": 131}, "mask_token_id 131"),
        ({"num_attention_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "odd"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs"),
        ({"markov_head_type": "linear"}, "'linear' is none of"),
        ({"rope_theta": 5.0}, "equal to config.json: rope_parameters.rope_theta, which is 10000.0"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1.0}}, "rope_type is 'su'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, "sliding windows are not settled"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling.factor is stated"),
        ({"hidden_size": 2**40}, "below 2^31"),
    ],
)
def test_refuses_by_key_and_value(override: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        config_from_json({**DEFAULTS, **override}, "config.json")
    assert words in caught.value.message


def test_lists_every_fault_at_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "intermediate_size": 64, "attention_bias": True}))
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.details["faults"]) == 2 * 3 + 2 * 4  # three MLP shapes and four biases in each layer
    assert "layers.1.mlp.down_proj.weight is [32, 48]" in caught.value.message
    assert "the configuration says [32, 64]" in caught.value.message


def test_names_tensors_that_nothing_reads(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "num_hidden_layers": 1}))
    with pytest.raises(BadInputError, match=r"does not have \(11\): layers\.1\.input_layernorm\.weight"):
        open_checkpoint(folder)


def test_another_family_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter", architectures=["EagleModel"])
    with pytest.raises(BadInputError, match="EagleModel"):
        open_checkpoint(folder)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInputError, match="pickle"):
        open_checkpoint(folder)


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter")
    (folder / "model.safetensors").rename(tmp_path / "weights.safetensors")
    index = {"weight_map": {"fc.weight": "../weights.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match="no file of this folder"):
        open_checkpoint(folder)
