"""Every graph of a bundle as an ONNX file, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import onnx

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import CheckFailedError, IntegrityError

from .backbone import add_block, add_context
from .builder import GraphBuilder
from .bundle import Bundle, Graph
from .contract import ExportOptions, GraphSpec
from .markov import add_markov_loop, add_markov_step
from .quantization import Quantization
from .version import tool_version
from .weights import WeightPlan, WeightRegion


def model_from_spec(
    spec: GraphSpec, config: DrafterConfig, options: ExportOptions, plan: WeightPlan, identity: dict[str, str]
) -> onnx.ModelProto:
    """The ONNX model of one graph; its weights are references into the weight file."""
    builder = GraphBuilder(plan)
    match spec.name:
        case "context":
            add_context(config, options.dtype, spec, builder)
        case "block":
            add_block(config, options.dtype, spec, builder)
        case "markov_step":
            add_markov_step(config, spec, builder)
        case _:
            add_markov_loop(config, spec, builder, options.markov == "unrolled")
    metadata = {**identity, "dspark.graph": spec.name, "dspark.tensors": json.dumps(spec.to_json())}
    return builder.model(spec.name, spec.inputs, spec.outputs, options.opset, metadata)


def identity_of(config: DrafterConfig, options: ExportOptions, checkpoint_sha256: str) -> dict[str, str]:
    """What every graph file says of its origin, in ``metadata_props``."""
    return {
        "dspark.version": tool_version(),
        "dspark.checkpoint_sha256": checkpoint_sha256,
        "dspark.drafter": json.dumps(config.to_json()),
        "dspark.dtype": options.dtype,
        "dspark.markov": options.markov,
        **_quantization(options.quantization),
    }


def markov_variant(bundle: Bundle, graph: Graph, markov: Literal["loop", "unrolled"]) -> Graph:
    """The Markov loop of a bundle written the other way, in memory; it reads the bundle's weights."""
    regions = {data["name"]: WeightRegion.from_json(data) for data in bundle.manifest["weights"]}
    builder = GraphBuilder(WeightPlan(regions, tied=False))
    add_markov_loop(bundle.config, graph.spec, builder, markov == "unrolled")
    spec, opset = graph.spec, int(bundle.manifest["export"]["opset"])
    model = builder.model(spec.name, spec.inputs, spec.outputs, opset, {"dspark.version": tool_version()})
    return Graph(spec, graph.path, model.SerializeToString(deterministic=True))


def _quantization(how: Quantization | None) -> dict[str, str]:
    return {} if how is None else {"dspark.quantization": str(how)}


def write_graph(model: onnx.ModelProto, path: Path) -> None:
    """Save beside the weight file and run ``onnx.checker`` with full check on what was saved.

    Raises:
        CheckFailedError: the checker refuses the graph, which is a fault of this tool.
    """
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckFailedError(f"{path.name}: onnx.checker refuses the graph: {error}") from error


def check_identity(bundle: Bundle) -> None:
    """Refuse a graph file that says that it is of another drafter, dtype or contract than the manifest.

    Raises:
        IntegrityError: with both values.
    """
    wanted = {
        "dspark.checkpoint_sha256": bundle.manifest["checkpoint"]["sha256"],
        "dspark.drafter": json.dumps(bundle.config.to_json()),
        "dspark.dtype": bundle.dtype,
        **_quantization(bundle.quantization),
    }
    for graph in bundle.graphs:
        model = onnx.load(str(graph.path), load_external_data=False)
        found = {prop.key: prop.value for prop in model.metadata_props}
        contract = {"dspark.graph": graph.spec.name, "dspark.tensors": json.dumps(graph.spec.to_json())}
        for key, value in (wanted | contract).items():
            if found.get(key) != value:
                raise IntegrityError(
                    f"{graph.path}: {key} is {found.get(key)!r}, the manifest says {value!r}; export again"
                )
