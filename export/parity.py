"""Parity: the reference model against the graphs, on any runtime, over rounds in which the cache grows.

Each graph is judged on every output. In the smallest capacity ``context`` and ``block`` run on the cache that the
graphs themselves have built, in the others on one that both sides share; the Markov graphs get the reference's logits,
so that their fp32 arithmetic is judged by an fp32 tolerance in every dtype; and once more chained behind ``block``, for
token agreement and longest common prefix.

What fp16 or bf16 may cost is not guessed: the reference, rounding where the graph rounds, runs beside the fp32 one, and
a graph may differ from the fp32 one by twice the largest difference that this rounding makes, over the same rounds.

Graphs with quantised weights are judged against a reference that has these very weights, as tightly as any other. What
quantisation costs is no fault of theirs; it is measured beside them, against a reference with the original weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.drafter.errors import CheckFailedError
from dspark.drafter.model import ReferenceDrafter
from dspark.drafter.tensors import DRAFT_TO_TARGET

from .bundle import Graph
from .contract import GraphSpec, cache_rows
from .cost import CostRow, Costs
from .shadow import fp32_shadow

Arrays = dict[str, NDArray[Any]]
ROUNDS = 20
_TEMPERATURES = (0.0, 1.0, 0.6)
# Largest error over the largest magnitude of the reference's output, for fp32 arithmetic
_TOLERANCE = 3e-5
_MARKOV_TOLERANCE = 2e-5
_ROUNDING_MARGIN = 2  # over the largest error of the rounding reference: another order of sums rounds elsewhere
_CDF_ROUNDING = 1e-6
# Share of greedy tokens that agree, and of a draft's length up to the first difference, behind ``block``.
_AGREEMENT = {"float32": 0.98, "float16": 0.9, "bfloat16": 0.7}


class Runner(Protocol):
    """Runs one graph; what parity needs of a backend."""

    name: str

    def supports(self, dtype: str) -> bool: ...

    def evaluate(self, graph: Graph, inputs: Arrays) -> Arrays: ...

    def release(self, graph: Graph) -> None: ...


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One output of one graph over all rounds; ``tolerance`` is absolute, or a lower bound of agreement."""

    graph: str
    output: str
    rounds: int
    max_abs: float
    tolerance: float
    passed: bool
    agreement: float | None = None  # share of equal ids
    common_prefix: float | None = None  # mean share of a draft before the first difference

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The parity table, and what it was made with."""

    runner: str
    shadow: bool  # bf16 checked through the fp32 shadow of the same graphs
    rows: tuple[ParityRow, ...]
    costs: tuple[CostRow, ...] = ()  # of quantised weights

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def require(self) -> None:
        """Raises ``CheckFailedError`` that names each output out of tolerance."""
        failed = [row for row in self.rows if not row.passed]
        if failed:
            lines = [f"{row.graph}.{row.output}: {row.max_abs:.3g} against {row.tolerance:.3g}" for row in failed]
            raise CheckFailedError(
                f"parity does not hold on {self.runner}: " + "; ".join(lines),
                parity=[row.to_json() for row in self.rows],
            )

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"runner": self.runner, "fp32_shadow": self.shadow, "passed": self.passed, "outputs": rows}


def check_parity(
    reference: ReferenceDrafter,
    graphs: Sequence[Graph],
    rounding: ReferenceDrafter,
    runner: Runner,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    original: ReferenceDrafter | None = None,
) -> ParityReport:
    """Compare every output of every graph over at least ``ROUNDS`` rounds per batch size.

    Args:
        reference: fp32 model of the same checkpoint.
        rounding: the model that rounds where the graphs do, to their dtype; ``reference`` itself for fp32.
        progress: called with rounds done and rounds in all.
        original: of quantised graphs, the fp32 model with the weights as they were; gives the report its costs.
    """
    dtype = str(rounding.dtype).removeprefix("torch.")
    shadow = not runner.supports(dtype)
    if shadow:
        graphs = [fp32_shadow(graph) for graph in graphs]
    comparison, costs = _Comparison(dtype), Costs()
    batches = sorted({graph.spec.batch for graph in graphs})
    drivers = [
        _Driver(
            reference,
            None if rounding.dtype == torch.float32 else _Beside(rounding),
            None if original is None else _Beside(original),
            [g for g in graphs if g.spec.batch == batch],
            runner,
            comparison,
            costs,
            seed,
        )
        for batch in batches
    ]
    total, done = sum(driver.total for driver in drivers), 0
    with torch.inference_mode():
        for driver in drivers:
            for _ in driver.rounds():
                done += 1
                progress(done, total)
    return ParityReport(runner.name, shadow, tuple(comparison.rows()), tuple(costs.rows()))


@dataclass
class _Measured:
    """Running maximum of one output's error, of what rounding costs, and of the reference's magnitude."""

    tolerance: float
    rounds: int = 0
    error: float = 0.0
    rounding: float = 0.0
    magnitude: float = 0.0
    equal: int = 0
    prefix: int = 0
    ids: int = 0


@dataclass
class _Comparison:
    dtype: str
    measured: dict[tuple[str, str], _Measured] = field(default_factory=dict)

    def values(
        self,
        spec: GraphSpec,
        output: str,
        found: NDArray[Any],
        wanted: torch.Tensor,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """An output against the fp32 reference's, and the rounding reference's against it."""
        markov = spec.name.startswith("markov")
        entry = self._entry(spec, output, _MARKOV_TOLERANCE if markov else _TOLERANCE)
        if rounded is not None:
            entry.rounding = max(entry.rounding, float((rounded - wanted).abs().max()))
        reference = wanted.numpy().astype(np.float64)
        error = np.abs(found.astype(np.float64) - reference)
        entry.rounds += 1
        # NaN compares false with everything, so it is made an infinite error
        entry.error = max(entry.error, float(np.nan_to_num(error, nan=np.inf).max()))
        entry.magnitude = max(entry.magnitude, float(np.abs(reference).max()))

    def ids(self, spec: GraphSpec, output: str, equal: NDArray[Any], bound: float) -> None:
        """Which token ids [B, K] agree: their share, and the share before the first difference."""
        entry = self._entry(spec, output, bound)
        entry.rounds += 1
        entry.ids += equal.size
        entry.equal += int(equal.sum())
        entry.prefix += int(equal.cumprod(axis=1).sum())

    def rows(self) -> Iterator[ParityRow]:
        for (graph, output), m in self.measured.items():
            if m.ids:
                agreement, prefix = m.equal / m.ids, m.prefix / m.ids
                differing = float(m.ids - m.equal)
                passed = min(agreement, prefix) >= m.tolerance
                yield ParityRow(graph, output, m.rounds, differing, m.tolerance, passed, agreement, prefix)
            else:
                tolerance = m.tolerance * max(m.magnitude, 1e-30) + _ROUNDING_MARGIN * m.rounding
                yield ParityRow(graph, output, m.rounds, m.error, tolerance, m.error <= tolerance)

    def _entry(self, spec: GraphSpec, output: str, tolerance: float) -> _Measured:
        return self.measured.setdefault((_name(spec), output), _Measured(tolerance))


def _name(spec: GraphSpec) -> str:
    return spec.file.removeprefix("graphs/").removesuffix(".onnx")


class _Beside:
    """A model that goes through the reference's rounds beside it: a cache of its own where the graphs' grows."""

    def __init__(self, model: ReferenceDrafter) -> None:
        self.model = model
        self.cache = self.rows = (torch.empty(0), torch.empty(0))

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        self.rows = self.model.context(features, positions)

    def block(self, anchor: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.block(anchor, length, *self.cache)


class _Driver:
    """Rounds of one batch size: append features, draft a block, walk the Markov head, accept 0 … K."""

    def __init__(
        self,
        reference: ReferenceDrafter,
        rounding: _Beside | None,
        original: _Beside | None,
        graphs: Sequence[Graph],
        runner: Runner,
        comparison: _Comparison,
        costs: Costs,
        seed: int,
    ) -> None:
        self.reference, self.config, self.runner = reference, reference.config, runner
        self.rounding, self.original = rounding, original
        self.beside = [model for model in (rounding, original) if model is not None]
        self.comparison, self.costs, self.random = comparison, costs, np.random.default_rng(seed)
        by_name: dict[str, list[Graph]] = {}
        for graph in graphs:
            by_name.setdefault(graph.spec.name, []).append(graph)
        self.contexts = sorted(by_name["context"], key=lambda graph: graph.spec.size)
        self.blocks = sorted(by_name["block"], key=lambda graph: graph.spec.size)
        (self.step,), (self.loop,) = by_name["markov_step"], by_name["markov_loop"]
        self.batch = graphs[0].spec.batch
        self.total = ROUNDS + 4 * (len(self.blocks) - 1)

    def rounds(self) -> Iterator[int]:
        number = 0
        for position, block in enumerate(self.blocks):
            count = ROUNDS if position == 0 else 4
            self._start(block, count)
            for i in range(count):
                if i == count - 1 and self.config.ring is None:  # the last round fills the cache to its last row
                    self._append(self.limit - self.length)
                else:
                    accepted = (number + np.arange(self.batch) * 3) % (self.config.proposals + 1)
                    self._append(np.minimum(accepted + 1, self.limit - self.length))
                self._round(block, number)
                number += 1
                yield number
            for graph in (block, *self.contexts, self.step, self.loop):  # and the pages that they have touched
                self.runner.release(graph)

    def _start(self, block: Graph, rounds: int) -> None:
        """Empty caches for the smallest capacity; elsewhere caches filled with random rows, nearly to the end."""
        cache = next(tensor for tensor in block.spec.inputs if tensor.name == "k_cache")
        self.capacity, smallest = block.spec.size, block is self.blocks[0]
        self.limit = self.capacity if self.config.ring is None else self.config.max_position_embeddings
        self.length = np.zeros(self.batch, dtype=np.int64)
        self.k = self.v = torch.empty(0)  # the last capacity's go before the next one's come
        self.graph_cache = {}
        for model in self.beside:
            model.cache = (self.k, self.v)
        self.k, self.v = (torch.zeros(cache.shape) for _ in range(2))
        if smallest:
            # A prompt that needs both sizes of ``context``, and leaves room for the rounds
            room = self.limit - rounds * (self.config.proposals + 1)
            largest = self.contexts[-1].spec.size
            self._prefill = max(1, min(largest + self.config.proposals, room))
        else:
            self.length += max(0, self.capacity - 2 * rounds * (self.config.proposals + 1))
            for tensor in (self.k, self.v):
                self.random.standard_normal(dtype=np.float32, out=tensor.numpy())
                if self.rounding is not None:  # exact in every dtype: the cache is given, and costs nothing
                    for layer in tensor:
                        layer.copy_(layer.to(self.rounding.model.dtype))
            self._prefill = 1
        for model in self.beside:  # its own rows; larger caches are shared
            model.cache = (self.k.clone(), self.v.clone()) if smallest else (self.k, self.v)
        # numpy has no bf16; a device that has takes fp32 and rounds. Larger caches are shared.
        dtype = "float32" if cache.dtype == "bfloat16" else cache.dtype
        self.graph_cache = {name: tensor.numpy().astype(dtype, copy=smallest) for name, tensor in self._caches()}
        self._append(np.minimum(self._prefill - np.arange(self.batch) % self._prefill, self.limit - self.length))

    def _caches(self) -> tuple[tuple[str, torch.Tensor], ...]:
        return ("k_cache", self.k), ("v_cache", self.v)

    def _append(self, counts: NDArray[np.int64]) -> None:
        """Append ``counts`` [B] feature rows, in chunks of the graph that fits best."""
        counts = counts.copy()
        while counts.max() > 0:
            fitting = [g for g in self.contexts if g.spec.size >= counts.max()]
            graph = fitting[0] if fitting else self.contexts[-1]
            rows = graph.spec.size
            shape = (self.batch, rows, self.config.feature_size)
            features = self.random.standard_normal(shape).astype(np.float32)
            positions = self.length[:, None] + np.arange(rows)
            found = self.runner.evaluate(graph, {"features": features, "positions": positions})
            wanted = self.reference.context(torch.from_numpy(features), torch.from_numpy(positions))
            for model in self.beside:
                model.context(torch.from_numpy(features), torch.from_numpy(positions))
            taken = np.minimum(counts, rows)
            for i, (name, (cache_name, cache)) in enumerate(zip(("k", "v"), self._caches(), strict=True)):
                rounded = None if self.rounding is None else self.rounding.rows[i]
                self.comparison.values(graph.spec, name, found[name], wanted[i], rounded)
                if self.original is not None:
                    self.costs.values(_name(graph.spec), name, self.original.rows[i], wanted[i])
                for slot, (start, count) in enumerate(zip(self.length, taken, strict=True)):
                    into, new = cache_rows(int(start), int(count), self.capacity)
                    for model in self.beside:  # before the reference's, which take this place in a shared cache
                        model.cache[i][:, slot][:, :, into] = model.rows[i][:, slot][:, :, new]
                    cache[:, slot][:, :, into] = wanted[i][:, slot][:, :, new]
                    self.graph_cache[cache_name][:, slot][:, :, into] = found[name][:, slot][:, :, new]
            self.length += taken
            counts -= taken

    def _round(self, block: Graph, number: int) -> None:
        slots = (self.batch, self.config.proposals)
        anchor = self.random.integers(0, self.config.vocab_size, self.batch)
        noise = self.random.random(slots, dtype=np.float32)
        picked = [_TEMPERATURES[(number + slot) % 3] for slot in range(self.batch)]
        temperature = np.array(picked, dtype=np.float32)
        found = self.runner.evaluate(
            block, {"anchor": anchor, "context_length": self.length.copy(), **self.graph_cache}
        )
        place = torch.from_numpy(anchor), torch.from_numpy(self.length.copy())
        base, hidden = self.reference.block(*place, self.k, self.v)
        rounded = (None, None) if self.rounding is None else self.rounding.block(*place)
        self.comparison.values(block.spec, "base_logits", found["base_logits"], base, rounded[0])
        self.comparison.values(block.spec, "hidden", found["hidden"], hidden, rounded[1])

        shared: Arrays = {"anchor": anchor, "noise": noise, "temperature": temperature}
        wanted = self.reference.markov_loop(
            torch.from_numpy(anchor), base, hidden, torch.from_numpy(noise), torch.from_numpy(temperature)
        )
        looped = self.runner.evaluate(self.loop, {**shared, "base_logits": base.numpy(), "hidden": hidden.numpy()})
        self._judge_loop(looped, wanted, noise)
        self._judge_step(wanted[0], anchor, base, hidden, noise, temperature)
        # Chained, greedily: where a law is flat, the least error moves a sampled token.
        greedy = np.zeros_like(temperature)
        chained = self.runner.evaluate(self.loop, {**shared, **found, "temperature": greedy})["tokens"]
        tokens, *_ = self.reference.markov_loop(
            torch.from_numpy(anchor), base, hidden, torch.from_numpy(noise), torch.from_numpy(greedy)
        )
        bound = _AGREEMENT[self.comparison.dtype]
        self.comparison.ids(self.loop.spec, "tokens (chained)", chained == tokens.numpy(), bound)
        if self.original is not None:
            before, before_hidden = self.original.block(*place)
            self.costs.values(_name(block.spec), "base_logits", before, base)
            self.costs.values(_name(block.spec), "hidden", before_hidden, hidden)
            drafted, *_ = self.original.model.markov_loop(
                place[0], before, before_hidden, torch.from_numpy(noise), torch.from_numpy(greedy)
            )
            self.costs.ids(_name(block.spec), "greedy tokens", drafted, tokens)

    def _judge_loop(self, found: Arrays, wanted: Sequence[torch.Tensor | None], noise: NDArray[np.float32]) -> None:
        tokens, q, confidence, survival = wanted
        assert tokens is not None
        assert q is not None
        spec = self.loop.spec
        # Slot k hangs on the tokens before it, so a slot behind a differing token is no comparison.
        same = np.cumprod(found["tokens"] == tokens.numpy(), axis=1).astype(bool)  # [B, K]
        before = np.concatenate([np.ones_like(same[:, :1]), same[:, :-1]], axis=1)
        mask = torch.from_numpy(before)
        right = _is_draw(self._draft_ids(found["tokens"]), q, noise)
        self.comparison.ids(spec, "tokens", right | ~before, 1.0)
        self.comparison.values(spec, "q", np.where(before[..., None], found["q"], 0), q * mask[..., None])
        for name, value in (("confidence_logits", confidence), ("survival", survival)):
            if value is not None:
                self.comparison.values(spec, name, np.where(before, found[name], 0), value * mask)

    def _draft_ids(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Target ids to rows of q; -1 for an id that is no draft token."""
        if not self.config.reduced_vocabulary:
            return tokens
        rows = np.full(self.config.vocab_size, -1)
        d2t = self.reference.parameters[DRAFT_TO_TARGET].numpy()
        rows[d2t] = np.arange(len(d2t))
        ids: NDArray[Any] = rows[tokens]
        return ids

    def _judge_step(
        self,
        tokens: torch.Tensor,
        anchor: NDArray[Any],
        base: torch.Tensor,
        hidden: torch.Tensor,
        noise: NDArray[Any],
        temperature: NDArray[Any],
    ) -> None:
        """The step graph, slot by slot, each given the reference's token before it."""
        spec, rnn = self.step.spec, self.config.markov_head_type == "rnn"
        state = torch.zeros(self.batch, self.config.markov_rank)
        previous, right = torch.from_numpy(anchor), []
        for slot in range(self.config.proposals):
            inputs = {
                "previous": previous.numpy(),
                "base_logits": base[:, slot].numpy(),
                "hidden": hidden[:, slot].numpy(),
                "noise": noise[:, slot],
                "temperature": temperature,
                **({"state": state.numpy()} if rnn else {}),
            }
            found = self.runner.evaluate(self.step, inputs)
            _, q, confidence, state = self.reference.markov_step(
                previous, base[:, slot], hidden[:, slot], state,
                torch.from_numpy(noise[:, slot]), torch.from_numpy(temperature),
            )  # fmt: skip
            right.append(_is_draw(self._draft_ids(found["token"]), q, noise[:, slot]))
            self.comparison.values(spec, "q", found["q"], q)
            if confidence is not None:
                self.comparison.values(spec, "confidence_logit", found["confidence_logit"], confidence)
            if rnn:
                self.comparison.values(spec, "next_state", found["next_state"], state)
            previous = tokens[:, slot]
        self.comparison.ids(spec, "token", np.stack(right, axis=1), 1.0)


def _is_draw(tokens: NDArray[Any], q: torch.Tensor, noise: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each noise [...] lies in its token's interval of the law q [..., V], to fp32 rounding of the CDF."""
    chosen = torch.from_numpy(tokens)[..., None].clamp(min=0)
    cumulative = q.double().cumsum(dim=-1)
    upper = cumulative.gather(-1, chosen)[..., 0]
    mass = q.double().gather(-1, chosen)[..., 0]
    threshold = torch.from_numpy(noise).double() * cumulative[..., -1]
    inside = (threshold >= upper - mass - _CDF_ROUNDING) & (threshold <= upper + _CDF_ROUNDING)
    return (inside & (mass > 0) & (torch.from_numpy(tokens) >= 0)).numpy()
