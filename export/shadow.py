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
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "Gemm"}
    initializers = {weight.name: weight for weight in model.graph.initializer}
    large = {
        name: weight
        for name, weight in initializers.items()
        if name in stored and name in multiplied and name not in gathered and math.prod(weight.dims) > _PIECE
    }
    quantized = {
        node.output[0]: node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        and node.output[0] in rounded
        and math.prod(initializers[node.input[0]].dims) > _PIECE
    }
    for name, widened in stored.items():
        if name in large or name in gathered:
            continue
        nodes.append(helper.make_node("Cast", [name], [widened], to=TensorProto.FLOAT))
    for node in model.graph.node:
        if node.op_type == "Gemm" and node.input[1] in large:
            nodes += _in_pieces(node, large[node.input[1]], model)
            continue
        if node.op_type == "DequantizeLinear" and node.output[0] in quantized:
            continue
        if node.op_type == "Gemm" and node.input[1] in quantized:
            nodes += _in_dequantized_pieces(node, quantized[node.input[1]], model)
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
    step = max(1, _PIECE // width)
    nodes, parts = [], []
    for start in range(0, rows, step):
        name = _rows(weight, start, min(start + step, rows), model)
        part = f"{node.output[0]}.{start}"
        nodes.append(helper.make_node("Cast", [name], [f"{name}.fp32"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Gemm", [node.input[0], f"{name}.fp32"], [part], transB=1))
        parts.append(part)
    exact = f"{node.output[0]}.exact"
    nodes.append(helper.make_node("Concat", parts, [exact], axis=1))
    return nodes + _finished(node, exact)


def _in_dequantized_pieces(
    node: onnx.NodeProto, dequantize: onnx.NodeProto, model: onnx.ModelProto
) -> list[onnx.NodeProto]:
    """A product with a large quantised [in, out] matrix as a sum over pieces of its inputs, each dequantised alone."""
    initializers = {weight.name: weight for weight in model.graph.initializer}
    integers, scales = (initializers[name] for name in dequantize.input)
    width, count = integers.dims
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in dequantize.attribute}
    block = attributes["block_size"]
    step = max(1, _PIECE // (count * block)) * block
    starts = range(0, width, step)
    output = node.output[0]
    sizes = helper.make_tensor(
        f"{output}.sizes", TensorProto.INT64, [len(starts)], [min(step, width - start) for start in starts]
    )
    model.graph.initializer.append(sizes)
    inputs = [f"{output}.input.{start}" for start in starts]
    nodes, total = [helper.make_node("Split", [node.input[0], sizes.name], inputs, axis=1)], ""
    for start, x in zip(starts, inputs, strict=True):
        stop = min(start + step, width)
        values = _rows(integers, start, stop, model)
        factors = _rows(scales, start // block, stop // block, model)
        part = f"{output}.{start}"
        nodes += [
            helper.make_node("Cast", [factors], [f"{factors}.fp32"], to=TensorProto.FLOAT),
            helper.make_node("DequantizeLinear", [values, f"{factors}.fp32"], [f"{values}.exact"], **attributes),
            helper.make_node("Cast", [f"{values}.exact"], [f"{values}.bf16"], to=TensorProto.BFLOAT16),
            helper.make_node("Cast", [f"{values}.bf16"], [f"{values}.fp32"], to=TensorProto.FLOAT),
            helper.make_node("Gemm", [x, f"{values}.fp32", *([total] if total else [])], [part]),
        ]
        total = part
    return nodes + _finished(node, total)


def _rows(weight: onnx.TensorProto, start: int, stop: int, model: onnx.ModelProto) -> str:
    """Rows of an external matrix as an initializer of their own."""
    name = f"{weight.name}.{start}"
    place = {entry.key: entry.value for entry in weight.external_data}
    row_bytes = int(place["length"]) // weight.dims[0]
    piece = onnx.TensorProto(
        name=name,
        data_type=weight.data_type,
        dims=(stop - start, weight.dims[1]),
        data_location=TensorProto.EXTERNAL,
    )
    offset, length = int(place["offset"]) + start * row_bytes, (stop - start) * row_bytes
    for key, value in (("location", place["location"]), ("offset", offset), ("length", length)):
        piece.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(piece)
    return name


def _finished(node: onnx.NodeProto, exact: str) -> list[onnx.NodeProto]:
    """The bias of a product that was computed in pieces, and the rounding of its sum."""
    nodes = []
    if len(node.input) > 2:
        nodes.append(helper.make_node("Cast", [node.input[2]], [f"{exact}.bias"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Add", [exact, f"{exact}.bias"], [f"{exact}.sum"]))
        exact = f"{exact}.sum"
    nodes.append(helper.make_node("Cast", [exact], [f"{node.output[0]}.bf16"], to=TensorProto.BFLOAT16))
    nodes.append(helper.make_node("Cast", [f"{node.output[0]}.bf16"], [node.output[0]], to=TensorProto.FLOAT))
    return nodes


def _widened(tensor: TensorSpec) -> TensorSpec:
    return dataclasses.replace(tensor, dtype="float32") if tensor.dtype == "bfloat16" else tensor
