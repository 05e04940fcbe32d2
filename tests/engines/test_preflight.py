"""Preflight says what TensorRT-RTX does: each graph that fails stands beside the nearest one that builds.

The builder of TensorRT-RTX needs no GPU; where it is not installed its half of the tests is skipped. No graph here
crashes it, so all are built in this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from drafters import DEFAULTS, config_from_json, make_config
from onnx import TensorProto, helper, parser

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import UsageError
from dspark.engines.preflight import EXTENSIONS, KNOWN, REFUSED, TYPES, Preflight, preflight
from dspark.export.bundle import Graph
from dspark.export.contract import DTYPES, Dtype, ExportOptions, GraphSpec, graph_specs
from dspark.export.graphs import identity_of, model_from_spec
from dspark.export.weights import WeightPlan, plan_weights

ADA = (8, 9)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph in ONNX's text syntax, or a model, and a piece of the error that preflight must give; none: it builds."""

    name: str
    graph: str | onnx.ModelProto
    says: str = ""
    opset: int = 20
    gpu: tuple[int, int] = ADA

    @property
    def model(self) -> onnx.ModelProto:
        if isinstance(self.graph, onnx.ModelProto):
            return self.graph
        return parser.parse_model(f'<ir_version: 10, opset_import: ["": {self.opset}]> g {self.graph}')


def two(op: str, left: str, right: str, out: str = "") -> str:
    """One operator on two [8, 8] tensors."""
    return f"({left}[8,8] a, {right}[8,8] b) => ({out or left}[8,8] y) {{ y = {op}(a, b) }}"


def attention(dtype: str, head: int, attributes: str = "", inputs: str = "", more: str = "") -> str:
    qkv = ", ".join(f"{dtype}[1,2,4,{head}] {name}" for name in "qkv")
    return f"({qkv}{inputs}) => ({dtype}[1,2,4,{head}] y) {{ y = Attention{attributes}(q, k, v{more}) }}"


def flat_attention(dtype: str, attributes: str = "", kv_heads: int = 2, mask: bool = False) -> str:
    kv = f"{dtype}[1,4,{64 * kv_heads}]"
    heads = f"<q_num_heads = 2, kv_num_heads = {kv_heads}{attributes}>"
    inputs, masked = f"{dtype}[1,4,128] q, {kv} k, {kv} v", (", bool[4,4] m", ", m") if mask else ("", "")
    return f"({inputs}{masked[0]}) => ({dtype}[1,4,128] y) {{ y = Attention{heads}(q, k, v{masked[1]}) }}"


def reduce(axes: str) -> str:
    constants = "<int64[1] one = {1}, int64[1] two = {2}>"
    return f"(float[4,8] x) => (float[4,1] y) {constants} {{ {axes} y = ReduceSum(x, a) }}"


def scatter(op: str, reduction: str, updates: str = "float") -> str:
    shape = "[4,1]" if op == "ScatterElements" else "[1,8]"
    index = "int64[4,1]" if op == "ScatterElements" else "int64[1,1]"
    axis = "axis = 1, " if op == "ScatterElements" else ""
    call = f'{op}<{axis}reduction = "{reduction}">(x, i, u)'
    return f"(float[4,8] x, {index} i, {updates}{shape} u) => (float[4,8] y) {{ y = {call} }}"


def topk(count: int, attributes: str = "") -> str:
    out = f"(float[1,{count}] y, int64[1,{count}] i)"
    return f"(float[1,5000] x) => {out} <int64[1] k = {{{count}}}> {{ y, i = TopK{attributes}(x, k) }}"


def branch(op: str) -> str:
    then = "then_branch = a () => (float[4] p) { p = Neg(x) }"
    other = f"else_branch = e () => (float[4] q) {{ q = {op}(x) }}"
    return f"(float[4] x, bool t) => (float[4] y) {{ y = If<{then}, {other}>(t) }}"


def scan(op: str) -> str:
    inner = "(float[2] s, float[2] i) => (float[2] t, float[2] o)"
    body = f"body = b {inner} {{ t = Add(s, i) o = {op}(s, i) }}"
    return (
        f"(float[2] z, float[3,2] x) => (float[2] y, float[3,2] w) {{ y, w = Scan<num_scan_inputs = 1, {body}>(z, x) }}"
    )


def loop(
    body: str,
    call: str = "(n, t, x)",
    inputs: str = "",
    stacks: bool = False,
    constants: str = "bool t = {1}, int64 n = {3}",
    before: str = "",
    out: str = "float[4]",
) -> str:
    """A Loop over x [4] whose body makes ``going`` and ``s2`` of ``i``, ``c`` and ``s``, and stacks ``o``."""
    outer = "(float[4] y, float[M,4] z)" if stacks else "(float[4] y)"
    inner = f"(bool going, {out} s2, float[4] o)" if stacks else f"(bool going, {out} s2)"
    made = f"<bool k = {{1}}, int64 m = {{2}}, int64[1] zero = {{0}}, float[1] f = {{9}}> {{ {body} }}"
    graph = f"body = b (int64 i, bool c, float[4] s) => {inner} {made}"
    result = "y, z" if stacks else "y"
    return f"(float[4] x{inputs}) => {outer} <{constants}> {{ {before} {result} = Loop<{graph}>{call} }}"


def typed(dtype: str, op: str = "Identity") -> onnx.ModelProto:
    """One operator on one input of any type."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.DataType.Value(dtype), [4, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], "n")], "g", tensors[:1], tensors[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def quantized(dtype: str, block: int = 0, zero: int | None = None, between: str = "") -> onnx.ModelProto:
    """x [4, 64] times a constant of a quantized type, dequantized by blocks of its rows."""
    code, size = TensorProto.DataType.Value(dtype), 64
    scales = [size // block, size] if block else []
    weights = [
        helper.make_tensor("w", code, [size, size], [1] * size**2),
        helper.make_tensor("s", TensorProto.FLOAT, scales, [1.0] * math.prod(scales)),
    ]
    if zero is not None:
        weights.append(helper.make_tensor("z", code, scales, [zero] * math.prod(scales)))
    inputs = ["v" if between else "w", "s", *(["z"] if zero is not None else [])]
    attributes: dict[str, Any] = {"axis": 0, "block_size": block} if block else {}
    nodes = [helper.make_node(between, ["w"], ["v"], "between")] if between else []
    nodes += [
        helper.make_node("DequantizeLinear", inputs, ["d"], "dequantize", **attributes),
        helper.make_node("MatMul", ["x", "d"], ["y"], "product"),
    ]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


ON = "going = Identity(k)"
SHAPE = "which needs a profile"
KERNEL = "has no kernel for"
ADDED = "axes a are computed"
DATA = "only the data say"

CASES = [
    # Operators
    Case("Multinomial", "(float[1,4] x) => (int32[1,1] y) { y = Multinomial(x) }", "draw by inverse CDF"),
    Case("Bernoulli", "(float[4] x) => (float[4] y) { y = Bernoulli(x) }", "Bernoulli y: TensorRT-RTX does not take"),
    Case("noise as an input", "(float[4] x, float[4] u) => (bool[4] y) { y = Less(u, x) }"),
    Case("NonZero", "(float[4] x) => (int64[1,M] y) { y = NonZero(x) }", "keep a fixed size"),
    Case("Compress", "(float[4] x, bool[4] k) => (float[M] y) { y = Compress(x, k) }", "keep a fixed size"),
    Case("Unique", "(float[4] x) => (float[M] y) { y = Unique(x) }", "keep a fixed size"),
    Case(
        "NonMaxSuppression",
        "(float[1,6,4] x, float[1,1,6] s) => (int64[M,3] y) { y = NonMaxSuppression(x, s) }",
        "keep a fixed size",
    ),
    Case("CumProd", "(float[4,8] x) => (float[4,8] y) <int64 a = {1}> { y = CumProd(x, a) }", "Exp of the CumSum", 26),
    Case("CumSum and Exp", "(float[4,8] x) => (float[4,8] y) <int64 a = {1}> { c = CumSum(x, a) y = Exp(c) }"),
    Case("an operator of no one", "(float[4] x) => (float[4] y) { y = Foo(x) }", "no operator and no plugin"),
    Case("random numbers", "(float[4] x) => (float[4] y) { r = RandomUniformLike(x) y = Add(x, r) }"),
    Case("Dropout", "(float[4] x) => (float[4] y) <float r = {0.5}, bool t = {0}> { y = Dropout(x, r, t) }"),
    Case(
        "Dropout in training",
        "(float[4] x) => (float[4] y) <float r = {0.5}, bool t = {1}> { y = Dropout(x, r, t) }",
        "training mode",
    ),
    # Strong typing
    Case("MatMul", two("MatMul", "float", "float")),
    Case("MatMul of two types", two("MatMul", "float", "float16"), "a is FLOAT, b is FLOAT16; TensorRT mixes no types"),
    Case("Gemm of two types", two("Gemm", "float16", "bfloat16"), "a is FLOAT16, b is BFLOAT16"),
    Case(
        "Gemm with another bias",
        "(float16[8,8] a, float16[8,8] b, float[8] c) => (float16[8,8] y) { y = Gemm(a, b, c) }",
        "c is FLOAT",
    ),
    Case("Add of two types", two("Add", "float", "float16"), "mixes no types"),
    Case("Less of two types", two("Less", "float", "float16", "bool"), "mixes no types"),
    Case("Concat of two types", "(float[8] a, float16[8] b) => (float[16] y) { y = Concat<axis=0>(a, b) }", "mixes no"),
    Case("Where of two types", "(bool[8] c, float[8] a, float16[8] b) => (float[8] y) { y = Where(c, a, b) }", "mixes"),
    Case("Where", "(bool[8] c, float[8] a, float[8] b) => (float[8] y) { y = Where(c, a, b) }"),
    Case("updates of another type", scatter("ScatterElements", "none", "float16"), "u is FLOAT16"),
    Case("Pow of two types", two("Pow", "float", "float16")),
    Case("Add of two integers", two("Add", "int32", "int64"), "a is INT32, b is INT64"),
    Case("a result of another type", two("Add", "int32", "int64", "int64"), "contradict each other"),
    # Types
    Case("DOUBLE", typed("DOUBLE")),
    Case("INT16", typed("INT16"), "x is INT16, which no TensorRT tensor is"),
    Case("UINT16", typed("UINT16"), "is UINT16"),
    Case("UINT64", typed("UINT64"), "is UINT64"),
    Case("STRING", typed("STRING"), "is STRING"),
    Case("COMPLEX64", typed("COMPLEX64"), "is COMPLEX64"),
    Case("FLOAT8E5M2", typed("FLOAT8E5M2"), "is FLOAT8E5M2"),
    Case("UINT4", typed("UINT4"), "is UINT4"),
    Case("INT4", typed("INT4")),
    Case("BOOL", typed("BOOL")),
    Case("UINT8 as input and result", typed("UINT8")),
    Case("UINT8 computed with", typed("UINT8", "Abs"), "x is UINT8, which TensorRT does nothing with"),
    Case(
        "UINT8 inside", "(float[4] x) => (float[4] y) { u = Cast<to = 2>(x) y = Cast<to = 1>(u) }", "u is UINT8 inside"
    ),
    Case("UINT8 as result", "(float[4] x) => (uint8[4] y) { y = Cast<to = 2>(x) }"),
    Case("MatMul of integers", two("MatMul", "int32", "int32"), "a is INT32, which TensorRT does not take here"),
    Case("Add of integers", two("Add", "int32", "int32")),
    Case("Mod of int8", two("Mod", "int8", "int8"), "a is INT8"),
    Case("Mod of floats", "(float[4] a, float[4] b) => (float[4] y) { y = Mod<fmod = 1>(a, b) }"),
    Case("Relu of int32", "(int32[4] x) => (int32[4] y) { y = Relu(x) }", "x is INT32"),
    Case("Relu of int64", "(int64[4] x) => (int64[4] y) { y = Relu(x) }"),
    Case("Clip of int8", "(int8[4] x, int8 low) => (int8[4] y) { y = Clip(x, low) }", "x is INT8"),
    Case("Clip of int32", "(int32[4] x, int32 low) => (int32[4] y) { y = Clip(x, low) }"),
    Case("Mod of integers", two("Mod", "int64", "int64")),
    Case("ReduceMax of bool", "(bool[4,8] x) => (bool[1,1] y) { y = ReduceMax(x) }", "x is BOOL"),
    Case("eight axes", "(float[1,1,1,1,1,1,1,4] x) => (float[1,1,1,1,1,1,1,4] y) { y = Neg(x) }"),
    Case("nine axes", "(float[1,1,1,1,1,1,1,1,4] x) => (float[1,1,1,1,1,1,1,1,4] y) { y = Neg(x) }", "has 9 axes"),
    # Quantized constants
    Case("int4 in blocks of 2", quantized("INT4", 2)),
    Case("int4 in blocks of 64", quantized("INT4", 64)),
    Case("int4 in blocks of 1", quantized("INT4", 1), "block size is 1"),
    Case("int8 in blocks of 16", quantized("INT8", 16)),
    Case("fp8", quantized("FLOAT8E4M3FN")),
    Case("fp8 before Ada", quantized("FLOAT8E4M3FN"), "has no FLOAT8E4M3FN, which w is; it takes 8.9", gpu=(8, 6)),
    Case("fp4", quantized("FLOAT4E2M1", 16), gpu=(12, 0)),
    Case("fp4 before Blackwell", quantized("FLOAT4E2M1", 16), "has no FLOAT4E2M1, which w is; it takes 12.0"),
    Case("int4 on Ampere", quantized("INT4", 32), gpu=(8, 0)),
    Case("zero point 0", quantized("INT8", zero=0)),
    Case("zero point 1", quantized("INT8", zero=1), "zero point z is not 0"),
    Case("int8 read by another", quantized("INT8", between="Transpose"), "w is a constant of INT8, which only"),
    Case("int4 read by another", quantized("INT4", between="Identity"), "w is a constant of INT4, which only"),
    Case("int8 input", two("Add", "int8", "int8")),
    Case("Cast to fp8", "(float[4] x) => (float8e4m3fn[4] y) { y = Cast<to = 17>(x) }", "only QuantizeLinear makes"),
    # Shapes
    Case("a number for an axis", "(float[4,8] x) => (float[4,8] y) { y = Neg(x) }"),
    Case("a name for an axis", "(float[B,8] x) => (float[B,8] y) { y = Neg(x) }", f"input x: axis 0 is B, {SHAPE}"),
    Case("no name for an axis", "(float[4,?] x) => (float[4,?] y) { y = Neg(x) }", f"axis 1 is unknown, {SHAPE}"),
    Case(
        "Reshape by an input",
        "(float[4,8] x, int64[2] s) => (float[M,N] y) { y = Reshape(x, s) }",
        f"s says a shape, and {DATA}",
    ),
    Case(
        "Reshape by a sum",
        "(float[4,8] x) => (float[32] y) <int64[1] a = {16}> { s = Add(a, a) y = Reshape(x, s) }",
    ),
    Case("Reshape by a shape", "(float[4,8] x, float[8,4] w) => (float[8,4] y) { s = Shape(w) y = Reshape(x, s) }"),
    Case("Expand by an input", "(float[1,8] x, int64[2] s) => (float[M,N] y) { y = Expand(x, s) }", DATA),
    Case("Range of an input", "(int64 n) => (int64[M] y) <int64 a = {0}, int64 s = {1}> { y = Range(a, n, s) }", DATA),
    Case("Resize by an input", "(float[1,1,4,8] x, float[4] s) => (float[A,B,C,D] y) { y = Resize(x, , s) }", DATA),
    Case(
        "TopK of a sum over the data",
        "(float[1,50] x, int64[3] d) => (float[1,M] y, int64[1,M] i) "
        "<int64[1] z = {0}> { k = ReduceSum(d, z) y, i = TopK(x, k) }",
        DATA,
    ),
    Case("CumSum over an input axis", "(float[4,8] x, int64 a) => (float[4,8] y) { y = CumSum(x, a) }", DATA),
    Case(
        "CumSum over a computed axis",
        "(float[4,8] x) => (float[4,8] y) <int64 b = {2}, int64 c = {1}> { a = Sub(b, c) y = CumSum(x, a) }",
    ),
    Case("Unsqueeze at an input", "(float[4,8] x, int64[1] a) => (float[4,1,8] y) { y = Unsqueeze(x, a) }", DATA),
    Case("ReduceSum over a constant", reduce("c = Identity(one) a = Cast<to = 7>(c)")),
    Case("ReduceSum over a Constant", reduce("a = Constant<value_ints = [1]>()")),
    Case("ReduceSum over a computed axis", reduce("a = Sub(two, one)"), ADDED),
    Case("ReduceSum over an input", "(float[4,8] x, int64[1] a) => (float[M,N] y) { y = ReduceSum(x, a) }", ADDED),
    Case(
        "Slice of one axis",
        "(float[4,8] x) => (float[2,8] y) <int64[1] z = {0}, int64[1] e = {2}> { y = Slice(x, z, e, z) }",
    ),
    Case(
        "Slice without axes",
        "(float[4,8] x) => (float[2,8] y) <int64[1] s = {0}, int64[1] e = {2}> { y = Slice(x, s, e) }",
        "has 1 starts for 2 axes",
    ),
    # Settings
    Case(
        "TopK of 3840",
        topk(3840, "<sorted = 0>"),
    ),
    Case(
        "TopK of 3841",
        topk(3841),
        "K is 3841, TensorRT takes 3840",
    ),
    Case(
        "TopK of a Constant",
        "(float[1,5000] x) => (float[1,4000] y, int64[1,4000] i) "
        "{ k = Constant<value = int64[1] {4000}>() y, i = TopK(x, k) }",
        "K is 4000",
    ),
    Case("ScatterND", scatter("ScatterND", "none")),
    Case("ScatterND that adds", scatter("ScatterND", "add"), "reduction add is not taken"),
    Case("ScatterElements", scatter("ScatterElements", "none")),
    Case("ScatterElements that takes the largest", scatter("ScatterElements", "max"), "reduction max is not taken"),
    Case("opset 6", two("Add", "float", "float"), "opset 6 is outside 9 to 25", 6),
    Case("opset 7", two("Add", "float", "float"), "", 7),
    Case("opset 25", two("Add", "float", "float"), "", 25),
    Case("opset 26", two("Add", "float", "float"), "", 26),
    # Attention
    Case("Attention in fp16", attention("float16", 64), "", 23),
    Case("Attention in fp32", attention("float", 64), f"{KERNEL} FLOAT with heads of 64", 23),
    Case("heads of 256", attention("bfloat16", 256), "", 23),
    Case("heads of 257", attention("float16", 257), f"{KERNEL} FLOAT16 with heads of 257", 23),
    Case("heads of 9", attention("float16", 9), "", 23),
    Case("heads of 8", attention("float16", 8), f"{KERNEL} FLOAT16 with heads of 8", 23),
    Case("flat fp32 attention", flat_attention("float"), "", 23),
    Case("flat, causal", flat_attention("float", ", is_causal = 1"), f"{KERNEL} FLOAT with heads of 64", 23),
    Case("flat, causal, fp16", flat_attention("float16", ", is_causal = 1"), "", 23),
    Case("flat, in groups", flat_attention("float", kv_heads=1), f"{KERNEL} FLOAT", 23),
    Case("flat, masked", flat_attention("float", mask=True), f"{KERNEL} FLOAT", 23),
    Case("flat, masked, fp16", flat_attention("float16", mask=True), "", 23),
    Case(
        "a second output",
        attention("float16", 64).replace("y)", "y, float16[1,2,4,4] s)").replace("y =", "y, , , s ="),
        "a second output",
        23,
    ),
    Case(
        "values of another type",
        attention("float16", 64).replace("float16[1,2,4,64] v", "bfloat16[1,2,4,64] v"),
        "v BF",
        23,
    ),
    Case("softcap", attention("float16", 64, "<softcap = 30.0>"), "has a softcap", 23),
    Case("softcap 0", attention("float16", 64, "<softcap = 0.0>"), "", 23),
    Case("softmax_precision", attention("float16", 64, "<softmax_precision = 1>"), "softmax_precision", 23),
    Case("a mask", attention("float16", 64, inputs=", bool[4,4] m", more=", m"), "", 23),
    Case("an fp32 mask", attention("float16", 64, inputs=", float[4,4] m", more=", m"), "the mask FLOAT", 23),
    Case(
        "past keys",
        attention("float16", 64, inputs=", float16[1,2,5,64] pk, float16[1,2,5,64] pv", more=", , pk, pv"),
        "past keys",
        23,
    ),
    Case(
        "narrower values",
        attention("float16", 64).replace("64] v", "32] v").replace("64] y", "32] y"),
        "v [1, 2, 4, 32], and TensorRT takes them alike",
        23,
    ),
    # Loop, If, Scan, functions
    Case("Loop", loop(f"{ON} s2 = Add(s, s) o = Neg(s)", stacks=True)),
    Case("Loop that hands its condition on", loop("going = Identity(c) s2 = Add(s, s)")),
    Case(
        "without one",
        loop("going = Identity(c) s2 = Add(s, s)", "(n, , x)"),
        "gives no condition, and the body reads c",
    ),
    Case("constant condition without one", loop(f"{ON} s2 = Add(s, s)", "(n, , x)")),
    Case("neither count nor condition", loop(f"{ON} s2 = Add(s, s)", "(, , x)"), "gives no trip count"),
    Case("no count, a condition", loop(f"{ON} s2 = Add(s, s)", "(, t, x)")),
    Case("no count, number read", loop("going = Less(i, m) s2 = Add(s, s)", "(, t, x)"), "gives no trip count"),
    Case("no count, stacked", loop(f"{ON} s2 = Add(s, s) o = Neg(s)", "(, t, x)", stacks=True), "gives no trip count"),
    Case("count as an input", loop(f"{ON} s2 = Add(s, s)", inputs=", int64 n", constants="bool t = {1}")),
    Case(
        "stacked over an input",
        loop(f"{ON} s2 = Add(s, s) o = Neg(s)", inputs=", int64 n", stacks=True, constants="bool t = {1}"),
        f"stacks as many results as n, which {DATA}",
    ),
    Case(
        "stacked over a sum",
        loop(
            f"{ON} s2 = Add(s, s) o = Neg(s)",
            stacks=True,
            constants="bool t = {1}, int64 h = {2}",
            before="n = Add(h, h)",
        ),
    ),
    Case(
        "a state that grows", loop(f"{ON} s2 = Concat<axis = 0>(s, s)", out="float[8]"), "carries s as [4], then as [8]"
    ),
    Case("in the body: mixed types", loop(f"{ON} h = Cast<to = 10>(s) s2 = Add(s, h)"), "h is FLOAT16"),
    Case("in the body: an operator", loop(f"{ON} s2 = Bernoulli(s)"), "Bernoulli s2: TensorRT-RTX does not take"),
    Case("in the body: an axis of the body", loop(f"{ON} r = ReduceSum(s, zero) s2 = Add(s, r)")),
    Case(
        "in the body: an axis from outside",
        loop(f"{ON} r = ReduceSum(s, a) s2 = Add(s, r)", constants="bool t = {1}, int64 n = {3}, int64[1] a = {0}"),
    ),
    Case(
        "in the body: a slice by its number",
        loop(
            f"{ON} u = Unsqueeze(i, zero) e = Add(u, m) r = Slice(s, u, e, zero) q = ReduceSum(r, zero) s2 = Add(s, q)"
        ),
        f"u says a shape, and {DATA}",
    ),
    Case("in the body: a row by its number", loop(f"{ON} r = Gather(s, i) s2 = Add(s, r)")),
    Case(
        "If",
        branch("Abs"),
    ),
    Case(
        "in a branch",
        branch("Bernoulli"),
        "Bernoulli q",
    ),
    Case("Scan", scan("Mul")),
    Case("in a Scan", scan("BitwiseAnd"), "BitwiseAnd o"),
    # Compute capabilities
    Case(
        "fp32 products on Turing", two("MatMul", "float", "float"), "has no products in FLOAT there, as y;", gpu=(7, 5)
    ),
    Case(
        "fp32 Einsum on Turing",
        '(float[8,8] a, float[8,8] b) => (float[8,8] y) { y = Einsum<equation = "ij,jk->ik">(a, b) }',
        "products",
        gpu=(7, 5),
    ),
    Case(
        "fp32 GRU on Turing",
        "(float[3,1,4] x, float[1,12,4] w, float[1,12,4] r) => (float[3,1,1,4] y) "
        "{ y = GRU<hidden_size = 4>(x, w, r) }",
        "products",
        gpu=(7, 5),
    ),
    Case("fp16 products on Turing", two("Gemm", "float16", "float16"), gpu=(7, 5)),
    Case(
        "fp32 Conv on Turing",
        "(float[1,4,8,8] x, float[4,4,3,3] w) => (float[1,4,6,6] y) { y = Conv(x, w) }",
        gpu=(7, 5),
    ),
    Case("bf16 on Turing", two("Add", "bfloat16", "bfloat16"), "has no BFLOAT16, which a is", gpu=(7, 5)),
    Case("bf16 on Ampere", two("MatMul", "bfloat16", "bfloat16"), gpu=(8, 0)),
    Case("int4 on Turing", typed("INT4"), "has no INT4, which x is", gpu=(7, 5)),
]

Build = Callable[[onnx.ModelProto, tuple[int, int]], str]


def check(model: onnx.ModelProto, *gpus: tuple[int, int], backend: str = "tensorrt-rtx") -> Preflight:
    spec = GraphSpec("block", 1, 512, (), ())
    return preflight(Graph(spec, Path("graph.onnx"), model.SerializeToString()), backend, gpus)


def messages(found: Preflight, severity: str = "error") -> list[str]:
    return [finding.message for finding in found.findings if finding.severity == severity]


@pytest.fixture(scope="session")
def trt() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its builder cannot be asked")


@pytest.fixture(scope="session")
def build(trt: Any) -> Build:
    """Parse and build; the words of the parser or builder that refuses, or nothing."""
    said: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (self.Severity.ERROR, self.Severity.INTERNAL_ERROR):
                said.append(message)

    logger = Logger()
    builder = trt.Builder(logger)

    def build(model: onnx.ModelProto, gpu: tuple[int, int]) -> str:
        said.clear()
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        onnx_parser = trt.OnnxParser(network, logger)
        if not onnx_parser.parse(model.SerializeToString()):
            return "; ".join(onnx_parser.get_error(i).desc() for i in range(onnx_parser.num_errors))
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, "SM{}{}".format(*gpu)), 0)
        return "" if builder.build_serialized_network(network, config) is not None else " ".join(said) or "no reason"

    return build


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    errors = messages(check(case.model, case.gpu))
    assert bool(errors) == bool(case.says), errors
    assert not case.says or any(case.says in message for message in errors), errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_builder_agrees(build: Build, case: Case) -> None:
    refusal = build(case.model, case.gpu)
    assert bool(refusal) == bool(case.says), refusal


def test_refused_operators_are_the_parsers(trt: Any) -> None:
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network()
    takes = trt.OnnxParser(network, logger).supports_operator
    operators = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    granted = {"NonZero", "NonMaxSuppression"}  # and fail nevertheless, see CASES
    assert {name for name in operators if not takes(name)} == set(REFUSED["tensorrt-rtx"]) - granted
    assert all(takes(name) for name in EXTENSIONS)


def test_known_capabilities_are_the_builders(trt: Any) -> None:
    names = {name for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert {"SM{}{}".format(*capability) for capability in KNOWN} == names


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_every_refused_operator_is_named(backend: str) -> None:
    for name, remedy in REFUSED[backend].items():
        node = helper.make_node(name, ["x"], ["y"], "it")
        model = typed("FLOAT")
        model.graph.node[0].CopyFrom(node)
        words = f"does not take this operator; {remedy}"
        assert any(m.startswith(f"{name} it: ") and m.endswith(words) for m in messages(check(model, backend=backend)))


def test_warnings() -> None:
    """What builds, but not to the same result: random numbers, doubles, run-time trip counts, a newer opset."""
    random = Case("", "(float[4] x) => (float[4] y) { r = RandomUniform<shape = [4], seed = 1.0>() y = Add(x, r) }")
    assert "TensorRT ignores the seed" in messages(check(random.model), "warning")[0]
    assert "x is DOUBLE, which TensorRT makes FLOAT" in messages(check(typed("DOUBLE")), "warning")[0]
    counted = Case("", loop(f"{ON} s2 = Add(s, s)", inputs=", int64 n", constants="bool t = {1}"))
    assert "trip count n is no constant" in messages(check(counted.model), "warning")[0]
    assert "opset 26 is outside" in messages(check(Case("", two("Add", "float", "float"), "", 26).model), "warning")[0]
    assert messages(check(Case("", two("Add", "float", "float"), "", 25).model), "warning") == []


def test_functions_are_looked_into() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[4] x) => (float[4] y) { y = own.f(x) } '
        '<domain: "own", opset_import: ["": 20]> f (a) => (b) { b = Bernoulli(a) }'
    )
    assert "Bernoulli" in messages(check(model))[0]


def test_finding_names_graph_backend_and_node() -> None:
    model = Case("", "(float[4] x) => (float[4] y) { y = Bernoulli(x) }").model
    model.graph.node[0].name = "draw"
    found = check(model)
    (finding,) = found.findings
    assert (finding.graph, finding.backend, finding.node) == ("block-b1-c512", "tensorrt-rtx", "draw")
    assert found.to_json()["findings"][0]["message"] == finding.message


def test_unknown_backend() -> None:
    with pytest.raises(UsageError, match="'onnxruntime' is none of tensorrt, tensorrt-rtx"):
        check(typed("FLOAT"), backend="onnxruntime")


def test_tensorrt_by_description() -> None:
    """TensorRT builds on the GPU itself and could not be asked: any from 7.5 on, with the types that GPUs have."""
    fp32, bf16, fp8, fp4 = (two("MatMul", t, t) for t in ("float", "bfloat16", "float8e4m3fn", "float4e2m1"))
    for graph, gpu, says in (
        (fp32, (7, 0), "7.0: TensorRT builds for 7.5 and newer"),
        (fp32, (7, 5), ""),
        (fp32, (9, 0), ""),
        (fp32, (10, 3), ""),
        (bf16, (7, 5), "has no BFLOAT16, which a is; it takes 8.0"),
        (bf16, (8, 0), ""),
        (fp8, (8, 6), "has no FLOAT8E4M3FN"),
        (fp4, (9, 0), "has no FLOAT4E2M1, which a is; it takes 10.0"),
    ):
        errors = [
            m for m in messages(check(Case("", graph, "", 23).model, gpu, backend="tensorrt")) if "capability" in m
        ]
        assert bool(errors) == bool(says), errors
        assert not says or says in errors[0]
    nonzero = check(Case("", "(float[4] x) => (int64[1,M] y) { y = NonZero(x) }").model, backend="tensorrt")
    assert messages(nonzero) == []
    assert "only the data say the shape" in messages(nonzero, "warning")[0]


def test_sizes() -> None:
    """[4, 8] fp32 is 128 bytes; a Loop adds what its body holds at its fullest to what lives across it."""
    chain = Case("", "(float[4,8] x) => (float[4,8] y) { a = Neg(x) b = Abs(a) c = Neg(b) y = Add(c, c) }")
    assert check(chain.model).activation_bytes == 2 * 128
    fork = Case("", "(float[4,8] x) => (float[4,8] y) { a = Neg(x) b = Abs(x) c = Neg(b) d = Abs(c) y = Add(a, d) }")
    assert check(fork.model).activation_bytes == 3 * 128
    half = Case("", "(float[4,8] x) => (float[4,8] y) { a = Cast<to = 10>(x) y = Cast<to = 1>(a) }")
    assert check(half.model).activation_bytes == 64
    body = f"{ON} p = Neg(s) q = Abs(p) s2 = Add(p, q) o = Neg(s2)"
    looped = Case("", loop(body, stacks=True).replace("(float[4] y, float[M,4] z)", "(float[M,4] z)"))
    # In the body: p, q, s2, and going is a constant; outside: y, and the rows of z are a result.
    assert check(looped.model).activation_bytes == 3 * 16 + 16
    doubled = loop(f"{ON} s2 = Add(s, s) o = Neg(s)", stacks=True, before="").replace(
        "(float[4] y, float[M,4] z)", "(float[M,4] w)"
    )
    doubled = doubled.replace("(n, t, x) }", "(n, t, x) w = Neg(z) }")
    assert check(Case("", doubled).model).activation_bytes == (16 + 3 * 16) + 2 * 16  # y and z; s2 and o
    assert check(quantized("INT4", 32)).weight_bytes == 64 * 64 // 2 + 2 * 64 * 4
    assert check(looped.model).nodes == 6
    assert check(looped.model).weight_bytes == 1 + 8 + (1 + 8 + 8 + 4)  # t and n; what the body holds
    noise = "(float[4] x) => (float[4] y) { r = RandomUniform<shape = [4]>() y = Add(x, r) }"
    assert check(Case("", noise).model).activation_bytes == 16
    handed = "body = b (int64 i, bool c, float[4] s) => (bool t, float[4] s2, float[4] a) { s2 = Add(s, s) }"
    across = f"{{ a = Neg(x) r, z = Loop<{handed}>(n, t, x) y = Neg(r) }}"
    stacked = Case("", f"(float[4] x) => (float[4] y) <bool t = {{1}}, int64 n = {{3}}> {across}")
    assert check(stacked.model).activation_bytes == 16 + 16 + 3 * 16 + 16  # a, which the body hands out; r; z; s2


def test_weights_stay_in_their_file(tmp_path: Path) -> None:
    config, plan = exported("float16")
    path = tmp_path / "graphs" / "block.onnx"
    path.parent.mkdir()
    spec = next(spec for spec in graph_specs(config, OPTIONS["float16"]) if spec.name == "block")
    path.write_bytes(own_model(spec, config, "float16", plan).SerializeToString())
    found = preflight(Graph(spec, path), "tensorrt-rtx", KNOWN)  # no weights.data beside it
    assert found.findings == ()
    block = {
        name: region for name, region in plan.tensors.items() if not name.startswith(("fc", "hidden", "markov", "conf"))
    }
    assert 0 <= found.weight_bytes - sum(region.bytes for region in block.values()) < 4096  # and small constants


OPTIONS = {dtype: ExportOptions(dtype=dtype, context=(64,), prefill=16) for dtype in DTYPES}
DRAFTERS: dict[str, DrafterConfig] = {
    "default": config_from_json(DEFAULTS),
    "gated": make_config(markov_head_type="gated"),
    "rnn": make_config(markov_head_type="rnn"),
    "no heads": make_config(
        markov_head_type="none", markov_rank=0, confidence_head=False, confidence_head_with_markov=False
    ),
    "fill-in, reduced vocabulary": make_config(sample_from_anchor=False, draft_vocab_size=64),
    "windows": make_config(layer_windows=(16, None), layer_causal=(True, False), window_moves=True),
    "ring": make_config(layer_windows=(64, 64)),
    "gemma4": make_config(architecture="gemma4", k_eq_v=True, final_logit_softcapping=30.0, embed_scale=2.0),
    "sinks": make_config(architecture="llama", attention_sinks=True, attention_bias=True, logit_scale=0.5),
}


def exported(dtype: Dtype, drafter: str = "default") -> tuple[DrafterConfig, WeightPlan]:
    config = DRAFTERS[drafter]
    return config, plan_weights(config, dtype, tied=False)


def own_model(spec: GraphSpec, config: DrafterConfig, dtype: Dtype, plan: WeightPlan) -> onnx.ModelProto:
    return model_from_spec(spec, config, OPTIONS[dtype], plan, identity_of(config, OPTIONS[dtype], "0" * 64))


@pytest.mark.parametrize(("dtype", "drafter"), [*((d, "default") for d in DTYPES), *(("float16", d) for d in DRAFTERS)])
def test_own_graphs_have_no_findings(dtype: Dtype, drafter: str) -> None:
    config, plan = exported(dtype, drafter)
    for spec in graph_specs(config, OPTIONS[dtype]):
        graph = Graph(spec, Path(spec.file), own_model(spec, config, dtype, plan).SerializeToString())
        assert preflight(graph, "tensorrt-rtx", [(8, 0), (8, 6), (8, 9), (12, 0)]).findings == ()
        assert preflight(graph, "tensorrt", [(8, 0), (9, 0)]).findings == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_own_graphs_on_other_gpus(dtype: Dtype) -> None:
    """7.5: fc and the Markov head compute in fp32 in every dtype, and bf16 is not there; 9.0: none of RTX's."""
    config, plan = exported(dtype)
    for spec in graph_specs(config, OPTIONS[dtype]):
        model = own_model(spec, config, dtype, plan)
        turing = messages(check(model, (7, 5)))
        products = dtype == "float32" or spec.name != "block"
        narrow = dtype == "bfloat16" and spec.name in ("block", "context")
        assert [("FLOAT there" in m, "BFLOAT16" in m) for m in turing] == [(False, True)] * narrow + [
            (True, False)
        ] * products
        hopper = "compute capability 9.0: TensorRT-RTX builds for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1; for other GPUs build"
        assert [m.startswith(hopper) for m in messages(check(model, (9, 0)))] == [True]


@pytest.mark.parametrize(
    ("dtype", "gpu"), [("float16", (7, 5)), ("bfloat16", (7, 5)), ("bfloat16", (12, 0)), ("float32", ADA)]
)
def test_builder_agrees_on_own_graphs(build: Build, dtype: Dtype, gpu: tuple[int, int]) -> None:
    """With weights of one, which say as much of a build as any others."""
    config, plan = exported(dtype)
    for spec in graph_specs(config, OPTIONS[dtype]):
        model = own_model(spec, config, dtype, plan)
        refused = messages(check(model, gpu))
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                ones = [1] * math.prod(tensor.dims)
                tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, ones))
        assert bool(build(model, gpu)) == bool(refused), (spec.name, refused)


def test_types_are_the_parsers(build: Build) -> None:
    """Every type of ONNX, on a GPU that has all that TensorRT-RTX knows."""
    for dtype in set(TensorProto.DataType.keys()) - {"UNDEFINED"}:
        assert (build(typed(dtype), (12, 0)) == "") == (dtype in TYPES), dtype
