"""What TensorRT refuses in a graph, said before the minutes of a build, and where no TensorRT is installed.

A rule holds for TensorRT-RTX as its parser and builder 1.7.1 answered: tests/engines/test_preflight.py keeps the graph
that fails beside the nearest one that builds. TensorRT shares the parser, so the same is said of it; where the two
differ, TensorRT's side is by description (its manuals, the operator list of onnx-tensorrt) and marked so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from dspark.drafter.errors import UsageError
from dspark.export.bundle import Graph

Capability = tuple[int, int]
Severity = Literal["error", "warning"]

TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
# Compute capabilities that TensorRT-RTX 1.7.1 has by name; TensorRT 11 starts with the first of them, by description.
KNOWN: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
# "Cannot compile, because the model contains HW-specific datatypes" before these; for TensorRT by description.
NEEDS: dict[str, dict[str, Capability]] = {
    "tensorrt-rtx": {"BFLOAT16": (8, 0), "INT4": (8, 0), "FLOAT8E4M3FN": (8, 9), "FLOAT4E2M1": (12, 0)},
    "tensorrt": {"BFLOAT16": (8, 0), "FLOAT8E4M3FN": (8, 9), "FLOAT4E2M1": (10, 0)},
}
NARROW = {"FLOAT8E4M3FN", "INT4", "FLOAT4E2M1"}  # only QuantizeLinear makes them
TYPES = {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT8", "INT32", "INT64", "BOOL"} | NARROW
OPSETS = range(9, 26)  # what the parser of TensorRT 11 states; below 7 broadcasting fails, above 25 it goes on
MAX_RANK, MAX_TOPK, HEAD_SIZES = 8, 3840, range(9, 257)
LITERAL = 1 << 16  # elements up to which the values of a constant are looked at

# Operators that the RTX parser's supports_operator() denies, by what to do instead; for TensorRT by description.
_REFUSED = {
    "write it with other operators": "AffineGrid BitCast CenterCropPad Col2Im DFT Det ImageDecoder MaxRoiPool "
    "MaxUnpool MelWeightMatrix NegativeLogLikelihoodLoss RegexFullMatch SoftmaxCrossEntropyLoss StringConcat "
    "StringNormalizer StringSplit SwiGLU TfIdfVectorizer",
    "stack the tensors into one": "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase "
    "SequenceInsert SequenceLength SequenceMap SplitToSequence Optional OptionalGetElement OptionalHasElement",
    "use bool tensors with And, Or, Not": "BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor",
    "use QuantizeLinear and DequantizeLinear around a float operator": "ConvInteger DynamicQuantizeLinear "
    "MatMulInteger QLinearConv QLinearMatMul",
    "keep a fixed size and a mask": "Compress Unique",
    "compare with a uniform noise that is an input": "Bernoulli",
    "draw by inverse CDF from a noise that is an input": "Multinomial",
    "take Exp of the CumSum of logarithms": "CumProd",
}
_REFUSED_BY = {
    # supports_operator() grants NonZero and NonMaxSuppression, but their plugin and kernel are not there.
    "tensorrt-rtx": {"write it with other operators": "DeformConv", "keep a fixed size": "NonZero NonMaxSuppression"},
    "tensorrt": {"write it with other operators": "BlackmanWindow HammingWindow HannWindow STFT"},  # by description
}
REFUSED = {
    backend: {op: remedy for remedy, ops in (*_REFUSED.items(), *own.items()) for op in ops.split()}
    for backend, own in _REFUSED_BY.items()
}
# Names outside ONNX that the RTX parser takes, besides those that start with TRT_; it does not look at the domain.
EXTENSIONS = {"GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "QMoE", "SimplifiedLayerNormalization",
              "SkipSimplifiedLayerNormalization"}  # fmt: skip
# Types that ONNX gives an operator and the parser does not.
_INTEGERS, _BOOL = frozenset({"INT32", "INT64"}), frozenset({"BOOL"})
REFUSED_TYPES = {
    "MatMul": _INTEGERS, "Gemm": _INTEGERS, "Einsum": _INTEGERS | {"INT8"}, "Relu": {"INT32"}, "Clip": {"INT8"},
    "Mod": {"INT8"}, "ReduceMax": _BOOL, "ReduceMin": _BOOL,
}  # fmt: skip
UINT8_READERS = {"Cast", "Equal", "Identity", "QuantizeLinear"}
PRODUCTS = {"MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN"}  # "FP32 GEMM is not supported" on compute capability 7.5
# Inputs that say a shape, an axis or a count. One that hangs on a graph input needs an optimization profile; in a body
# the builder takes none ("data-dependent shapes are only allowed in the top-level scope").
SHAPE_OPERANDS = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Split", "Pad", "OneHot", "TopK", "CumSum"), (1,)),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), (1,)),
    "Slice": (1, 2, 3, 4), "Resize": (2, 3), "ConstantOfShape": (0,), "Range": (0, 1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """What a backend would say of a graph: an error fails the build, a warning does not."""

    graph: str
    backend: str
    severity: Severity
    message: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a graph without a build.

    ``activation_bytes`` is an estimate from above: the most bytes of intermediate tensors alive at once in the order
    of the nodes, none of them fused or shared. Scratch that a kernel wants for itself is not in it.
    """

    graph: str
    nodes: int
    weight_bytes: int
    activation_bytes: int
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def preflight(graph: Graph, backend: str, compute_capabilities: Sequence[Capability] = ()) -> Preflight:
    """Check a graph, its weights left in their file.

    Args:
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        compute_capabilities: of the GPUs that it shall run on; none: only what holds for every GPU.

    Raises:
        UsageError: no such backend.
    """
    if backend not in TITLES:
        raise UsageError(f"backend {backend!r} is none of {', '.join(TITLES)}")
    if graph.model is None:
        model = onnx.load(graph.path, load_external_data=False)
    else:
        model = onnx.load_from_string(graph.model)
    name = Path(graph.spec.file).stem
    scopes, contradictions = _read(model, backend)
    said = [
        *contradictions,
        *_of_model(scopes),
        *(words for one in compute_capabilities for words in _of_gpu(scopes, one)),
    ]
    findings = (Finding(name, backend, severity, message, node) for severity, message, node in dict.fromkeys(said))
    weights = sum(_bytes(_value_of(tensor)) for scope in scopes for tensor in scope.graph.initializer)
    return Preflight(name, sum(len(scope.nodes) for scope in scopes), weights, _peak(scopes[0]), tuple(findings))


_Said = tuple[Severity, str, str]  # severity, message, node


@dataclass(frozen=True, slots=True)
class _Value:
    dtype: str = ""  # ONNX's name of it; empty: not known
    shape: tuple[int | None, ...] | None = None  # None: not known


@dataclass(frozen=True, slots=True)
class _Scope:
    """A graph or a body, and what is known by name in it, names of the outer graphs included."""

    graph: GraphProto
    backend: str
    opset: int
    depth: int = 0
    values: dict[str, _Value] = field(default_factory=dict)
    literals: dict[str, NDArray[Any] | None] = field(default_factory=dict)  # None: its values lie elsewhere
    constants: set[str] = field(default_factory=set)  # what can be computed before the graph runs
    nodes: list[_Node] = field(default_factory=list)

    @property
    def own(self) -> dict[str, _Value]:
        graph = self.graph
        named = (*graph.input, *graph.initializer, *graph.value_info, *graph.output)
        return {one.name: self.values[one.name] for one in named}

    def body(self, graph: GraphProto) -> _Scope:
        known = (self.values.copy(), self.literals.copy(), self.constants.copy())
        return _Scope(graph, self.backend, self.opset, self.depth + 1, *known)


@dataclass(frozen=True, slots=True)
class _Node:
    proto: NodeProto
    scope: _Scope
    attributes: dict[str, Any]
    bodies: tuple[_Scope, ...]

    @property
    def op(self) -> str:
        return self.proto.op_type

    @property
    def name(self) -> str:
        return self.proto.name or next(iter(self.proto.output), "")

    def input(self, index: int) -> str:
        return self.proto.input[index] if index < len(self.proto.input) else ""

    def value(self, name: str) -> _Value:
        return self.scope.values.get(name, _Value())

    def literal(self, index: int) -> NDArray[Any] | None:
        return self.scope.literals.get(self.input(index))

    def constant(self, index: int) -> bool:
        return not self.input(index) or self.input(index) in self.scope.constants


def _read(model: ModelProto, backend: str) -> tuple[list[_Scope], list[_Said]]:
    """The graph and its bodies with types and shapes, and what contradicts itself in them."""
    said: list[_Said] = []
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    try:
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        said.append(("error", f"types or shapes contradict each other: {' '.join(str(error).split())}", ""))
        with contextlib.suppress(onnx.shape_inference.InferenceError):
            model = onnx.shape_inference.infer_shapes(model)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    scopes = list(_scopes(_Scope(model.graph, backend, opset)))
    loops = [node for scope in scopes for node in scope.nodes if node.op == "Loop"]
    if loops and not said:
        for loop in loops:
            _state_results(loop)
        model = onnx.shape_inference.infer_shapes(model)
        scopes = list(_scopes(_Scope(model.graph, backend, opset)))
    return scopes, said


def _state_results(loop: _Node) -> None:
    """Shapes of what a Loop gives, which inference leaves open: its body and its trip count say them."""
    (body,), count = loop.bodies, loop.literal(0)
    length, carried = None if count is None else int(count.item()), len(loop.proto.input) - 2
    infos = {info.name: info for info in loop.scope.graph.value_info}
    for index, name in enumerate(loop.proto.output):
        shape = body.values[body.graph.output[1 + index].name].shape
        if name in infos and shape is not None:
            full = shape if index < carried else (length, *shape)
            dtype = infos[name].type.tensor_type.elem_type
            infos[name].CopyFrom(helper.make_tensor_value_info(name, dtype, full))


def _scopes(scope: _Scope) -> Iterator[_Scope]:
    """Fill in a graph and its bodies, outer before inner."""
    inner: list[_Scope] = []
    for info in (*scope.graph.input, *scope.graph.value_info, *scope.graph.output):
        scope.values[info.name] = _value_of_type(info.type)
    for tensor in scope.graph.initializer:
        scope.values[tensor.name] = _value_of(tensor)
        scope.literals[tensor.name] = _literal_of(tensor)
        scope.constants.add(tensor.name)
    for proto in scope.graph.node:
        bodies = tuple(scope.body(a.g) for a in proto.attribute if a.type == AttributeProto.GRAPH)
        plain = (attribute for attribute in proto.attribute if attribute.type != AttributeProto.GRAPH)
        node = _Node(proto, scope, {a.name: helper.get_attribute_value(a) for a in plain}, bodies)
        scope.nodes.append(node)
        for body in bodies:
            inner.extend(_scopes(body))
        if node.op == "Constant":
            (value,) = node.attributes.values()
            scope.literals[proto.output[0]] = _literal_of(value) if isinstance(value, TensorProto) else np.array(value)
        elif node.op in ("Identity", "Cast") and node.input(0) in scope.literals:
            scope.literals[proto.output[0]] = node.literal(0)
        foldable = not bodies and not node.op.startswith("Random") and all(map(node.constant, range(len(proto.input))))
        if foldable or node.op in ("Shape", "Size"):  # of a fixed shape, or of one that is refused elsewhere
            scope.constants.update(proto.output)
    yield scope
    yield from inner


def _of_model(scopes: list[_Scope]) -> Iterator[_Said]:
    main = scopes[0]
    if main.opset not in OPSETS:
        severity: Severity = "error" if main.opset < 7 else "warning"
        yield severity, f"opset {main.opset} is outside {OPSETS[0]} to {OPSETS[-1]}, which the parser states", ""
    for info in main.graph.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                size = dim.dim_param or "unknown"
                yield "error", f"input {info.name}: axis {axis} is {size}, which needs a profile; give it a number", ""
    for scope in scopes:
        for name, value in scope.own.items():
            if value.dtype and value.dtype not in TYPES:
                yield "error", f"{name} is {value.dtype}, which no TensorRT tensor is; cast it before export", ""
            elif len(value.shape or ()) > MAX_RANK:
                yield "error", f"{name} has {len(value.shape or ())} axes, TensorRT takes {MAX_RANK}; reshape it", ""
            elif value.dtype == "DOUBLE":
                yield "warning", f"{name} is DOUBLE, which TensorRT makes FLOAT; cast it before export", ""
        for node in scope.nodes:
            for severity, rules in _RULES.items():
                for message in filter(None, (rule(node) for rule in rules)):
                    yield severity, f"{node.op} {node.name}: {message}", node.name


def _of_gpu(scopes: list[_Scope], capability: Capability) -> Iterator[_Said]:
    backend, words = scopes[0].backend, "compute capability {}.{}".format(*capability)
    known = ", ".join("{}.{}".format(*one) for one in KNOWN)
    if capability < KNOWN[0] or (backend == "tensorrt-rtx" and capability not in KNOWN):
        where = f"{known}; for other GPUs build with tensorrt" if backend == "tensorrt-rtx" else "7.5 and newer"
        yield "error", f"{words}: {TITLES[backend]} builds for {where}", ""
        return
    types = {value.dtype: name for scope in reversed(scopes) for name, value in reversed(scope.own.items())}
    for dtype, (major, minor) in NEEDS[backend].items():
        if dtype in types and capability < (major, minor):
            yield "error", f"{words} has no {dtype}, which {types[dtype]} is; it takes {major}.{minor} or newer", ""
    if backend == "tensorrt-rtx" and capability == (7, 5):
        nodes = [node for scope in scopes for node in scope.nodes if node.op in PRODUCTS]
        wide = [node.name for node in nodes if node.value(node.input(0)).dtype in ("FLOAT", "DOUBLE")]
        if wide:
            which = f"{wide[0]} and {len(wide) - 1} more" if len(wide) > 1 else wide[0]
            message = f"{words}: {TITLES[backend]} has no products in FLOAT there, as {which}; build for 8.0 or newer"
            yield "error", message, wide[0]


def _operator(node: _Node) -> str | None:
    title, refused = TITLES[node.scope.backend], REFUSED[node.scope.backend]
    if node.op in refused:
        return f"{title} does not take this operator; {refused[node.op]}"
    if onnx.defs.has(node.op) or node.op in EXTENSIONS or node.op.startswith("TRT_"):
        return None
    return f"{title} has no operator and no plugin of this name; write it with operators of ONNX"


def _one_type(node: _Node) -> str | None:
    """Strong typing: inputs that ONNX declares by one type variable have one type."""
    if node.proto.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op):
        return None
    try:
        schema = onnx.defs.get_schema(node.op, max_inclusive_version=node.scope.opset)
    except onnx.defs.SchemaError:
        return f"opset {node.scope.opset} does not have it; export with a newer opset"
    seen: dict[str, dict[str, str]] = {}
    for index, name in enumerate(node.proto.input if schema.inputs else ()):
        formal, dtype = schema.inputs[min(index, len(schema.inputs) - 1)], node.value(name).dtype
        if dtype and formal.is_homogeneous:
            seen.setdefault(formal.type_str, {}).setdefault(dtype, name)
    for types in seen.values():
        if len(types) > 1:
            words = ", ".join(f"{name} is {dtype}" for dtype, name in types.items())
            return f"{words}; TensorRT mixes no types, cast one of them"
    return None


def _types(node: _Node) -> str | None:
    for name in node.proto.input:
        dtype = node.value(name).dtype
        if dtype in REFUSED_TYPES.get(node.op, ()):
            return f"{name} is {dtype}, which TensorRT does not take here; cast it to another type first"
        if dtype == "UINT8" and node.op not in UINT8_READERS:
            return f"{name} is UINT8, which TensorRT does nothing with; cast it to INT32 first"
        if dtype in NARROW | {"INT8"} and name in node.scope.literals and not node.op.endswith("uantizeLinear"):
            return f"{name} is a constant of {dtype}, which only DequantizeLinear may read; dequantize it first"
    results = {info.name for info in node.scope.graph.output} if node.scope.depth == 0 else set()
    for name in node.proto.output:
        dtype = node.value(name).dtype
        if dtype == "UINT8" and name not in results:
            return f"{name} is UINT8 inside the graph, where TensorRT has none; use INT32"
        if dtype in NARROW and node.op == "Cast":
            return f"{name} is {dtype}, which only QuantizeLinear makes; quantize it"
    return None


def _shape_operands(node: _Node) -> str | None:
    for index in SHAPE_OPERANDS.get(node.op, ()):
        if not node.constant(index):
            return f"{node.input(index)} says a shape, and only the data say what it is; make it a constant"
    if node.op.startswith("Reduce") and node.input(1) and node.input(1) not in node.scope.literals:
        return f"axes {node.input(1)} are computed; make them an initializer"
    if node.op == "Slice" and not node.input(3):
        starts, shape = node.value(node.input(1)).shape, node.value(node.input(0)).shape
        if starts and shape and starts[0] != len(shape):
            return f"has {starts[0]} starts for {len(shape)} axes and names no axes; name them"
    return None


def _attention(node: _Node) -> str | None:
    if node.op != "Attention":
        return None
    given, remedy = node.attributes, "write it with MatMul and Softmax"
    query, key, value, mask = (node.value(node.input(index)) for index in range(4))
    if given.get("softcap") or "softmax_precision" in given:
        return f"has a softcap or a softmax_precision, which TensorRT does not take; {remedy}"
    if len(node.proto.output) > 1 or node.input(4) or node.input(5):
        return f"has past keys or a second output, which TensorRT does not take; {remedy}"
    if value.dtype != query.dtype or mask.dtype not in ("", "BOOL", query.dtype):
        return f"q is {query.dtype}, v {value.dtype}, the mask {mask.dtype or 'absent'}; cast v and mask to q's type"
    if not query.shape or not key.shape or not value.shape:
        return None
    if key.shape != value.shape:
        return f"k is {list(key.shape)}, v {list(value.shape)}, and TensorRT takes them alike only; {remedy}"
    flat = len(query.shape) == 3  # [B, S, heads·D], else [B, heads, S, D]
    heads, kv_heads = (given["q_num_heads"], given["kv_num_heads"]) if flat else (query.shape[1], key.shape[1])
    size = (query.shape[-1] or 0) // (given["q_num_heads"] if flat else 1)
    # The builder takes flat attention apart where it has no mask and no groups; any other needs a kernel of its own.
    apart = flat and heads == kv_heads and not mask.dtype and not given.get("is_causal")
    if apart or (query.dtype in ("FLOAT16", "BFLOAT16") and size in HEAD_SIZES):
        return None
    kernels = f"FLOAT16 and BFLOAT16 with heads of {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}"
    return f"TensorRT has no kernel for {query.dtype} with heads of {size}, only for {kernels}; {remedy}"


def _settings(node: _Node) -> str | None:
    """Operators that fail for the value of an attribute or of a constant."""
    reduction = node.attributes.get("reduction", b"none").decode() if node.op.startswith("Scatter") else "none"
    if reduction != "none":
        return f"reduction {reduction} is not taken; use Where, or a product with a one-hot matrix"
    if node.op == "TopK" and (k := node.literal(1)) is not None and k.item() > MAX_TOPK:
        return f"K is {k.item()}, TensorRT takes {MAX_TOPK}; take fewer"
    if node.op == "Dropout" and node.input(2) and ((training := node.literal(2)) is None or training.item()):
        return "may be in training mode, which TensorRT does not have; export for inference"
    if node.op.endswith("uantizeLinear"):
        if (zero := node.literal(2)) is not None and zero.astype(np.float32).any():
            return f"zero point {node.input(2)} is not 0; quantize symmetrically"
        if node.attributes.get("block_size") == 1:
            return "block size is 1, a scale for every element; take at least 2, better 32 to 128"
    return None


def _loop(node: _Node) -> str | None:
    if node.op != "Loop":
        return None
    (body,) = node.bodies
    number, condition, *state = (info.name for info in body.graph.input)
    read, stacks = _names_read(body.graph), len(node.proto.output) > len(state)
    if not node.input(1) and condition in read:
        return f"gives no condition, and the body reads {condition}; let the body make a constant true"
    if not node.input(0) and (not node.input(1) or number in read or stacks):
        return "gives no trip count, without a condition, or to a body that stacks or reads its number; give one"
    if not node.constant(0) and stacks:
        return f"stacks as many results as {node.input(0)}, which only the data say; make it a constant"
    for index, name in enumerate(state):
        first, later = node.value(node.input(2 + index)).shape, body.values[body.graph.output[1 + index].name].shape
        if first and later and None not in (*first, *later) and first != later:
            return f"carries {name} as {list(first)}, then as {list(later)}; keep its shape"
    return None


def _run_time(node: _Node) -> str | None:
    """What builds, and then does not do what a runtime with fixed tensors and replayed draws wants."""
    if node.op.startswith("Random"):
        return "TensorRT ignores the seed, so that no run can be repeated; make the noise an input"
    if node.op == "Loop" and not node.constant(0):  # by description
        return f"trip count {node.input(0)} is no constant, and a CUDA graph holds no such loop; make it one"
    if node.op in ("NonZero", "NonMaxSuppression"):  # TensorRT has them, by description
        return "only the data say the shape of its result; keep a fixed size and a mask"
    return None


_RULES: dict[Severity, tuple[Callable[[_Node], str | None], ...]] = {
    "error": (_operator, _one_type, _types, _shape_operands, _attention, _settings, _loop),
    "warning": (_run_time,),
}


def _peak(scope: _Scope) -> int:
    """Most bytes of intermediate tensors alive at once; what a body hands out lives to its end."""
    last = {name: index for index, node in enumerate(scope.nodes) for name in _reads(node.proto)}
    results = {info.name for info in scope.graph.output}
    alive: dict[str, int] = {}
    most = 0
    for index, node in enumerate(scope.nodes):
        made = [name for name in node.proto.output if name not in scope.constants]
        alive |= {name: _bytes(node.value(name)) for name in made if scope.depth or name not in results}
        most = max(most, sum(alive.values()) + max(map(_peak, node.bodies), default=0))
        alive = {name: size for name, size in alive.items() if name in results or last.get(name, 0) > index}
    return most


def _names_read(graph: GraphProto) -> set[str]:
    return {name for node in graph.node for name in _reads(node)}


def _reads(node: NodeProto) -> set[str]:
    bodies = [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]
    return {*node.input, *(name for body in bodies for name in (*_names_read(body), *(o.name for o in body.output)))}


def _value_of(tensor: TensorProto) -> _Value:
    return _Value(TensorProto.DataType.Name(tensor.data_type), tuple(tensor.dims))


def _value_of_type(kind: TypeProto) -> _Value:
    which, tensor = kind.WhichOneof("value"), kind.tensor_type
    if which != "tensor_type":
        return _Value((which or "").upper())
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    dtype = TensorProto.DataType.Name(tensor.elem_type) if tensor.elem_type else ""
    return _Value(dtype, dims if tensor.HasField("shape") else None)


def _literal_of(tensor: TensorProto) -> NDArray[Any] | None:
    elsewhere = tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > LITERAL
    return None if elsewhere else numpy_helper.to_array(tensor)


def _bytes(value: _Value) -> int:
    """Bytes of a tensor; an axis that is not known counts once."""
    if value.dtype not in TYPES:
        return 0
    count = math.prod(1 if axis is None else axis for axis in value.shape or ())
    if value.dtype in ("INT4", "FLOAT4E2M1"):
        return -(-count // 2)
    return count * helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(value.dtype)).itemsize
