"""The graph contracts as data (DESIGN §3): the exporter, the manifest, parity and the engines read this table.

B slots, K proposals, L draft layers, C context capacity, N feature rows per call, F tapped layers, h_t/h target
and draft hidden size, Hkv/D key-value heads and head dim, V' draft vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import UsageError

from .quantization import OPSET as QUANTIZED_OPSET, Quantization

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: str  # float32, float16, bfloat16 or int64
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TensorSpec:
        return cls(data["name"], data["dtype"], tuple(data["shape"]))


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph of a bundle; ``size`` is N of a ``context``, C of a ``block``, 0 of a Markov graph."""

    name: str
    batch: int
    size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def file(self) -> str:
        """Path inside the bundle."""
        suffix = {"context": f"-n{self.size}", "block": f"-c{self.size}"}.get(self.name, "")
        return f"graphs/{self.name}-b{self.batch}{suffix}.onnx"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch": self.batch,
            "size": self.size,
            "inputs": [tensor.to_json() for tensor in self.inputs],
            "outputs": [tensor.to_json() for tensor in self.outputs],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphSpec:
        inputs, outputs = ([TensorSpec.from_json(t) for t in data[side]] for side in ("inputs", "outputs"))
        return cls(data["name"], data["batch"], data["size"], tuple(inputs), tuple(outputs))


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a bundle is exported as. Checked once, when it is made.

    Raises:
        UsageError: an option out of range.
    """

    dtype: Dtype = "float32"
    batch: tuple[int, ...] = (1,)  # slots per engine, one set of graphs for each
    context: tuple[int, ...] = (512, 2048, 8192)  # context capacities C, ascending
    prefill: int = 256  # N of the large ``context`` graph
    markov: Literal["loop", "unrolled"] = "loop"
    opset: int = 20
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name, values in (("batch", self.batch), ("context", self.context)):
            if not values or any(value < 1 for value in values) or list(values) != sorted(set(values)):
                raise UsageError(f"{name} {list(values)} must be ascending numbers of at least 1")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.prefill < 1:
            raise UsageError(f"prefill {self.prefill} must be at least 1")
        if not 20 <= self.opset <= 24:
            raise UsageError(f"opset {self.opset} is outside 20..24")
        if self.quantization is not None and self.opset < QUANTIZED_OPSET:
            raise UsageError(f"opset {self.opset}: quantised weights need {QUANTIZED_OPSET} or later")

    def check_fit(self, config: DrafterConfig) -> None:
        """Refuse a context that the drafter's rotary embedding was not made for, or that its windows never see, and
        blocks that its matrices do not fall into."""
        if self.quantization is not None:
            self.quantization.check_fit(config)
        if config.ring is not None and self.context != (config.ring,):
            raise UsageError(
                f"context {list(self.context)}: every layer of this drafter has a sliding window, so its one capacity "
                f"is the window, {config.ring}"
            )
        if self.context[-1] > config.max_position_embeddings:
            raise UsageError(
                f"context {self.context[-1]} is over the drafter's max_position_embeddings "
                f"{config.max_position_embeddings}"
            )


def default_context(config: DrafterConfig) -> tuple[int, ...]:
    """The usual capacities, as far as the drafter's positions go; the window where every layer has one."""
    if config.ring is not None:
        return (config.ring,)
    limit = config.max_position_embeddings
    return tuple(size for size in ExportOptions().context if size <= limit) or (limit,)


def cache_rows(start: int, count: int, capacity: int) -> tuple[slice | NDArray[np.int64], slice]:
    """Where new context rows go: position p lies in row p mod C, which wraps in the ring of a window only.

    Args:
        start: position of the first of ``count`` new rows.

    Returns:
        rows of the cache, and which of the new rows go there: the last C of them.
    """
    kept = min(count, capacity)
    first = (start + count - kept) % capacity
    if first + kept <= capacity:
        return slice(first, first + kept), slice(count - kept, count)
    return np.arange(first, first + kept) % capacity, slice(count - kept, count)


def graph_specs(config: DrafterConfig, options: ExportOptions) -> tuple[GraphSpec, ...]:
    """Every graph of a bundle, in the order in which a round runs them."""
    return tuple(_specs(config, options))


def _specs(config: DrafterConfig, options: ExportOptions) -> Iterator[GraphSpec]:
    for batch in options.batch:
        for rows in sorted({config.proposals + 1, options.prefill}):
            yield _context(config, options, batch, rows)
        for capacity in options.context:
            yield _block(config, options, batch, capacity)
        yield _markov_step(config, batch)
        yield _markov_loop(config, batch)


def _context(config: DrafterConfig, options: ExportOptions, batch: int, rows: int) -> GraphSpec:
    shape = (config.num_hidden_layers, batch, config.num_key_value_heads, rows, config.head_dim)
    return GraphSpec(
        "context",
        batch,
        rows,
        inputs=(
            # fp32 always: tapped features reach 1e4, which fp16 does not hold
            TensorSpec("features", "float32", (batch, rows, config.feature_size)),
            TensorSpec("positions", "int64", (batch, rows)),
        ),
        outputs=(TensorSpec("k", options.dtype, shape), TensorSpec("v", options.dtype, shape)),
    )


def _block(config: DrafterConfig, options: ExportOptions, batch: int, capacity: int) -> GraphSpec:
    cache = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
    return GraphSpec(
        "block",
        batch,
        capacity,
        inputs=(
            TensorSpec("anchor", "int64", (batch,)),
            TensorSpec("context_length", "int64", (batch,)),
            TensorSpec("k_cache", options.dtype, cache),
            TensorSpec("v_cache", options.dtype, cache),
        ),
        outputs=(
            TensorSpec("base_logits", "float32", (batch, config.proposals, config.proposal_vocab_size)),
            TensorSpec("hidden", "float32", (batch, config.proposals, config.hidden_size)),
        ),
    )


def _markov_step(config: DrafterConfig, batch: int) -> GraphSpec:
    rnn = config.markov_head_type == "rnn"
    state = (batch, config.markov_rank)
    return GraphSpec(
        "markov_step",
        batch,
        0,
        inputs=(
            TensorSpec("previous", "int64", (batch,)),
            TensorSpec("base_logits", "float32", (batch, config.proposal_vocab_size)),
            TensorSpec("hidden", "float32", (batch, config.hidden_size)),
            *([TensorSpec("state", "float32", state)] if rnn else []),
            TensorSpec("noise", "float32", (batch,)),
            TensorSpec("temperature", "float32", (batch,)),
        ),
        outputs=(
            TensorSpec("token", "int64", (batch,)),
            TensorSpec("q", "float32", (batch, config.proposal_vocab_size)),
            *([TensorSpec("confidence_logit", "float32", (batch,))] if config.confidence_head else []),
            *([TensorSpec("next_state", "float32", state)] if rnn else []),
        ),
    )


def _markov_loop(config: DrafterConfig, batch: int) -> GraphSpec:
    slots = (batch, config.proposals)
    confidence = [TensorSpec(name, "float32", slots) for name in ("confidence_logits", "survival")]
    return GraphSpec(
        "markov_loop",
        batch,
        0,
        inputs=(
            TensorSpec("anchor", "int64", (batch,)),
            TensorSpec("base_logits", "float32", (*slots, config.proposal_vocab_size)),
            TensorSpec("hidden", "float32", (*slots, config.hidden_size)),
            TensorSpec("noise", "float32", slots),
            TensorSpec("temperature", "float32", (batch,)),
        ),
        outputs=(
            TensorSpec("tokens", "int64", slots),
            TensorSpec("q", "float32", (*slots, config.proposal_vocab_size)),
            *(confidence if config.confidence_head else []),
        ),
    )
