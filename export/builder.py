"""A thin layer over ``onnx.helper``: nodes by call, constants inline, weights in the external file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .contract import TensorSpec
from .quantization import scales_name
from .weights import FILE, WeightPlan, WeightRegion

ONNX_DTYPE = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
IR_VERSION = 10  # opset 20 to 22 came with IR 9 and 10; every runtime of interest reads 10


class GraphBuilder:
    """Collects the nodes of one graph; a body of a Loop shares the initializers of its parent."""

    def __init__(self, plan: WeightPlan, parent: GraphBuilder | None = None) -> None:
        self.plan = plan
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[Any, onnx.TensorProto] = parent.initializers if parent else {}
        self._counter: itertools.count[int] = parent._counter if parent else itertools.count()

    def body(self) -> GraphBuilder:
        return GraphBuilder(self.plan, self)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output and return that output's name."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        number = next(self._counter)
        names = [f"{kind.lower()}_{number}" + (f"_{i}" if outputs > 1 else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"{kind}_{number}", **attributes))
        return names

    def output(self, value: str, name: str) -> None:
        """Give ``value`` the name of a graph output."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"output_{name}"))

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        array: NDArray[Any] = np.asarray(values, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.initializers:
            self.initializers[key] = numpy_helper.from_array(array, f"constant_{len(self.initializers)}")
        return self.initializers[key].name

    def weight(self, *names: str) -> str:
        """An external initializer over one canonical tensor, or over neighbours read as one."""
        region = self.plan.region(*names)
        if region.name not in self.initializers:
            self.initializers[region.name] = _external(region)
        return region.name

    def linear(self, x: str, names: Sequence[str], biases: Sequence[str] = ()) -> str:
        """x [rows, in] by neighbouring matrices [out, in], quantised or not -> [rows, sum of out]."""
        if not self.plan.quantized(names[0]):
            return self.op("Gemm", x, self.weight(*names), *([self.weight(*biases)] if biases else []), transB=1)
        offsets = [[self.weight(bias)] for bias in biases] or [[] for _ in names]
        parts = [self.op("Gemm", x, self._dequantized(n), *bias) for n, bias in zip(names, offsets, strict=True)]
        return self.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]

    def _dequantized(self, name: str) -> str:
        """A quantised matrix as [in, out]."""
        scales = scales_name(name)
        block = self.plan.tensors[name].shape[0] // self.plan.tensors[scales].shape[0]
        return self.op("DequantizeLinear", self.weight(name), self.weight(scales), axis=0, block_size=block)

    def reshape(self, value: str, *shape: int) -> str:
        return self.op("Reshape", value, self.constant(shape))

    def transpose(self, value: str, *order: int) -> str:
        return self.op("Transpose", value, perm=order)

    def unsqueeze(self, value: str, *axes: int) -> str:
        return self.op("Unsqueeze", value, self.constant(axes))

    def slice(self, value: str, axis: int, start: int, stop: int) -> str:
        return self.op("Slice", value, self.constant([start]), self.constant([stop]), self.constant([axis]))

    def split(self, value: str, axis: int, sizes: Sequence[int]) -> list[str]:
        return self.ops("Split", value, self.constant(sizes), outputs=len(sizes), axis=axis)

    def cast(self, value: str, dtype: str) -> str:
        return self.op("Cast", value, to=ONNX_DTYPE[dtype])

    def model(
        self,
        name: str,
        inputs: Iterable[TensorSpec],
        outputs: Iterable[TensorSpec],
        opset: int,
        metadata: dict[str, str],
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, name, value_infos(inputs), value_infos(outputs), list(self.initializers.values())
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=IR_VERSION,
            producer_name="dspark-export",
            producer_version=metadata["dspark.version"],
        )
        helper.set_model_props(model, metadata)
        return model


def value_infos(specs: Iterable[TensorSpec]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(spec.name, ONNX_DTYPE[spec.dtype], spec.shape) for spec in specs]


def _external(region: WeightRegion) -> onnx.TensorProto:
    tensor = onnx.TensorProto(
        name=region.name,
        data_type=ONNX_DTYPE[region.dtype],
        dims=region.shape,
        data_location=TensorProto.EXTERNAL,
    )
    location = FILE.rpartition("/")[2]
    for key, value in (("location", location), ("offset", region.offset), ("length", region.bytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
