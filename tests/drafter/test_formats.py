"""Every layout: read, written, and back; what is open is refused, and what a layout cannot hold is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import config_from_json, lend_target, make_checkpoint, make_config, random_tensors, write_layout
from golden import FORMATS
from safetensors.torch import load_file, save_file

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.convert import convert, plan_conversion
from dspark.drafter.errors import BadInputError
from dspark.drafter.formats import NAMES
from dspark.drafter.formats.reading import Settled
from dspark.drafter.rope import Rope
from dspark.drafter.target import open_target
from dspark.drafter.tensors import tensor_shapes

PLAIN_DFLASH = {
    "sample_from_anchor": False,
    "markov_rank": 0,
    "markov_head_type": "none",
    "confidence_head": False,
    "confidence_head_with_markov": False,
}
WINDOWS = {"layer_windows": (24, None), "layer_causal": (True, False)}
ROPES = {
    "linear": Rope(theta=1e4, kind="linear", factor=2.0),
    "yarn": Rope(
        theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.1386294361119891
    ),
    "llama3": Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
    "interleaved": Rope(theta=1e4, interleaved=True),
    "partial": Rope(theta=1e4, partial_rotary_factor=0.25),
}
WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("deepspec", {}),
    ("deepspec", {"markov_head_type": "gated"}),
    ("deepspec", {"markov_head_type": "rnn", "attention_bias": True}),
    ("deepspec", {**PLAIN_DFLASH, "sample_from_anchor": True}),
    ("deepspec", {"confidence_head_with_markov": False}),
    ("deepspec", {"final_logit_softcapping": 30.0, "target_layer_ids": (-1, 2)}),
    ("speculators", {}),
    ("speculators", {"sample_from_anchor": False, **WINDOWS}),
    ("speculators", {"layer_windows": (24, None)}),
    ("speculators", {"draft_vocab_size": 40, "logit_scale": 0.5}),
    ("speculators", {**PLAIN_DFLASH, "target_hidden_size": 48}),
    ("speculators", {"architecture": "llama", "attention_sinks": True}),
    ("specforge", {**WINDOWS, "window_moves": True}),
    ("modelopt", {}),
    ("modelopt", {"sample_from_anchor": False, "confidence_head_with_markov": False}),
    ("z-lab", PLAIN_DFLASH),
    *[("specforge", {"rope": rope, "max_position_embeddings": 512}) for rope in ROPES.values()],
]


@pytest.mark.parametrize(("layout", "overrides"), WRITTEN)
def test_what_is_written_is_read(tmp_path: Path, layout: str, overrides: dict[str, Any]) -> None:
    config = make_config(layout, **overrides)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_layout(tmp_path / "drafter", config, tensors))
    assert checkpoint.config == config
    assert set(checkpoint.origins) == {field.name for field in dataclasses.fields(config)}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name), tensor), name
    picked = checkpoint.load("norm.weight", slice(3, 5))
    assert torch.equal(picked, tensors["norm.weight"][3:5])


@pytest.mark.parametrize("layout", ["speculators", "specforge", "modelopt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_the_same(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    start = open_checkpoint(make_checkpoint(tmp_path / "deepspec", dtype=dtype))
    convert(start, layout, tmp_path / layout)
    between = open_checkpoint(tmp_path / layout)
    assert between.config == dataclasses.replace(start.config, layout=layout)
    convert(between, "deepspec", tmp_path / "back")
    same(start, open_checkpoint(tmp_path / "back"))


@pytest.mark.parametrize("layout", FORMATS)
def test_golden_layouts_there_and_back(shared: Path, tmp_path: Path, layout: str) -> None:
    """The layouts of public tools, rewritten strictly by this one, in every layout that can hold them."""
    start = open_checkpoint(shared / "golden" / "formats" / layout)
    through = 0
    for other in ("speculators", "specforge", "modelopt", "z-lab"):
        try:
            plan_conversion(start, other)
        except BadInputError:  # each refusal has its own test
            continue
        convert(start, other, tmp_path / other)
        convert(open_checkpoint(tmp_path / other), start.config.layout, tmp_path / f"{other}-back")
        same(start, open_checkpoint(tmp_path / f"{other}-back"))
        through += 1
    assert through >= 1


def same(first: Checkpoint, second: Checkpoint) -> None:
    assert first.config == second.config
    assert first.missing_shared == second.missing_shared
    for name in tensor_shapes(first.config):
        if name not in first.missing_shared:
            one, two = first.load(name), second.load(name)
            assert one.dtype == two.dtype
            assert torch.equal(one, two), name


def test_shared_tensors_go_to_the_target_and_come_back(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "deepspec")
    target = open_target(lend_target(folder, tmp_path / "target"))
    start = open_checkpoint(folder, target)
    conversion = convert(start, "specforge", tmp_path / "specforge")
    assert conversion.left_out == ("embed_tokens.weight", "lm_head.weight")
    with pytest.raises(BadInputError, match="give the target with --target"):
        convert(open_checkpoint(tmp_path / "specforge"), "deepspec", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    convert(open_checkpoint(tmp_path / "specforge", target), "deepspec", tmp_path / "back")
    same(start, open_checkpoint(tmp_path / "back", target))


@pytest.mark.parametrize(
    ("layout", "overrides", "words"),
    [
        ("deepspec", {"sample_from_anchor": False}, "the fill-in layout"),
        ("deepspec", {"draft_vocab_size": 40}, "a draft vocabulary of another size"),
        ("specforge", {"layer_windows": (24, 24)}, "attention that is not full"),
        ("specforge", {"sample_from_anchor": False}, "the fill-in layout"),
        ("modelopt", {"markov_head_type": "gated"}, "a Markov head of type gated"),
        ("modelopt", {"layer_windows": (24, 24)}, "sliding windows"),
        ("z-lab", {}, "the anchor-first layout"),
        ("z-lab", {"sample_from_anchor": False}, "a Markov head"),
        ("speculators", {"target_layer_ids": (-1, 2)}, "the embedding output as a tap"),
        ("speculators", {"layer_windows": (24, 12)}, "several widths"),
        ("speculators", {**WINDOWS, "window_moves": True}, "moves with the slot"),
    ],
)
def test_what_a_layout_cannot_hold_is_named(tmp_path: Path, layout: str, overrides: dict[str, Any], words: str) -> None:
    config = make_config("speculators", **overrides)
    if "target_layer_ids" in overrides or overrides.get("window_moves") or len(set(config.layer_windows)) > 1:
        from dspark.drafter.formats.writing import Unwritable

        with pytest.raises(Unwritable, match=words):  # no layout to read it from
            NAMES[layout].config_to_json(config)
        return
    start = open_checkpoint(write_layout(tmp_path / "start", config, random_tensors(config)))
    with pytest.raises(BadInputError, match=f"the {layout} layout cannot hold.*{words}") as caught:
        convert(start, layout, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start"]


def test_prefixes_of_containers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    prefixed = {
        (f"logit_head.{name}" if "head." in name and "lm_head" not in name else f"model.{name}"): tensor
        for name, tensor in tensors.items()
    }
    save_file(prefixed | {"model.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.load("fc.weight"), tensors["fc.weight"])
    assert checkpoint.warnings == ("not used: model.rotary_emb.inv_freq",)
    save_file(prefixed | {"fc.weight": tensors["fc.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(BadInputError, match="are the same tensor by their names"):
        open_checkpoint(folder)


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of a ``config.json``; ``...`` removes one."""
    file = folder / "config.json"
    data = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def speculators(tmp_path: Path, **overrides: Any) -> Path:
    config = make_config("speculators", **overrides)
    return write_layout(tmp_path / "drafter", config, random_tensors(config))


def test_an_absent_layout_flag_is_open(tmp_path: Path) -> None:
    folder = edit(speculators(tmp_path), sample_from_anchor=...)
    with pytest.raises(BadInputError, match=r"--sample-from-anchor yes\|no") as caught:
        open_checkpoint(folder)
    assert caught.value.details["settle_with"] == ["--sample-from-anchor"]
    assert open_checkpoint(folder, settled=Settled(sample_from_anchor=False)).config.proposals == 4
    assert open_checkpoint(folder, settled=Settled(sample_from_anchor=True)).config.proposals == 5


def test_dflash_speculators_without_a_flag_are_fill_in(tmp_path: Path) -> None:
    folder = edit(speculators(tmp_path, **PLAIN_DFLASH), sample_from_anchor=...)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.sample_from_anchor is False
    assert checkpoint.origins["sample_from_anchor"] == "the speculators layout"


def test_an_option_does_not_overrule_the_checkpoint(tmp_path: Path) -> None:
    folder = speculators(tmp_path)
    with pytest.raises(BadInputError, match="sample_from_anchor is true but --sample-from-anchor is false"):
        open_checkpoint(folder, settled=Settled(sample_from_anchor=False))
    with pytest.raises(BadInputError, match=r"--target-layer-ids \[1\] contradicts .*aux_hidden_state_layer_ids"):
        open_checkpoint(folder, settled=Settled(target_layer_ids=(1,)))


def test_two_spellings_of_the_flag_must_agree(tmp_path: Path) -> None:
    folder = edit(speculators(tmp_path), query_zero_predicts_next=False)
    with pytest.raises(BadInputError, match=r"sample_from_anchor is true but .*query_zero_predicts_next is false"):
        open_checkpoint(folder)


def test_absent_layer_ids_are_never_guessed(tmp_path: Path) -> None:
    config = make_config("z-lab", **PLAIN_DFLASH)
    folder = write_layout(tmp_path / "drafter", config, random_tensors(config))
    data = json.loads((folder / "config.json").read_text())
    del data["dflash_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(BadInputError, match="no rule for it is safe"):
        open_checkpoint(folder)
    settled = open_checkpoint(folder, settled=Settled(target_layer_ids=(0, 2)))
    assert settled.config == config
    assert settled.origins["target_layer_ids"] == "--target-layer-ids"


def test_nested_keys_are_found_and_must_agree(tmp_path: Path) -> None:
    """A trainer's nested keys in a DeepSpec checkpoint, at either place or both."""
    folder = make_checkpoint(tmp_path / "drafter")
    edit(folder, mask_token_id=..., dflash_config={"mask_token_id": 130})
    assert open_checkpoint(folder).config.mask_token_id == 130
    edit(folder, mask_token_id=7)
    with pytest.raises(BadInputError, match=r"dflash_config.mask_token_id is 130, it must be equal to .*is 7"):
        open_checkpoint(folder)


def test_defaults_of_the_nested_class(tmp_path: Path) -> None:
    from transformers import LlamaConfig, Qwen3Config

    from dspark.drafter.formats.defaults import DEFAULTS, ROPE_THETA

    for name, library in (("qwen3", Qwen3Config()), ("llama", LlamaConfig())):
        found = library.to_dict()
        assert {key: found[key] for key in DEFAULTS[name]} == DEFAULTS[name]
        assert found["rope_parameters"]["rope_theta"] == ROPE_THETA
        assert library.num_key_value_heads == library.num_attention_heads
        assert library.head_dim == 128
    folder = speculators(tmp_path)
    nested = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    for key in ("rms_norm_eps", "rope_theta", "rope_parameters", "attention_bias", "hidden_act"):
        nested.pop(key)
    checkpoint = open_checkpoint(edit(folder, transformer_layer_config=nested))
    assert checkpoint.config == make_config("speculators")
    assert any("rms_norm_eps 1e-06, attention_bias False, rope_theta 10000.0" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("window", [None, 0, 512, 4096, ...])
def test_a_window_that_is_none(tmp_path: Path, window: Any) -> None:
    """null, 0, absent, or not smaller than the context (512 positions)."""
    folder = speculators(tmp_path)
    nested = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    nested |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    nested = {key: value for key, value in nested.items() if value is not ...}
    config = open_checkpoint(edit(folder, transformer_layer_config=nested)).config
    assert config.layer_windows == (None, None)
    assert config.layer_causal == (False, False)
    assert config.ring is None


def test_proposals_of_a_converter_that_was_off_by_one(tmp_path: Path) -> None:
    folder = speculators(tmp_path, sample_from_anchor=False)
    data = json.loads((folder / "config.json").read_text())["speculators_config"]
    assert data["proposal_methods"][0]["speculative_tokens"] == 4
    data["proposal_methods"][0]["speculative_tokens"] = 5
    checkpoint = open_checkpoint(edit(folder, speculators_config=data))
    assert "speculative_tokens is 5, a block of 5 proposes 4" in checkpoint.warnings[0]


def test_gemma_embedding_scale_is_rounded_as_the_checkpoint_computes(shared: Path) -> None:
    file = shared / "golden" / "deepspec" / "gemma4-separate-v" / "config.json"
    data = json.loads(file.read_text()) | {"hidden_size": 3840}
    for dtype, scale in (("float32", 3840**0.5), ("bfloat16", 62.0)):
        assert config_from_json(data | {"dtype": dtype}).embed_scale == scale


D2T_CASES: dict[str, tuple[list[int], str]] = {
    # ids 2, 3, 7, 9 of 131: stored vector, and what it is
    "offsets with repeats": ([2, 2, 5, 6], "offset"),
    "absolute beyond the end": ([2, 3, 100, 130], "absolute"),
}


@pytest.mark.parametrize("case", D2T_CASES)
@pytest.mark.parametrize("marked", [True, False])
def test_draft_vocabulary_by_its_numbers(tmp_path: Path, case: str, marked: bool) -> None:
    stored, kind = D2T_CASES[case]
    ids = np.array(stored) + (np.arange(4) if kind == "offset" else 0)
    folder = _with_d2t(tmp_path, stored, ids if marked else None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.d2t is not None
    assert checkpoint.d2t.tolist() == ids.tolist()
    assert bool(checkpoint.warnings) == (kind == "absolute")


def test_an_undecidable_draft_vocabulary_is_open(tmp_path: Path) -> None:
    """Strictly increasing, and in range under both readings."""
    folder = _with_d2t(tmp_path, [2, 4, 9, 20], None)
    with pytest.raises(BadInputError, match=r"--d2t offset\|absolute") as caught:
        open_checkpoint(folder)
    assert caught.value.details["settle_with"] == ["--d2t"]
    for kind, ids in (("offset", [2, 5, 11, 23]), ("absolute", [2, 4, 9, 20])):
        checkpoint = open_checkpoint(folder, settled=Settled(d2t=kind))  # type: ignore[arg-type]
        assert checkpoint.d2t is not None
        assert checkpoint.d2t.tolist() == ids
    decided = open_checkpoint(_with_d2t(tmp_path / "marked", [2, 4, 9, 20], np.array([2, 4, 9, 20])))
    assert decided.d2t is not None
    assert decided.d2t.tolist() == [2, 4, 9, 20]


@pytest.mark.parametrize(
    ("stored", "marked", "words"),
    [
        ([2, 1, 5, 6], None, "does not give ascending ids"),
        ([2, 2, 5, 200], None, "does not give ascending ids of a vocabulary of 131"),
        ([-3, 2, 5, 6], None, "does not give"),
        ([2, 2, 5, 6], np.array([1, 2, 3, 4]), "the ids that t2d marks"),
        ([2, 2, 5, 6], np.array([1, 2, 3]), "t2d marks 3 ids, d2t has 4"),
    ],
)
def test_a_wrong_draft_vocabulary_is_refused(tmp_path: Path, stored: list[int], marked: Any, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        open_checkpoint(_with_d2t(tmp_path, stored, marked))


def _with_d2t(tmp_path: Path, stored: list[int], marked: Any) -> Path:
    folder = speculators(tmp_path, draft_vocab_size=len(stored))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.tensor(stored)
    del tensors["t2d"]
    if marked is not None:
        tensors["t2d"] = torch.zeros(131, dtype=torch.bool).index_fill(0, torch.as_tensor(marked), True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_taps_of_a_target_whose_depth_only_it_knows(tmp_path: Path, target_path: Path) -> None:
    folder = speculators(tmp_path, num_target_layers=None)
    assert open_checkpoint(folder).config.num_target_layers is None
    assert open_checkpoint(folder, open_target(target_path)).config.num_target_layers == 4
    edit(folder, aux_hidden_state_layer_ids=[1, 4])
    with pytest.raises(BadInputError, match=r"\[0, 3\] tap the last layer 3"):
        open_checkpoint(folder, open_target(target_path))
