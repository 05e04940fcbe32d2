"""The fp32 shadow of a bf16 graph, for runtimes without bf16 kernels.

Same nodes and same weights; products are computed in fp32, and every value that is bf16 in the graph is rounded
to bf16 and back. It proves structure, weights and rounding points, not the bf16 kernels of a device.
"""

from __future__ import annotations

import dataclasses
import math

import onnx
from onnx import TensorProto, helper

from .bundle import Graph
from .contract import TensorSpec

_PIECE = 1 << 22  # elements of a matrix that are widened at a time


def fp32_shadow(graph: Graph) -> Graph:
    """The graph with fp32 in the place of bf16, in memory; its weights stay in the same file."""
    model = onnx.load(str(graph.path), load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    rounded = {
        value.name
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16
    }
    nodes: list[onnx.NodeProto] = []
    stored = {w.name: f"{w.name}.fp32" for w in model.graph.initializer if w.data_type == TensorProto.BFLOAT16}
    gathered = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    large = {
        w.name: w
        for w in model.graph.initializer
        if w.name in stored and w.name not in gathered and math.prod(w.dims) > _PIECE and len(w.dims) == 2
    }
    for name, widened in stored.items():
        if name in large or name in gathered:
            continue
        nodes.append(helper.make_node("Cast", [name], [widened], to=TensorProto.FLOAT))
    for node in model.graph.node:
        if node.op_type == "Gemm" and node.input[1] in large:
            nodes += _in_pieces(node, large[node.input[1]], model)
            continue
        if node.op_type == "Gather" and node.input[0] in stored:  # rows first: a table is not widened whole
            rows = f"{node.output[0]}.rows"
            nodes.append(helper.make_node("Gather", node.input, [rows], axis=0))
            nodes.append(helper.make_node("Cast", [rows], [node.output[0]], to=TensorProto.FLOAT))
            continue
        inputs = [stored.get(name, name) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
        outputs = [name for name in node.output if name in rounded]
        exact = {name: f"{name}.exact" for name in outputs}
        for i, name in enumerate(node.output):
            node.output[i] = exact.get(name, name)
        if node.op_type == "Cast" and outputs:
            node.attribute[0].i = TensorProto.FLOAT
        nodes.append(node)
        for name in outputs:
            nodes.append(helper.make_node("Cast", [exact[name]], [f"{name}.bf16"], to=TensorProto.BFLOAT16))
            nodes.append(helper.make_node("Cast", [f"{name}.bf16"], [name], to=TensorProto.FLOAT))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    spec = dataclasses.replace(
        graph.spec,
        inputs=tuple(_widened(tensor) for tensor in graph.spec.inputs),
        outputs=tuple(_widened(tensor) for tensor in graph.spec.outputs),
    )
    return Graph(spec, graph.path, model.SerializeToString())


def _in_pieces(node: onnx.NodeProto, weight: onnx.TensorProto, model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """A product with a large [out, in] matrix as products with some of its rows at a time, each widened for itself."""
    rows, width = weight.dims
    place = {entry.key: int(entry.value) for entry in weight.external_data if entry.key != "location"}
    location = next(entry.value for entry in weight.external_data if entry.key == "location")
    step = max(1, _PIECE // width)
    nodes, parts = [], []
    for start in range(0, rows, step):
        count = min(step, rows - start)
        name = f"{weight.name}.{start}"
        piece = onnx.TensorProto(
            name=name, data_type=weight.data_type, dims=(count, width), data_location=TensorProto.EXTERNAL
        )
        offset = place["offset"] + 2 * start * width
        for key, value in (("location", location), ("offset", offset), ("length", 2 * count * width)):
            piece.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(piece)
        part = f"{node.output[0]}.{start}"
        nodes.append(helper.make_node("Cast", [name], [f"{name}.fp32"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Gemm", [node.input[0], f"{name}.fp32"], [part], transB=1))
        parts.append(part)
    exact = f"{node.output[0]}.exact"
    nodes.append(helper.make_node("Concat", parts, [exact], axis=1))
    if len(node.input) > 2:
        nodes.append(helper.make_node("Cast", [node.input[2]], [f"{exact}.bias"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Add", [exact, f"{exact}.bias"], [f"{exact}.sum"]))
        exact = f"{exact}.sum"
    nodes.append(helper.make_node("Cast", [exact], [f"{node.output[0]}.bf16"], to=TensorProto.BFLOAT16))
    nodes.append(helper.make_node("Cast", [f"{node.output[0]}.bf16"], [node.output[0]], to=TensorProto.FLOAT))
    return nodes


def _widened(tensor: TensorSpec) -> TensorSpec:
    return dataclasses.replace(tensor, dtype="float32") if tensor.dtype == "bfloat16" else tensor
