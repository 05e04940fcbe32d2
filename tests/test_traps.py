"""The traps of DSpark drafters, one test each: what a tool gets wrong that still runs, with low acceptance.

The numbers are those of the dspark format sheet, section G. What a trap gets wrong is shown beside what is right
wherever the wrong result can be computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from drafters import make_checkpoint, make_config, random_tensors, write_layout
from enumeration import law_of_output, target_law, total_variation
from safetensors.torch import load_file, save_file
from scripted import Scripted

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.config import DrafterConfig
from dspark.drafter.convert import plan_conversion
from dspark.drafter.errors import BadInputError, UsageError
from dspark.drafter.model import ReferenceDrafter
from dspark.drafter.parameters import held
from dspark.drafter.rope import Rope
from dspark.drafter.target import identity_differences, open_target, tokenizer_identity
from dspark.engines.backend import Backend, backend_from_name
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Generation, Request, generate
from dspark.runtime.sampling import Sampling, draw
from dspark.runtime.scheduler import Fixed, policy_from_name
from dspark.runtime.targets.transformers import TransformersTarget
from dspark.runtime.verification import acceptance, residual

PROMPT = [5, 9, 44, 71, 13, 8]


class Model(ReferenceDrafter):
    """A small reference drafter with random weights; it remembers the positions that it rotated at."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None, **overrides: Any) -> None:
        config = make_config(**overrides)
        self.tensors = random_tensors(config) | dict(tensors or {})
        self.rotated: list[list[int]] = []
        super().__init__(config, held(self.tensors))

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.rotated.append(positions[0].tolist())
        return super()._rotate(x, positions)

    def changed(self, **tensors: torch.Tensor) -> Model:
        """The same drafter with some weights replaced."""
        names = {name.replace(".", "_"): name for name in self.tensors}
        made = Model({**self.tensors, **{names[key]: value for key, value in tensors.items()}})
        made.config = self.config
        return made

    def caches(self, features: torch.Tensor, capacity: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        count = features.shape[0]
        k, v = self.context(features[None], torch.arange(count)[None])
        caches = [torch.randn(*k.shape[:3], capacity, k.shape[-1]) for _ in "kv"]  # what is not valid is garbage
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[..., :count, :] = rows
        return caches[0], caches[1]

    def drafted(self, features: torch.Tensor, anchor: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
        """Base logits [K, V'] and hidden states [K, h] of a block after these features."""
        base, hidden = self.block(torch.tensor([anchor]), torch.tensor([len(features)]), *self.caches(features))
        return base[0], hidden[0]


def features(config: DrafterConfig, rows: int = 11) -> torch.Tensor:
    return torch.randn(rows, config.feature_size, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def backend() -> Backend:
    return backend_from_name("onnxruntime", threads=1)


@pytest.fixture(scope="module")
def target(target_path: Path) -> TransformersTarget:
    return TransformersTarget(target_path, (0, 2), verify_rows=6)


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    return generate(target, None, Request(PROMPT, max_new_tokens=40, stop_ids=())).token_ids


def edit(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    data = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def small_export(folder: Path, output: Path, dtype: Any = "float32") -> Bundle:
    options = ExportOptions(dtype=dtype, context=(32,), prefill=16)
    return export_bundle(open_checkpoint(folder), output, options, backend_from_name("onnxruntime", 1))[0]


def test_trap_01_the_layout_decides_which_slot_proposes_which_token(tmp_path: Path) -> None:
    """Slot 0 of these weights names the token after its own: right under one layout, by chance under the other."""
    following = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.functional.normalize(torch.eye(32) + 0.01)
    silent = {
        f"layers.{layer}.{name}.weight": torch.zeros(shape)
        for layer in range(2)
        for name, shape in (("self_attn.o_proj", (32, 32)), ("mlp.down_proj", (32, 48)))
    }
    head = torch.empty(32, 32)
    head[following] = embedding
    weights = {**silent, "embed_tokens.weight": embedding, "lm_head.weight": head, "norm.weight": torch.ones(32)}
    rates = {}
    for from_anchor in (True, False):
        model = Model(weights, vocab_size=32, draft_vocab_size=32, mask_token_id=31, sample_from_anchor=from_anchor)
        first = [int(model.drafted(features(model.config), anchor)[0][0].argmax()) for anchor in range(32)]
        rates[from_anchor] = np.mean([found == following[anchor] for anchor, found in enumerate(first)])
        assert model.config.proposals == (5 if from_anchor else 4)
    assert rates[True] == 1
    assert rates[False] <= 2 / 32
    folder = write_layout(tmp_path / "drafter", make_config("speculators"), random_tensors(make_config()))
    edit(folder, sample_from_anchor=...)
    with pytest.raises(BadInputError, match=r"--sample-from-anchor yes\|no"):
        open_checkpoint(folder)


def test_trap_02_layer_ids_count_outputs_and_the_last_layer_is_ambiguous(
    tmp_path: Path, target: TransformersTarget
) -> None:
    folder = write_layout(tmp_path / "speculators", make_config("speculators"), random_tensors(make_config()))
    assert json.loads((folder / "config.json").read_text())["aux_hidden_state_layer_ids"] == [1, 3]
    ids = open_checkpoint(folder).config.target_layer_ids
    assert ids == open_checkpoint(make_checkpoint(tmp_path / "deepspec")).config.target_layer_ids == (0, 2)
    with torch.inference_mode():
        states = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    found = target.prefill(0, PROMPT).features
    target.release(0)
    wanted = torch.cat([states[i + 1][0] for i in ids], dim=-1)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    with pytest.raises(BadInputError, match="tap the last layer 3"):
        open_checkpoint(make_checkpoint(tmp_path / "last", target_layer_ids=[0, 3]))


@pytest.mark.parametrize("ids", [[2, 0], [0, 0], [0, 2, 1]])
def test_trap_03_the_order_of_the_taps_is_never_changed(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(BadInputError, match="strictly increasing"):
        open_checkpoint(make_checkpoint(tmp_path / "drafter", target_layer_ids=ids))
    model = Model()
    first, second = features(model.config).chunk(2, dim=-1)
    right, swapped = (model.context(torch.cat(order, dim=-1)[None], torch.arange(11)[None])[1] for order in
                      ([first, second], [second, first]))  # fmt: skip
    assert not torch.allclose(right, swapped, atol=0.1)


def test_trap_04_which_norms_the_injected_context_passes() -> None:
    model = Model()
    rows, positions = features(model.config)[None], torch.arange(11)[None]
    k, v = model.context(rows, positions)
    double = {
        name: model.changed(**{name: 2 * model.tensors[stored]}).context(rows, positions)
        for name, stored in (
            ("hidden_norm_weight", "hidden_norm.weight"),
            ("layers_0_input_layernorm_weight", "layers.0.input_layernorm.weight"),
            ("layers_0_self_attn_k_norm_weight", "layers.0.self_attn.k_norm.weight"),
        )
    }
    torch.testing.assert_close(double["hidden_norm_weight"][1], 2 * v)  # after fc, before V, which has no norm
    torch.testing.assert_close(double["hidden_norm_weight"][0], k, atol=1e-4, rtol=0)  # K is normed again
    torch.testing.assert_close(double["layers_0_input_layernorm_weight"][0], k, atol=0, rtol=0)
    torch.testing.assert_close(double["layers_0_self_attn_k_norm_weight"][0][0], 2 * k[0])
    torch.testing.assert_close(double["layers_0_self_attn_k_norm_weight"][1], v, atol=0, rtol=0)
    gemma = Model(architecture="gemma4")
    values = gemma.context(features(gemma.config)[None], positions)[1]
    torch.testing.assert_close(values.square().mean(dim=-1), torch.ones(values.shape[:-1]), atol=1e-3, rtol=0)


def test_trap_05_a_block_begins_at_its_anchor_s_absolute_position() -> None:
    model = Model()
    base, _ = model.drafted(features(model.config, 11))
    assert {tuple(positions) for positions in model.rotated} == {tuple(range(11)), tuple(range(11, 16))}
    again, _ = model.drafted(features(model.config, 11))  # other garbage at the anchor's own row and behind it
    torch.testing.assert_close(again, base, atol=0, rtol=0)


def test_trap_06_a_round_appends_accepted_plus_one_rows(
    target: TransformersTarget, bundle: Bundle, backend: Backend, text: list[int]
) -> None:
    appended: list[int] = []
    starts: list[int] = []

    class Watched(Scripted):
        def append(self, features: Any) -> None:
            appended.append(len(features[0]))
            super().append(features)

        def draft(self, anchors: Any, noise: Any, sampling: Any) -> Any:
            starts.append(int(self.length[0]))
            return super().draft(anchors, noise, sampling)

    drafter = Watched(bundle, backend, text, len(PROMPT), lambda round_: round_ % 6)
    result = generate(target, drafter, Request(PROMPT, max_new_tokens=40, stop_ids=()))
    assert set(result.accepted) == {0, 1, 2, 3, 4, 5}
    assert appended[0] == len(PROMPT)
    assert appended[1:] == [accepted + 1 for accepted in result.accepted][: len(appended) - 1]
    anchors = len(PROMPT) + np.cumsum([0, *result.committed])
    assert starts == anchors[: len(starts)].tolist()


def test_trap_07_d2t_holds_offsets_or_ids(tmp_path: Path) -> None:
    config = make_config("speculators", draft_vocab_size=50)
    tensors = random_tensors(config)
    ids = tensors["d2t"]
    offsets = write_layout(tmp_path / "offsets", config, tensors)
    absolute = write_layout(tmp_path / "absolute", config, tensors)
    stored = load_file(absolute / "model.safetensors")
    assert not torch.equal(stored["d2t"], ids)
    save_file(stored | {"d2t": ids}, absolute / "model.safetensors")
    for folder in (offsets, absolute):
        assert open_checkpoint(folder).d2t.tolist() == ids.tolist()  # type: ignore[union-attr]
    undecidable = {key: value for key, value in stored.items() if key != "t2d"} | {"d2t": torch.arange(0, 100, 2) // 2}
    save_file(undecidable, absolute / "model.safetensors")
    with pytest.raises(BadInputError, match=r"--d2t offset\|absolute"):
        open_checkpoint(absolute)


def test_trap_08_a_reduced_vocabulary_has_no_mass_outside(tmp_path: Path, target_path: Path) -> None:
    config = make_config("speculators", draft_vocab_size=50)
    folder = write_layout(tmp_path / "drafter", config, random_tensors(config))
    checkpoint = open_checkpoint(folder)
    assert [checkpoint.load(f"markov_head.markov_w{i}.weight").shape[0] for i in (1, 2)] == [131, 50]
    drafting = Drafting(small_export(folder, tmp_path / "bundle"), backend_from_name("onnxruntime", 1))
    law = drafting.draft({0: 7}, {0: np.full(5, 0.5, np.float32)}, {0: Sampling(1.0)}).q[0, 0]
    q, p = drafting.target_law(law), np.full(131, 1 / 131)
    outside = np.setdiff1d(np.arange(131), checkpoint.d2t)
    assert (len(q), len(outside)) == (131, 81)
    assert (q[outside] == 0).all()
    rest = residual(p, q)
    np.testing.assert_allclose(rest[outside] * np.maximum(p - q, 0).sum(), p[outside])
    headless = load_file(folder / "model.safetensors")
    del headless["lm_head.weight"]
    save_file(headless, folder / "model.safetensors")
    with pytest.raises(BadInputError, match=r"lm_head.weight \[50, 32\] is missing"):
        open_checkpoint(folder, open_target(target_path))


def test_trap_09_the_softcap_comes_before_the_bias_and_does_not_cap_it() -> None:
    model = Model(final_logit_softcapping=0.5)
    base, hidden = model.drafted(features(model.config))
    torch.testing.assert_close(base, 0.5 * torch.tanh(hidden @ model.tensors["lm_head.weight"].T / 0.5))
    previous, zero = torch.tensor([7]), torch.zeros(1)
    _, q, _, _ = model.markov_step(previous, base[:1], hidden[:1], torch.zeros(1, 8), zero, zero + 1)
    w1, w2 = (model.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    logits = base[0] + w2 @ w1[7]
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(q[0], torch.softmax(logits, dim=0))


@pytest.mark.parametrize("how", [Sampling(0.7), Sampling(1.3, top_k=3), Sampling(0.7, top_p=0.5), Sampling()])
def test_trap_10_the_law_that_is_verified_is_the_law_that_was_drawn_from(
    bundle: Bundle, backend: Backend, how: Sampling
) -> None:
    drafting = Drafting(bundle, backend)
    drafting.append({0: features(bundle.config).numpy()})
    noise = np.random.default_rng(0).random(5, dtype=np.float32)
    draft = drafting.draft({0: 7}, {0: noise}, {0: how})
    assert draft.q.dtype == np.float32
    for token, law, uniform in zip(draft.tokens[0], draft.q[0], noise, strict=True):
        assert draw(law, float(uniform)) == token
    if how.top_k:
        assert ((draft.q[0] > 0).sum(axis=-1) == how.top_k).all()
    law = draft.q[0, 0].copy()
    warm = drafting.draft({0: 7}, {0: noise}, {0: Sampling(1.0)}).q[0, 0]
    assert not np.allclose(law, warm, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_trap_11_the_confidence_head_is_fp32_and_has_its_bias(tmp_path: Path, dtype: Any) -> None:
    """Row of W1 of the token before the slot; the hidden state after the final norm."""
    folder = make_checkpoint(tmp_path / "drafter")
    bundle = small_export(folder, tmp_path / "bundle", dtype)
    stored = load_file(folder / "model.safetensors")
    (graph,) = (graph for graph in bundle.graphs if graph.spec.name == "markov_step")
    kinds = {
        item.name: item.data_type for item in onnx.load(str(graph.path), load_external_data=False).graph.initializer
    }
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias", "markov_head.markov_w1.weight"):
        assert kinds[name] == onnx.TensorProto.FLOAT
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1), markov="step")
    draft = drafting.draft({0: 7}, {0: np.zeros(5, np.float32)}, {0: Sampling()})
    hidden = drafting.backend.to_host(drafting._tensors["hidden"])[0]
    weight, bias = stored["confidence_head.proj.weight"][0].numpy(), stored["confidence_head.proj.bias"].numpy()
    rows = stored["markov_head.markov_w1.weight"][[7, *draft.tokens[0, :-1].tolist()]].numpy()
    assert abs(bias[0]) > 1e-3
    assert draft.confidence_logits is not None
    np.testing.assert_allclose(draft.confidence_logits[0], np.c_[hidden, rows] @ weight + bias, atol=1e-5)


def test_trap_12_confidence_is_per_step_and_survival_is_cumulative() -> None:
    """Tools put their threshold on either; no policy here takes a threshold without saying which."""
    model = Model()
    base, hidden = model.drafted(features(model.config))
    noise = torch.full((1, 5), 0.5)
    *_, confidence, survival = model.markov_loop(torch.tensor([7]), base[None], hidden[None], noise, torch.ones(1))
    assert confidence is not None
    assert survival is not None
    steps = torch.sigmoid(confidence[0]).tolist()
    np.testing.assert_allclose(survival[0], [np.prod(steps[: k + 1]) for k in range(5)], rtol=1e-5)
    assert survival[0, -1] < min(steps)
    for name in ("threshold:0.5", "threshold", "0.5"):
        with pytest.raises(UsageError, match="is not known"):
            policy_from_name(name)


def test_trap_13_what_the_figures_count() -> None:
    """The bonus counts; acceptance per position is survival; a round that proposed fewer does not count there."""
    result = Generation(4, list(range(9)), proposed=[3, 3, 1], accepted=[1, 3, 0], committed=[2, 4, 1])
    assert result.acceptance_length == pytest.approx(7 / 3)
    assert result.accepted_per_position == [2 / 3, 1 / 2, 1 / 2]


@pytest.mark.parametrize("markov", ["loop", "step"])
def test_trap_14_the_state_of_the_rnn_head_begins_at_zero_in_every_block(tmp_path: Path, markov: Any) -> None:
    folder = make_checkpoint(tmp_path / "drafter", markov_head_type="rnn")
    bundle = small_export(folder, tmp_path / "bundle")
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1), markov=markov)
    noise = np.random.default_rng(0).random((2, 5), dtype=np.float32)
    laws = []
    for anchor, uniform in ((7, noise[0]), (99, noise[1]), (7, noise[0])):
        laws.append(drafting.draft({0: anchor}, {0: uniform}, {0: Sampling(1.0)}).q[0].copy())
    np.testing.assert_array_equal(laws[0], laws[2])
    assert not np.allclose(laws[0], laws[1], atol=1e-3)


def test_trap_15_the_whole_block_runs_however_little_is_verified(
    target: TransformersTarget, bundle: Bundle, backend: Backend, text: list[int]
) -> None:
    """A slot sees the slots behind it, so a shorter block is another draft."""
    longer, shorter = (Model(block_size=size).drafted(features(make_config()))[0][0] for size in (5, 3))
    assert not torch.allclose(longer, shorter, atol=1e-3)

    drafts: list[list[int]] = []

    class Watched(Drafting):
        def draft(self, anchors: Any, noise: Any, sampling: Any) -> Any:
            draft = super().draft(anchors, noise, sampling)
            drafts.append(draft.tokens[0].tolist())
            return draft

    drafter = Watched(bundle, backend)
    result = generate(target, drafter, Request(PROMPT, max_new_tokens=2, stop_ids=()), Fixed(1))
    assert result.token_ids == text[:2]
    drafts.clear()
    result = generate(target, drafter, Request(PROMPT, max_new_tokens=3, stop_ids=()), Fixed(1))
    assert result.proposed[0] == 1
    assert all(len(tokens) == 5 for tokens in drafts)


def test_trap_16_windows_are_causal_and_anchored_or_moving_as_the_layout_says(tmp_path: Path) -> None:
    windows = {"layer_windows": (4, 4), "layer_causal": (True, True)}
    seen = {}
    for layout, moves in (("speculators", False), ("specforge", True)):
        config = make_config(layout, window_moves=moves, **windows)
        folder = write_layout(tmp_path / layout, config, random_tensors(config))
        read = open_checkpoint(folder).config
        assert (read.window_moves, read.layer_causal) == (moves, (True, True))
        model = Model(layout=layout, window_moves=moves, **windows)
        rows = model._visible(0, torch.tensor([10]), 4)[0]
        held_at = model._row_positions(torch.tensor([10]), 4)[0].tolist()
        seen[layout] = [
            sorted([p for p, on in zip([*held_at, *range(10, 15)], row.tolist(), strict=True) if on]) for row in rows
        ]
    assert seen["speculators"] == [[6, 7, 8, 9, *range(10, 11 + slot)] for slot in range(5)]
    assert seen["specforge"] == [list(range(7 + slot, 11 + slot)) for slot in range(5)]


def test_trap_17_frequencies_and_features_keep_their_precision(tmp_path: Path) -> None:
    """Rounded to bf16 an angle at a far position is another angle; fp16 does not hold a feature of 1e5."""
    frequencies = Rope(theta=1e6).inverse_frequencies(128)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, 1e6 ** -(np.arange(0, 128, 2) / 128), rtol=1e-6)
    rounded = torch.from_numpy(frequencies).bfloat16().float().numpy()
    assert np.abs(np.cos(frequencies * 30_000) - np.cos(rounded * 30_000)).max() > 1
    bundle = small_export(make_checkpoint(tmp_path / "drafter"), tmp_path / "bundle", "float16")
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1))
    rows = features(bundle.config, 6).numpy()
    drafting.append({0: rows * 1e5})  # the norm behind fc takes the scale away again
    large = drafting.draft({0: 7}, {0: np.zeros(5, np.float32)}, {0: Sampling(1.0)}).q.copy()
    drafting.release(0)
    drafting.append({0: rows})
    usual = drafting.draft({0: 7}, {0: np.zeros(5, np.float32)}, {0: Sampling(1.0)}).q
    np.testing.assert_allclose(large, usual, atol=2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_trap_18_acceptance_is_one_minus_total_variation_which_is_half_of_l1(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.ones(6)), random.dirichlet(np.ones(6))
    rate = sum(q[token] * acceptance(p, q, token) for token in range(6))
    l1 = np.abs(p - q).sum()
    assert rate == pytest.approx(1 - l1 / 2)
    assert rate != pytest.approx(1 - l1, abs=0.01)


def test_trap_19_a_z_lab_block_is_no_dspark_block(tmp_path: Path) -> None:
    """z-lab's loop slices slot 0 off: γ − 1 proposals, and heads have no place in it."""
    plain = {
        "markov_rank": 0,
        "markov_head_type": "none",
        "confidence_head": False,
        "confidence_head_with_markov": False,
    }
    config = make_config("z-lab", sample_from_anchor=False, **plain)
    tensors = random_tensors(config)
    read = open_checkpoint(write_layout(tmp_path / "z-lab", config, tensors)).config
    assert (read.sample_from_anchor, read.block_size, read.proposals) == (False, 5, 4)
    sliced, whole = (Model(tensors, sample_from_anchor=flag, **plain) for flag in (False, True))
    rows = features(read)
    torch.testing.assert_close(sliced.drafted(rows)[0], whole.drafted(rows)[0][1:], atol=1e-5, rtol=0)
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "deepspec"))
    with pytest.raises(BadInputError, match="cannot hold"):
        plan_conversion(checkpoint, "z-lab")


def test_trap_20_the_drafter_knows_its_tokenizer_template_and_thinking_mode(tmp_path: Path) -> None:
    def made(name: str, template: str, token: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, token: 1}}}))
        (folder / "chat_template.jinja").write_text(template)
        return tokenizer_identity(folder)

    own = made("own", "{{ messages }}", "b")
    thinking = made("thinking", "{% if enable_thinking %}<think>{% endif %}{{ messages }}", "b")
    other = made("other", "{{ messages }}", "c")
    assert (own["thinking"], thinking["thinking"]) == (False, True)
    assert identity_differences(own, own, "here") == ([], [])
    faults, warnings = identity_differences(own, thinking, "here")
    assert (len(faults), len(warnings)) == (0, 1)
    faults, warnings = identity_differences(own, other, "here")
    assert (len(faults), len(warnings)) == (1, 0)


def test_trap_21_the_verified_length_must_not_hang_on_a_token_that_it_discards() -> None:
    random = np.random.default_rng(0)
    p, q = ({i: random.dirichlet(np.ones(3)) for i in range(3)} for _ in "pq")
    rules = {
        "earlier token": lambda draft: 1 if len(draft) == 2 and draft[0] == 0 else len(draft),
        "discarded token": lambda draft: 1 if len(draft) == 2 and draft[1] == 0 else len(draft),
    }
    bent = {name: total_variation(law_of_output(p, q, q, 2, 3, verified=rule), target_law(p, 3)) for name, rule in
            rules.items()}  # fmt: skip
    assert bent["earlier token"] < 1e-12
    assert bent["discarded token"] > 0.01
    confidence = np.random.default_rng(1).random((20, 5))
    for policy in (Fixed(), Fixed(2), policy_from_name("fixed:3")):
        lengths = policy.lengths(confidence)
        for row, length in enumerate(lengths):  # the confidence behind slot ℓ knows the token of slot ℓ
            changed = confidence.copy()
            changed[row, length + 1 :] = 0.0
            assert policy.lengths(changed)[row] == length


def test_trap_22_a_nested_configuration_leaves_out_its_class_s_defaults(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    library = Qwen3Config()
    config = make_config("speculators", head_dim=library.head_dim)
    folder = write_layout(tmp_path / "drafter", config, random_tensors(config))
    nested = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    for key in ("head_dim", "rms_norm_eps", "rope_theta", "rope_parameters"):
        nested.pop(key, None)
    edit(folder, transformer_layer_config=nested)
    read = open_checkpoint(folder).config
    assert read.head_dim == library.head_dim == 128
    assert read.rms_norm_eps == library.rms_norm_eps
    assert read.rope.theta == library.rope_parameters["rope_theta"]
    nested.pop("model_type")
    with pytest.raises(BadInputError, match="model_type"):
        open_checkpoint(edit(folder, transformer_layer_config=nested))


@pytest.mark.parametrize("place", range(1, 12))
def test_trap_23_a_stop_token_or_the_limit_cuts_inside_the_accepted_prefix(
    target: TransformersTarget, bundle: Bundle, backend: Backend, text: list[int], place: int
) -> None:
    drafter = Scripted(bundle, backend, text, len(PROMPT), lambda round_: 99)
    limited = generate(target, drafter, Request(PROMPT, max_new_tokens=place, stop_ids=()))
    assert (limited.token_ids, limited.stop_reason) == (text[:place], "length")
    end = text.index(text[place])
    drafter = Scripted(bundle, backend, text, len(PROMPT), lambda round_: 99)
    stopped = generate(target, drafter, Request(PROMPT, max_new_tokens=40, stop_ids=(text[place],)))
    assert (stopped.token_ids, stopped.stop_reason) == (text[: end + 1], "stop")
    assert sum(stopped.committed) == end
