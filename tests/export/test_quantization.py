"""Quantised bundles: the numbers and their bytes, what parity and the record say, and who else reads the graphs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from drafters import canonical_checkpoint, make_checkpoint, make_config, random_tensors
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.errors import BadInputError, CheckFailedError, UsageError
from dspark.drafter.model import reference_from_tensors
from dspark.engines.backend import backend_from_name
from dspark.engines.build import build_plan, preflights, require_preflight
from dspark.engines.sku import gpu_without_device
from dspark.export import shadow, weights
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import DTYPES, Dtype, ExportOptions
from dspark.export.exporter import export_bundle, plan_export, references_of, rounding_reference
from dspark.export.parity import check_parity
from dspark.export.quantization import (
    KINDS,
    Kind,
    Quantization,
    dequantize,
    packed,
    quantize,
    quantized_names,
    scales_name,
    unpacked,
)
from dspark.export.quantization_report import Acceptance, AcceptanceTrial

# Every width a multiple of 64, and of 128 but for the heads' 64
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 16,
    "vocab_size": 132,
    "attention_bias": True,
}
OPTIONS = ExportOptions(context=(160,), prefill=16, opset=21)
BLOCK = "block-b1-c160"
MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def trial(before: float = 2.0, after: float = 2.0) -> AcceptanceTrial:
    """A measured acceptance length that is given."""
    return AcceptanceTrial(lambda *bundles: [Acceptance("all", 3, before, after, 30, 30, 3, 0)])


Exported = Callable[[Kind, Dtype], Bundle]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "drafter", **SIZES))


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A bundle of each kind and dtype, made once."""

    @functools.cache
    def export(kind: Kind, dtype: Dtype) -> Bundle:
        options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=Quantization(kind))
        output = tmp_path_factory.mktemp("exported") / "bundle"
        return export_bundle(checkpoint, output, options, backend_from_name("onnxruntime", 1), trial=trial())[0]

    return export


@pytest.fixture(scope="module")
def int4(exported: Exported) -> Bundle:
    return exported("int4", "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [64, 128])
def test_weights_are_off_by_half_a_step_at_most(kind: Kind, dtype: Dtype, block: int) -> None:
    matrix = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    matrix[2, :block] = 0
    integers, scales = quantize(matrix, Quantization(kind, block), dtype)
    assert (integers.shape, scales.shape) == ((6, 256), (6, 256 // block))
    assert scales.dtype == getattr(torch, dtype)
    assert bool((scales > 0).all()), "TensorRT refuses others"
    assert int(integers.abs().max()) == {"int8": 127, "int4": 7}[kind]
    step = scales.float().repeat_interleave(block, dim=1)
    # A scale that its dtype rounded down leaves the largest weight of a block beyond the last integer
    slack = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype] * 127
    assert bool(((dequantize(integers, scales) - matrix).abs() <= step * (0.5 + slack)).all())
    assert bool((dequantize(integers, scales)[2, :block] == 0).all())


def test_int4_lies_as_onnx_has_it() -> None:
    """Every value in both halves of a byte, against onnx's own reader of raw data."""
    values = np.array([[a, b] for a in range(-8, 8) for b in range(-8, 8)], np.int8).reshape(16, 32)
    tensor = helper.make_tensor("w", TensorProto.INT4, values.shape, packed(values).tobytes(), raw=True)
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int8), values)
    np.testing.assert_array_equal(unpacked(packed(values)), values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_onnx_dequantizes(checkpoint: Checkpoint, exported: Exported, kind: Kind) -> None:
    """The bytes of the weight file through onnx's reference ``DequantizeLinear``; those of the reference model."""
    bundle = exported(kind, "float32")
    model = onnx.load(str(bundle.graph("block", 1, 160).path))
    name = "layers.1.mlp.gate_proj.weight"
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    node = next(node for node in model.graph.node if name in node.input)
    assert node.op_type == "DequantizeLinear"
    result = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [128, 192])
    graph = helper.make_graph([node], "dequantize", [], [result], [stored[each] for each in node.input])
    (found,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])).run(None, {})
    np.testing.assert_array_equal(found.T, bundle.load(name).numpy())
    wanted = dequantize(*quantize(checkpoint.load(name), Quantization(kind), "float32"))
    assert torch.equal(bundle.load(name), wanted)


@pytest.mark.parametrize("rows", [None, slice(0, 1), slice(3, 8), slice(5, 6), slice(130, 140), [7, 0, 4]])
def test_rows_come_back_as_of_the_whole(int4: Bundle, rows: Any) -> None:
    whole = int4.load("lm_head.weight")
    assert whole.shape == (132, 128)
    assert torch.equal(int4.load("lm_head.weight", rows), whole if rows is None else whole[rows])


def test_a_large_matrix_is_written_some_rows_at_a_time(
    checkpoint: Checkpoint, int4: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(name: str, rows: Any = None) -> torch.Tensor:
        tensor = checkpoint.load(name, rows)
        asked.append(tensor.numel())
        return tensor

    monkeypatch.setattr(weights, "_PIECE_BYTES", 4 * 7 * 128)
    plan = plan_export(checkpoint, dataclasses.replace(OPTIONS, quantization=Quantization("int4"))).weights
    sha256 = weights.write_weights(plan, load, tmp_path / "weights.data")
    assert sha256 == int4.manifest["files"]["graphs/weights.data"]["sha256"]
    assert (tmp_path / "weights.data").read_bytes() == (int4.path / "graphs" / "weights.data").read_bytes()
    assert max(asked) <= 7 * 128 + 256


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_but_matrices_of_layers_and_the_head(exported: Exported, dtype: Dtype) -> None:
    bundle = exported("int8", dtype)
    stored = {weight["name"]: weight["dtype"] for weight in bundle.manifest["weights"]}
    names = {name for name, kind in stored.items() if kind == "int8"}
    assert names == set(quantized_names(bundle.config))
    assert len(names) == 2 * len(MATRICES) + 1
    assert {name.split(".")[-2] for name in names} == {*MATRICES, "lm_head"}
    assert {stored[scales_name(name)] for name in names} == {dtype}
    assert stored["embed_tokens.weight"] == dtype
    assert {stored["fc.weight"], stored["norm.weight"], stored["markov_head.markov_w2.weight"]} == {"float32"}
    assert set(bundle.manifest["quantization"]["tensors"]) == names


def test_a_tied_head_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    config = make_config(**SIZES, draft_vocab_size=132)
    tied = canonical_checkpoint(tmp_path / "drafter", config)
    head = random_tensors(config)["embed_tokens.weight"]

    def load(name: str, rows: Any = None) -> torch.Tensor:
        tensor = head if name in ("embed_tokens.weight", "lm_head.weight") else Checkpoint.load(tied, name)
        return tensor if rows is None else tensor[rows]

    plan = weights.plan_weights(config, "float32", tied=True, quantization=Quantization("int4"))
    weights.write_weights(plan, load, tmp_path / "weights.data")
    embedding, copy = (
        weights.read_tensor(tmp_path / "weights.data", plan.tensors, name)
        for name in ("embed_tokens.weight", "lm_head.weight")
    )
    assert torch.equal(embedding, head)
    assert torch.equal(copy, dequantize(*quantize(head, Quantization("int4"), "float32")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_holds_and_the_cost_is_measured(exported: Exported, kind: Kind, dtype: Dtype) -> None:
    bundle = exported(kind, dtype)
    assert bundle.manifest["parity"]["passed"]
    assert bundle.manifest["parity"]["fp32_shadow"] == (dtype == "bfloat16")
    cost = {(row["graph"], row["output"]): row for row in bundle.manifest["quantization"]["cost"]}
    contexts = {(f"context-b1-n{rows}", output) for rows in (6, 16) for output in "kv"}
    assert set(cost) == contexts | {(BLOCK, output) for output in ("base_logits", "hidden", "greedy tokens")}
    assert 0 < cost[BLOCK, "greedy tokens"]["agreement"] < 1
    rms = cost["context-b1-n6", "v"]["rms"] / cost["context-b1-n6", "v"]["magnitude"]
    # Of weights near a normal law in blocks of 64, about 2.4 deviations reach the last integer: a step is 2.4/limit
    assert rms == pytest.approx(2.4 / {"int8": 127, "int4": 7}[kind] / 12**0.5, rel=0.25)


def another_scale(model: onnx.ModelProto) -> None:
    """One matrix with the scales of its neighbour, which has the same sizes."""
    node = next(node for node in model.graph.node if "layers.0.mlp.gate_proj.weight" in node.input)
    node.input[1] = scales_name("layers.0.mlp.up_proj.weight")
    assert any(tensor.name == node.input[1] for tensor in model.graph.initializer)


def another_matrix(model: onnx.ModelProto) -> None:
    """k where v belongs."""
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("layers.1.self_attn.v_proj.weight", "layers.1.self_attn.k_proj.weight")


def halves_swapped(model: onnx.ModelProto) -> None:
    """The bytes of a matrix read one on: every value is in the other half, or in the next byte."""
    tensor = next(t for t in model.graph.initializer if t.name == "layers.0.self_attn.o_proj.weight")
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) + 1)


@pytest.mark.parametrize("mutate", [another_scale, another_matrix, halves_swapped])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_catches(
    checkpoint: Checkpoint,
    exported: Exported,
    tmp_path: Path,
    dtype: Dtype,
    mutate: Callable[[onnx.ModelProto], None],
) -> None:
    bundle, backend = exported("int4", dtype), backend_from_name("onnxruntime", 1)
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    graphs = [Graph(graph.spec, copy / graph.spec.file) for graph in bundle.graphs]
    for graph in graphs:
        if graph.spec.name == "block":
            model = onnx.load(str(graph.path), load_external_data=False)
            mutate(model)
            graph.path.write_bytes(model.SerializeToString())
    wanted = references_of(bundle.config, checkpoint.load, bundle.quantization, dtype).wanted
    report = check_parity(wanted, graphs, rounding_reference(wanted, dtype, bundle.load), backend)
    assert BLOCK in {row.graph for row in report.rows if not row.passed}


def test_the_original_weights_are_no_reference(checkpoint: Checkpoint, int4: Bundle) -> None:
    """The tolerance is too tight for what quantisation costs: parity is against the quantised weights."""
    reference = reference_from_tensors(checkpoint.config, checkpoint.load)
    report = check_parity(reference, int4.graphs, reference, backend_from_name("onnxruntime", 1))
    assert not report.passed
    assert report.costs == ()


def test_without_quantisation_there_is_no_cost(checkpoint: Checkpoint, int4: Bundle) -> None:
    wanted = references_of(checkpoint.config, checkpoint.load, int4.quantization, "float32").wanted
    report = check_parity(wanted, int4.graphs, wanted, backend_from_name("onnxruntime", 1), original=wanted)
    assert report.passed
    assert {row.max_abs for row in report.costs} == {0.0, None}
    assert {row.agreement for row in report.costs} == {1.0, None}


def test_the_cost_goes_through_the_cache(checkpoint: Checkpoint, int4: Bundle) -> None:
    """Weights that only ``context`` reads: the block differs by the rows that each model has cached."""

    def load(name: str, rows: Any = None) -> torch.Tensor:
        tensor = checkpoint.load(name, rows)
        return tensor.flip(0) if name == "fc.weight" else tensor

    wanted = references_of(checkpoint.config, checkpoint.load, int4.quantization, "float32").wanted
    original = references_of(checkpoint.config, load, int4.quantization, "float32").wanted
    runner = backend_from_name("onnxruntime", 1)
    cost = {row.output: row for row in check_parity(wanted, int4.graphs, wanted, runner, original=original).costs}
    assert cost["hidden"].max_abs is not None
    assert cost["hidden"].max_abs > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_fuses_every_product(exported: Exported, tmp_path: Path, kind: Kind) -> None:
    bundle = exported(kind, "float32")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(bundle.graph("block", 1, 160).path), options, providers=["CPUExecutionProvider"])
    model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 2 * len(MATRICES) + 1
    assert "DequantizeLinear" not in kinds


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorrt_rtx_builds_it(exported: Exported, kind: Kind, dtype: Dtype) -> None:
    bundle, sku = exported(kind, dtype), gpu_without_device([(8, 6), (8, 9)])
    require_preflight(preflights(bundle, "tensorrt-rtx", [sku]))
    assert len(build_plan(bundle.graph("block", 1, 160), "tensorrt-rtx", sku)) > 100_000


def test_the_bf16_shadow_dequantizes_large_matrices_in_pieces(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same outputs, to fp32 sums in another order, whether a matrix is dequantised whole or in blocks of inputs."""
    backend = backend_from_name("onnxruntime", 1)
    graph = exported("int4", "bfloat16").graph("block", 1, 160)
    generator = np.random.default_rng(0)
    caches = [tensor for tensor in graph.spec.inputs if tensor.name.endswith("_cache")]
    inputs = {
        "anchor": np.array([3]),
        "context_length": np.array([20]),
        **{tensor.name: generator.standard_normal(tensor.shape).astype(np.float32) for tensor in caches},
    }
    whole = backend.evaluate(shadow.fp32_shadow(graph), inputs)
    monkeypatch.setattr(shadow, "_PIECE", 64 * 132)
    pieces = shadow.fp32_shadow(graph)
    assert pieces.model is not None
    assert b"lm_head.weight.64" in pieces.model
    for name, found in backend.evaluate(pieces, inputs).items():
        np.testing.assert_allclose(found, whole[name], rtol=0, atol=2**-6)


def test_the_record_says_before_and_after(checkpoint: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[bool, ...]] = []

    def measure(before: Bundle, after: Bundle) -> list[Acceptance]:
        seen.append((before.quantization is None, after.quantization == Quantization("int8")))
        assert {g.spec for g in before.graphs} == {g.spec for g in after.graphs}
        assert all(graph.path.is_file() for graph in before.graphs)
        return [Acceptance("all", 3, 2.0, 1.92, 30, 31, 2, 1)]

    options = dataclasses.replace(OPTIONS, quantization=Quantization("int8"))
    backend = backend_from_name("onnxruntime", 1)
    bundle, _ = export_bundle(checkpoint, tmp_path / "b", options, backend, trial=AcceptanceTrial(measure))
    assert seen == [(True, True)]
    record = bundle.manifest["quantization"]
    assert (record["kind"], record["block"], record["max_tau_loss"]) == ("int8", 64, 0.05)
    assert record["tau"] == [
        {
            "domain": "all", "prompts": 3, "before": 2.0, "after": 1.92, "loss": pytest.approx(0.04),
            "rounds_before": 30, "rounds_after": 31, "equal_to_plain": 2, "near_ties": 1,
        }
    ]  # fmt: skip
    assert record["bytes"]["after"] == (bundle.path / "graphs" / "weights.data").stat().st_size
    assert record["bytes"]["before"] == plan_export(checkpoint, OPTIONS).weights.bytes
    assert record["parity_before"]["passed"]
    assert {path.name for path in bundle.path.iterdir()} == {"manifest.json", "graphs"}


@pytest.mark.parametrize(("after", "kept"), [(1.91, True), (1.89, False), (2.3, True)])
def test_a_loss_beyond_the_bound_leaves_no_bundle(
    checkpoint: Checkpoint, tmp_path: Path, after: float, kept: bool
) -> None:
    options = dataclasses.replace(OPTIONS, quantization=Quantization("int8"))
    arguments = checkpoint, tmp_path / "bundle", options, backend_from_name("onnxruntime", 1)
    if kept:
        export_bundle(*arguments, trial=trial(2.0, after))
        return
    with pytest.raises(CheckFailedError, match=r"τ from 2\.000 to 1\.890, 5\.5% less; 5\.0% may go") as caught:
        export_bundle(*arguments, trial=trial(2.0, after))
    assert caught.value.details["quantization"]["tau"][0]["after"] == after
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_export_is_never_made_untried(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, quantization=Quantization("int8"))
    with pytest.raises(UsageError, match="target and prompts"):
        export_bundle(checkpoint, tmp_path / "bundle", options, backend_from_name("onnxruntime", 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "sizes", "message"),
    [
        (Quantization("int8", 128), SIZES, r"o_proj.weight \(and 3 more\) has 64 inputs.*use --quantize-block 64"),
        (Quantization("int8"), {**SIZES, "intermediate_size": 100}, r"down_proj.weight \(and 1 more\) has 100 inputs"),
        (Quantization("int4"), {**SIZES, "vocab_size": 131}, r"lm_head.weight has 131 outputs.*use --quantize int8"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, how: Quantization, sizes: dict[str, Any], message: str) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "drafter", **sizes))
    with pytest.raises(BadInputError, match=message):
        plan_export(checkpoint, dataclasses.replace(OPTIONS, quantization=how))


def test_an_odd_vocabulary_takes_int8() -> None:
    Quantization("int8").check_fit(make_config(**{**SIZES, "vocab_size": 131}))


def test_options_out_of_range_are_refused() -> None:
    for kind, block in (("int3", 64), ("int4", 48)):
        with pytest.raises(UsageError):
            Quantization(kind, block)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="21"):
        ExportOptions(quantization=Quantization("int4"))


def test_a_value_that_is_no_number_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def load(name: str, rows: Any = None) -> torch.Tensor:
        tensor = checkpoint.load(name, rows)
        if name == "lm_head.weight":
            tensor[5, 3] = float("nan")
        return tensor

    plan = plan_export(checkpoint, dataclasses.replace(OPTIONS, quantization=Quantization("int4"))).weights
    with pytest.raises(BadInputError, match=r"lm_head.weight holds NaN or Inf, in rows \[5\]"):
        weights.write_weights(plan, load, tmp_path / "weights.data")


def test_graphs_say_how_they_are_quantised(int4: Bundle) -> None:
    for graph in int4.graphs:
        model = onnx.load(str(graph.path), load_external_data=False)
        props = {prop.key: prop.value for prop in model.metadata_props}
        assert props["dspark.quantization"] == "int4 in blocks of 64"
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
    assert json.loads((int4.path / "manifest.json").read_text())["export"]["quantization"] == {
        "kind": "int4",
        "block": 64,
    }
