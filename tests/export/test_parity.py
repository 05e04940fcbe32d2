"""Parity catches what makes drafters bad in production, one fault at a time, and not only noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from drafters import make_checkpoint
from onnx import helper, numpy_helper

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.errors import CheckFailedError
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors
from dspark.engines.backend import backend_from_name
from dspark.export import shadow
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle, rounding_reference
from dspark.export.parity import ROUNDS, ParityReport, check_parity

Mutation = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReferenceDrafter, Bundle]:
    folder = tmp_path_factory.mktemp("gated")
    make_checkpoint(folder / "drafter", markov_head_type="gated", target_layer_ids=[0, 1, 2])
    checkpoint = open_checkpoint(folder / "drafter")
    options = ExportOptions(context=(96,), prefill=16)
    bundle, _ = export_bundle(checkpoint, folder / "bundle", options, backend_from_name("onnxruntime", 1))
    return reference_from_tensors(checkpoint.config, checkpoint.load), bundle


def report(gated: tuple[ReferenceDrafter, Bundle], name: str, mutate: Mutation) -> ParityReport:
    """Parity with one kind of graph changed."""
    reference, bundle = gated
    graphs = []
    for graph in bundle.graphs:
        if graph.spec.name == name:
            model = onnx.load(str(graph.path), load_external_data=False)
            mutate(model)
            graph = Graph(graph.spec, graph.path, model.SerializeToString())
        graphs.append(graph)
    return check_parity(reference, graphs, reference, backend_from_name("onnxruntime", 1))


def insert_after_input(model: onnx.ModelProto, name: str, kind: str, *more: np.ndarray, **attributes: object) -> None:
    """Every reader of input ``name`` gets ``kind(name, more…)`` instead."""
    extra = [numpy_helper.from_array(array, f"mutation_{i}") for i, array in enumerate(more)]
    for node in model.graph.node:
        for i, value in enumerate(node.input):
            if value == name:
                node.input[i] = f"mutated_{name}"
    node = helper.make_node(kind, [name, *(tensor.name for tensor in extra)], [f"mutated_{name}"], **attributes)
    model.graph.node.insert(0, node)
    model.graph.initializer.extend(extra)


def shifted(name: str, by: int) -> Mutation:
    return lambda model: insert_after_input(model, name, "Add", np.array(by))


def features_taken(order: list[int]) -> Mutation:
    """The tapped layers in another order, or another layer in the place of one."""
    columns = np.concatenate([np.arange(32) + 32 * tap for tap in order])
    return lambda model: insert_after_input(model, "features", "Gather", columns, axis=2)


def without_bias(bias: str) -> Mutation:
    def mutate(model: onnx.ModelProto) -> None:
        graphs = [model.graph]
        graphs += [a.g for node in model.graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        removed = 0
        for graph in graphs:
            for node in graph.node:
                if node.op_type == "Gemm" and bias in node.input:
                    node.input.remove(bias)
                    removed += 1
        assert removed

    return mutate


FAULTS = {
    "context position + 1": ("context", shifted("positions", 1), "k"),
    "context position - 1": ("context", shifted("positions", -1), "k"),
    "block position + 1": ("block", shifted("context_length", 1), "hidden"),
    "block seeded one early": ("block", shifted("context_length", -1), "hidden"),
    "feature order swapped": ("context", features_taken([1, 0, 2]), "v"),
    "wrong layer tap": ("context", features_taken([0, 1, 1]), "v"),
    "gate bias missing in the loop": ("markov_loop", without_bias("markov_head.gate_proj.bias"), "q"),
    "gate bias missing in the step": ("markov_step", without_bias("markov_head.gate_proj.bias"), "q"),
    "confidence bias missing": ("markov_loop", without_bias("confidence_head.proj.bias"), "confidence_logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_catches(gated: tuple[ReferenceDrafter, Bundle], fault: str) -> None:
    graph, mutate, output = FAULTS[fault]
    rows = {(row.graph.partition("-")[0], row.output): row for row in report(gated, graph, mutate).rows}
    failed = {name for (name, _), row in rows.items() if not row.passed}
    assert not rows[graph, output].passed
    # The graph at fault is named, and block is blamed for a fault of context only through its cache
    assert failed <= ({graph, "block", "markov_loop"} if graph == "context" else {graph, "markov_loop"})


def test_passes_without_a_fault(gated: tuple[ReferenceDrafter, Bundle]) -> None:
    whole = report(gated, "context", lambda model: None)
    assert whole.passed
    rows = {(row.graph, row.output): row for row in whole.rows}
    assert rows["block-b1-c96", "hidden"].rounds >= ROUNDS
    outputs = {
        (g.spec.file.removeprefix("graphs/").removesuffix(".onnx"), o.name)
        for g in gated[1].graphs
        for o in g.spec.outputs
    }
    assert outputs <= set(rows), "every output of every graph is judged"


def test_nan_is_an_error(gated: tuple[ReferenceDrafter, Bundle]) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        insert_after_input(model, "hidden", "Mul", np.array(np.nan, np.float32))

    assert not report(gated, "markov_step", mutate).passed


def test_a_failed_check_leaves_no_bundle(checkpoint_folder: Path, tmp_path: Path) -> None:
    """Parity runs on the staged bundle; where it fails, nothing takes the output's place."""
    backend = backend_from_name("onnxruntime", 1)

    class Wrong:
        name = "wrong"

        def release(self, graph: Graph) -> None:
            pass

        def supports(self, dtype: str) -> bool:
            return True

        def evaluate(self, graph: Graph, inputs: dict) -> dict:  # type: ignore[type-arg]
            outputs = backend.evaluate(graph, inputs)
            return {name: value + (0.01 if name == "hidden" else 0) for name, value in outputs.items()}

    checkpoint, options = open_checkpoint(checkpoint_folder), ExportOptions(context=(64,))
    with pytest.raises(CheckFailedError, match=r"block-b1-c64\.hidden") as caught:
        export_bundle(checkpoint, tmp_path / "bundle", options, Wrong())
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["context position + 1", "block position + 1", "block seeded one early", "wrong layer tap"]
)
def test_the_bf16_shadow_catches_them_too(tmp_path: Path, fault: str) -> None:
    make_checkpoint(tmp_path / "drafter", target_layer_ids=[0, 1, 2])
    checkpoint = open_checkpoint(tmp_path / "drafter")
    options = ExportOptions(dtype="bfloat16", context=(96,), prefill=16)
    backend = backend_from_name("onnxruntime", 1)
    bundle, clean = export_bundle(checkpoint, tmp_path / "bundle", options, backend)
    assert clean.shadow
    name, mutate, _ = FAULTS[fault]
    for graph in bundle.graphs:
        if graph.spec.name == name:
            model = onnx.load(str(graph.path), load_external_data=False)
            mutate(model)
            graph.path.write_bytes(model.SerializeToString())
    reference = reference_from_tensors(checkpoint.config, checkpoint.load)
    rounding = rounding_reference(reference, "bfloat16", bundle.load)
    assert not check_parity(reference, bundle.graphs, rounding, backend).passed


def test_the_shadow_widens_large_matrices_some_rows_at_a_time(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same outputs whether a matrix is widened whole or in pieces, of which the last is smaller."""
    backend = backend_from_name("onnxruntime", 1)
    options = ExportOptions(dtype="bfloat16", context=(64,), prefill=16)
    bundle, _ = export_bundle(open_checkpoint(checkpoint_folder), tmp_path / "bundle", options, backend)
    graph = next(graph for graph in bundle.graphs if graph.spec.name == "block")
    generator = np.random.default_rng(0)
    shapes = {tensor.name: tensor.shape for tensor in graph.spec.inputs if tensor.name.endswith("_cache")}
    inputs = {
        "anchor": np.array([3]),
        "context_length": np.array([20]),
        **{name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
    }
    whole = backend.evaluate(shadow.fp32_shadow(graph), inputs)
    monkeypatch.setattr(shadow, "_PIECE", 900)
    pieces = shadow.fp32_shadow(graph)
    assert pieces.model is not None
    assert b"lm_head.weight.112" in pieces.model  # 28 rows of 32 at a time, and 19 at the end
    for name, found in backend.evaluate(pieces, inputs).items():
        np.testing.assert_allclose(found, whole[name], rtol=0, atol=2**-6)
