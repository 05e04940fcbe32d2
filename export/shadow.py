"""The fp32 shadow of a bf16 graph, for runtimes without bf16 kernels.

Same nodes and same weights; products are computed in fp32, and every value that is bf16 in the graph is rounded
to bf16 and back. It proves structure, weights and rounding points, not the bf16 kernels of a device.
"""

from __future__ import annotations

import dataclasses

import onnx
from onnx import TensorProto, helper

from .bundle import Graph
from .contract import TensorSpec


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
    for name, widened in stored.items():
        nodes.append(helper.make_node("Cast", [name], [widened], to=TensorProto.FLOAT))
    for node in model.graph.node:
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


def _widened(tensor: TensorSpec) -> TensorSpec:
    return dataclasses.replace(tensor, dtype="float32") if tensor.dtype == "bfloat16" else tensor
