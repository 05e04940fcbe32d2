"""The exported graphs in plain ONNX Runtime, bound only by the names of the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from drafters import canonical_checkpoint, lend_target, make_checkpoint, make_config
from golden import CASES, FORMATS, Golden, load_golden
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.rope import Rope
from dspark.drafter.target import open_target
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions, default_context
from dspark.export.exporter import export_bundle


def sessions(bundle: Bundle, batch: int = 1) -> dict[tuple[str, int], onnxruntime.InferenceSession]:
    return {
        (graph.spec.name, graph.spec.size): onnxruntime.InferenceSession(
            str(graph.path), providers=["CPUExecutionProvider"]
        )
        for graph in bundle.graphs
        if graph.spec.batch == batch
    }


def run(session: onnxruntime.InferenceSession, **inputs: Any) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


@pytest.mark.parametrize("markov", ["loop", "unrolled"])
@pytest.mark.parametrize("case", CASES)
def test_matches_deepspec(shared: Path, tmp_path: Path, case: str, markov: Any) -> None:
    """Every round of the golden cases within 2e-4: context, block, teacher-forced steps."""
    golden = load_golden(shared / "golden" / "deepspec" / case)
    check_rounds(open_checkpoint(golden.folder), golden, tmp_path, markov)


@pytest.mark.parametrize("layout", FORMATS)
def test_every_layout_matches_deepspec(shared: Path, tmp_path: Path, layout: str) -> None:
    """The weights of qwen3-vanilla in every layout; the target, where it lends tensors, is made of that case."""
    golden = load_golden(shared / "golden" / "deepspec" / "qwen3-vanilla")
    target = open_target(lend_target(golden.folder, tmp_path / "target"))
    check_rounds(open_checkpoint(shared / "golden" / "formats" / layout, target), golden, tmp_path, "loop")


def check_rounds(checkpoint: Checkpoint, golden: Golden, tmp_path: Path, markov: Any) -> None:
    """Golden values through exported graphs, restricted to what the layout has: slots, draft tokens, heads."""
    config = checkpoint.config
    options = ExportOptions(context=(64,), prefill=16, markov=markov)
    bundle, _ = export_bundle(checkpoint, tmp_path / "bundle", options, backend_from_name("onnxruntime", 1))
    s = sessions(bundle)
    first_slot = 0 if config.sample_from_anchor else 1
    ids = slice(None) if checkpoint.d2t is None else torch.from_numpy(checkpoint.d2t)
    shape = (config.num_hidden_layers, 1, config.num_key_value_heads, 64, config.head_dim)
    k, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for r in golden.rounds:
        first, last = r.feature_positions
        size = next(n for n in bundle.sizes("context", 1) if n >= last - first)
        features = np.zeros((1, size, config.feature_size), np.float32)
        features[0, : last - first] = r.tensor("features")
        rows = run(s["context", size], features=features, positions=np.arange(first, first + size)[None])
        k[..., first:last, :], v[..., first:last, :] = (rows[n][..., : last - first, :] for n in "kv")
        block = run(
            s["block", 64],
            anchor=np.array([r.anchor]),
            context_length=np.array([r.start]),
            k_cache=k,
            v_cache=v,
        )
        close(block["base_logits"][0], r.tensor("base_logits")[first_slot:, ids])
        close(block["hidden"][0], r.tensor("hidden")[first_slot:])
        state: dict[str, Any] = {}
        if config.markov_head_type == "rnn":
            state["state"] = np.zeros((1, config.markov_rank), np.float32)
        for slot in range(config.proposals):
            step = run(
                s["markov_step", 0],
                previous=r.tensor("previous")[first_slot + slot][None].numpy(),
                base_logits=block["base_logits"][:, slot],
                hidden=block["hidden"][:, slot],
                noise=np.array([0.5], np.float32),
                temperature=np.array([1.0], np.float32),
                **state,
            )
            law = "logits" if config.markov_rank else "base_logits"
            close(step["q"][0], torch.softmax(r.tensor(law)[first_slot + slot][ids], dim=-1))
            if config.confidence_head:
                wanted = r.tensor("confidence_logits")[first_slot + slot]
                close(step["confidence_logit"][0], wanted)
            if state:
                state["state"] = step["next_state"]
        greedy = run(
            s["markov_loop", 0],
            anchor=np.array([r.anchor]),
            base_logits=block["base_logits"],
            hidden=block["hidden"],
            noise=np.zeros((1, config.proposals), np.float32),
            temperature=np.zeros(1, np.float32),
        )
        drawn = greedy["q"][0].argmax(axis=-1)
        assert ((drawn if checkpoint.d2t is None else checkpoint.d2t[drawn]) == greedy["tokens"][0]).all()
        assert (greedy["q"].sum(axis=-1) == 1).all()


def close(found: Any, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=2e-4)


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    half=st.integers(4, 11),
    layers=st.integers(1, 3),
    taps=st.sampled_from([[-1], [0], [0, 1, 5], [-1, 2, 3, 4]]),
    rank=st.sampled_from([0, 1, 5, 16]),
    head=st.sampled_from(["vanilla", "gated", "rnn"]),
    block=st.integers(4, 16),
    vocab=st.sampled_from([3, 17, 97, 120, 1031]),
    bias=st.booleans(),
    confidence=st.sampled_from([(False, False), (True, False), (True, True)]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    markov=st.sampled_from(["loop", "unrolled"]),
    seed=st.integers(0, 99),
)
def test_any_geometry_has_parity(tmp_path_factory: pytest.TempPathFactory, **drawn: Any) -> None:
    """Heads, layers, taps, ranks, block sizes and vocabularies that are no multiple of anything."""
    folder = tmp_path_factory.mktemp("any")
    rank = drawn["rank"]
    make_checkpoint(
        folder / "drafter",
        seed=drawn["seed"],
        dtype=getattr(torch, drawn["dtype"]),
        num_attention_heads=drawn["heads"][0],
        num_key_value_heads=drawn["heads"][1],
        head_dim=2 * drawn["half"],
        hidden_size=26,
        intermediate_size=37,
        num_hidden_layers=drawn["layers"],
        num_target_layers=8,
        target_layer_ids=drawn["taps"],
        markov_rank=rank,
        markov_head_type=drawn["head"],
        block_size=drawn["block"],
        vocab_size=drawn["vocab"],
        mask_token_id=2,
        attention_bias=drawn["bias"],
        enable_confidence_head=drawn["confidence"][0],
        confidence_head_with_markov=drawn["confidence"][1] and rank > 0,
    )
    options = ExportOptions(dtype=drawn["dtype"], batch=(1, 2), context=(40, 300), prefill=11, markov=drawn["markov"])
    _, report = export_bundle(
        open_checkpoint(folder / "drafter"), folder / "bundle", options, backend_from_name("onnxruntime", 1)
    )
    assert report.passed
    assert report.shadow == (drawn["dtype"] == "bfloat16")


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    architecture=st.sampled_from(["qwen3", "llama", "gemma4"]),
    rope=st.sampled_from(
        [
            {},
            {"interleaved": True},
            {"partial_rotary_factor": 0.5},
            {"kind": "linear", "factor": 4.0},
            {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.14},
            {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            {"kind": "proportional", "partial_rotary_factor": 0.5},
        ]
    ),
    windows=st.sampled_from([(None, None), (9, 9), (None, 30), (9, 70)]),
    causal=st.sampled_from([(False, False), (True, True), (True, False)]),
    window_moves=st.booleans(),
    sinks=st.booleans(),
    bias=st.booleans(),
    anchored=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    scales=st.sampled_from([(1.0, 1.0), (5.0, 0.25)]),
    draft_vocabulary=st.sampled_from([131, 40, 136]),
    target_hidden_size=st.sampled_from([32, 20]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_any_kind_of_drafter_has_parity(tmp_path_factory: pytest.TempPathFactory, **drawn: Any) -> None:
    """What no single layout holds together: every feature of the configuration, mixed."""
    folder = tmp_path_factory.mktemp("any")
    gemma4, (embed_scale, logit_scale) = drawn["architecture"] == "gemma4", drawn["scales"]
    config = make_config(
        architecture=drawn["architecture"],
        rope=Rope(theta=500.0, **drawn["rope"]),
        layer_windows=drawn["windows"],
        layer_causal=drawn["causal"],
        window_moves=drawn["window_moves"],
        attention_sinks=drawn["sinks"],
        attention_bias=drawn["bias"],
        k_eq_v=gemma4 and drawn["seed"] % 2 == 0,
        sample_from_anchor=drawn["anchored"],
        final_logit_softcapping=drawn["softcap"],
        embed_scale=embed_scale,
        logit_scale=logit_scale,
        draft_vocab_size=drawn["draft_vocabulary"],
        target_hidden_size=drawn["target_hidden_size"],
    )
    checkpoint = canonical_checkpoint(folder / "drafter", config, drawn["seed"], getattr(torch, drawn["dtype"]))
    context = default_context(config) if config.ring else (40, 300)
    options = ExportOptions(dtype=drawn["dtype"], batch=(1, 2), context=context, prefill=11)
    _, report = export_bundle(checkpoint, folder / "bundle", options, backend_from_name("onnxruntime", 1))
    assert report.passed


def test_graphs_are_plain_and_say_what_they_are(bundle: Bundle) -> None:
    names = {graph.spec.name for graph in bundle.graphs}
    assert names == {"context", "block", "markov_step", "markov_loop"}
    assert bundle.sizes("context", 1) == (6, 16)
    for graph in bundle.graphs:
        model = onnx.load(str(graph.path), load_external_data=False)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
        props = {prop.key: prop.value for prop in model.metadata_props}
        assert props["dspark.checkpoint_sha256"] == bundle.manifest["checkpoint"]["sha256"]
        for spec, value in zip(
            (*graph.spec.inputs, *graph.spec.outputs), (*model.graph.input, *model.graph.output), strict=True
        ):
            dims = value.type.tensor_type.shape.dim
            assert spec.name == value.name
            assert spec.shape == tuple(dim.dim_value for dim in dims), "every shape is static"


def test_the_loop_is_one_loop(bundle: Bundle) -> None:
    model = onnx.load(str(bundle.graph("markov_loop", 1).path), load_external_data=False)
    assert [node.op_type for node in model.graph.node].count("Loop") == 1


def test_weights_are_stored_once(bundle: Bundle) -> None:
    """All graphs read one file that is no larger than the tensors (and the padding to pages)."""
    files = {str(path.relative_to(bundle.path)) for path in bundle.path.rglob("*") if path.suffix != ".onnx"}
    assert files == {"manifest.json", "graphs", "graphs/weights.data"}
    tensors = sum(4 * int(np.prod(weight["shape"])) for weight in bundle.manifest["weights"])
    assert (bundle.path / "graphs" / "weights.data").stat().st_size <= tensors + 4096 * len(bundle.manifest["weights"])


def test_every_tensor_comes_back_from_the_bundle(bundle: Bundle, checkpoint_folder: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    for name in checkpoint.names:
        assert torch.equal(bundle.load(name), checkpoint.load(name)), name
