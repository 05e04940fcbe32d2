"""How long each engine takes, against the least that reading its weights takes; the Markov loop both ways.

A run is timed with its synchronisation, as the runtime pays it. The floor is the bytes of weights that a run must read
at least once, over the bandwidth that this device shows on large reads.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx

from dspark.drafter.config import DrafterConfig
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import TensorSpec
from dspark.export.graphs import markov_variant

from .backend import Array, Backend, assign

_WARM_UP = 3  # a first run compiles or allocates, a second is captured as a CUDA graph
_BANDWIDTH_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Timing:
    """One engine on one backend; seconds are medians."""

    graph: str
    name: str
    batch: int
    markov: str | None  # "loop" or "unrolled", of a Markov loop
    seconds: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    runs: int
    weight_bytes: int  # read at least once
    floor_seconds: float

    @property
    def ratio_to_floor(self) -> float:
        return self.seconds / self.floor_seconds if self.floor_seconds else math.inf

    def to_json(self) -> dict[str, Any]:
        ratio = {"ratio_to_floor": self.ratio_to_floor} if self.floor_seconds else {}
        return {**dataclasses.asdict(self), **ratio}


def time_engines(
    bundle: Bundle, backend: Backend, seconds: float = 1.0, progress: Callable[[str, int, int], None] = lambda *_: None
) -> tuple[float, list[Timing]]:
    """Every engine of a bundle, for ``seconds`` each; the Markov loop as it was exported, and the other way.

    Returns:
        measured bandwidth in bytes per second, and the timings.
    """
    rate = bandwidth(backend)
    graphs = list(_with_variants(bundle))
    timings = []
    for number, (graph, markov) in enumerate(graphs):
        progress("timing", number, len(graphs))
        timings.append(_timed(bundle.config, backend, graph, markov, seconds, rate))
    return rate, timings


def draft_shares(config: DrafterConfig, timings: Iterable[Timing]) -> list[dict[str, Any]]:
    """A draft round (a round's context rows, the smallest block, the Markov loop) by batch, and the loop's share."""
    rows: list[dict[str, Any]] = []
    by_batch: dict[int, list[Timing]] = {}
    for timing in timings:
        by_batch.setdefault(timing.batch, []).append(timing)
    for batch, of_batch in sorted(by_batch.items()):
        first = {name: next(t for t in of_batch if t.name == name) for name in ("context", "block")}
        for loop in (t for t in of_batch if t.name == "markov_loop"):
            parts = {**first, "markov": loop}
            total = sum(t.seconds for t in parts.values())
            rows.append(
                {"batch": batch, "markov": loop.markov, "seconds": total, "markov_share": loop.seconds / total}
                | {f"{name}_seconds": timing.seconds for name, timing in parts.items()}
            )
    return rows


def bandwidth(backend: Backend) -> float:
    """Bytes per second of large reads: of a sum on the host, of a copy (read and written) on a device."""
    spec = TensorSpec("bandwidth", "float32", (_BANDWIDTH_BYTES // 4,))
    source = backend.zeros(spec)
    if isinstance(source, np.ndarray):
        source[...] = 1
        return max(_BANDWIDTH_BYTES / _seconds(lambda: source.sum()) for _ in range(5))
    into = backend.zeros(spec)

    def copy() -> None:
        into[...] = source
        backend.synchronize()

    copy()
    return max(2 * _BANDWIDTH_BYTES / _seconds(copy) for _ in range(5))


def _with_variants(bundle: Bundle) -> Iterator[tuple[Graph, str | None]]:
    exported = bundle.manifest["export"]["markov"]
    for graph in bundle.graphs:
        if graph.spec.name != "markov_loop":
            yield graph, None
            continue
        yield graph, exported
        other: Literal["loop", "unrolled"] = "unrolled" if exported == "loop" else "loop"
        yield markov_variant(bundle, graph, other), other


def _timed(
    config: DrafterConfig, backend: Backend, graph: Graph, markov: str | None, seconds: float, rate: float
) -> Timing:
    engine, random = backend.engine(graph), np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for spec in (*graph.spec.inputs, *graph.spec.outputs):
        tensors[spec.name] = backend.zeros(spec)
    for spec in graph.spec.inputs:
        if not spec.name.endswith("_cache"):  # zeros there cost what anything costs
            assign(tensors[spec.name], _example(config, graph, spec, random))
    engine.bind(tensors)

    def run() -> None:
        engine.run()
        backend.synchronize()

    for _ in range(_WARM_UP):
        run()
    taken, until = list[float](), time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < until:
        taken.append(_seconds(run))
    read = weight_bytes_read(graph)
    deciles = statistics.quantiles(taken, n=10)
    return Timing(
        graph.path.stem, graph.spec.name, graph.spec.batch, markov, statistics.median(taken), deciles[0], deciles[-1],
        len(taken), read, read / rate,
    )  # fmt: skip


def _example(config: DrafterConfig, graph: Graph, spec: TensorSpec, random: np.random.Generator) -> np.ndarray:
    if spec.name == "context_length":
        return np.full(spec.shape, max(1, graph.spec.size - config.proposals))
    if spec.name == "positions":
        return np.broadcast_to(np.arange(spec.shape[1]), spec.shape)
    if spec.dtype == "int64":
        return random.integers(0, config.vocab_size, spec.shape)
    if spec.name == "noise":
        return random.random(spec.shape, np.float32)
    if spec.name == "temperature":
        return np.ones(spec.shape, np.float32)
    return random.standard_normal(spec.shape, np.float32)


def weight_bytes_read(graph: Graph) -> int:
    """Bytes of the weights that a run reads whole; of a table that is gathered from, it reads a few rows."""
    if graph.model is None:
        model = onnx.load(str(graph.path), load_external_data=False)
    else:
        model = onnx.load_from_string(graph.model)
    whole = set[str]()

    def visit(nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            whole.update(node.input[1:] if node.op_type == "Gather" else node.input)
            for attribute in node.attribute:
                visit(attribute.g.node)

    visit(model.graph.node)
    total = 0.0
    for weight in model.graph.initializer:
        if weight.name in whole and weight.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in weight.external_data}
            total += int(entry["length"])
    return int(total)


def _seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun
