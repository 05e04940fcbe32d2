"""Drafting: the drafter's context caches, and one block per call. Whoever owns the loop may call it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import BadInputError
from dspark.drafter.tensors import DRAFT_TO_TARGET
from dspark.engines.backend import Array, Backend, Engine, assign
from dspark.export.bundle import Bundle
from dspark.export.contract import cache_rows

from .sampling import Sampling, draw, truncated


@dataclass(frozen=True, slots=True)
class Draft:
    """A block for every slot. Arrays belong to ``Drafting`` and hold until its next draft."""

    tokens: NDArray[np.int64]  # [B, K], target ids
    q: NDArray[np.float32]  # [B, K, V'], the law that each token was drawn from
    confidence_logits: NDArray[np.float32] | None  # [B, K]


class Drafting:
    """B slots of a bundle's drafter on a backend.

    Args:
        markov: drive the head as one loop engine, or slot by slot with the step engine. Requests with top-k or
            top-p are always driven slot by slot, since their law is truncated before each draw.
    """

    def __init__(
        self, bundle: Bundle, backend: Backend, batch: int = 1, markov: Literal["loop", "step"] = "loop"
    ) -> None:
        self.bundle, self.backend, self.batch, self.markov = bundle, backend, batch, markov
        self.config = bundle.config
        reduced = self.config.reduced_vocabulary
        self.draft_to_target = bundle.load(DRAFT_TO_TARGET).numpy() if reduced else None  # [V']
        self.capacities = bundle.sizes("block", batch)
        if not self.capacities:
            raise BadInputError(f"{bundle.path}: was exported for batch {list(bundle.batches)}, not {batch}")
        self.length = np.zeros(batch, dtype=np.int64)  # valid cache rows per slot
        self.seconds: defaultdict[str, float] = defaultdict(float)  # spent in context, block and markov
        self._tensors: dict[str, Array] = {}
        self._greedy: NDArray[np.float32] | None = None
        self._greedy_ids: NDArray[np.int64]
        self._contexts: dict[int, tuple[Engine, dict[str, Array]]] = {}
        self._engines: dict[tuple[str, int], Engine] = {}
        self._resize(self.capacities[0])
        # Loaded now, so that no round pays for it; a larger capacity is loaded when it is reached.
        self._engine("block", self._capacity)
        self._engine("markov_loop" if markov == "loop" else "markov_step", 0)
        for size in bundle.sizes("context", batch):
            self._context(size)

    @property
    def capacity(self) -> int:
        """The longest context that a block can be drafted after; a ring of a window goes on for all positions."""
        return self.capacities[-1] if self.config.ring is None else self.config.max_position_embeddings

    def target_law(self, law: NDArray[np.float32]) -> NDArray[np.float32]:
        """A law [V'] of draft tokens as a law [V] of target ids: the same numbers, and zeros elsewhere."""
        if self.draft_to_target is None:
            return law
        full = np.zeros(self.config.vocab_size, law.dtype)
        full[self.draft_to_target] = law
        return full

    def append(self, features: Mapping[int, NDArray[np.float32]]) -> None:
        """Append target features [n, F·h_t] of consecutive positions to the context of each slot."""
        begun = time.perf_counter()
        pending = dict(features)
        longest = max(int(self.length[slot]) + len(rows) for slot, rows in pending.items())
        if longest > self.capacity:
            raise BadInputError(
                f"a context of {longest} tokens is over the bundle's largest capacity {self.capacity}; "
                "export with a larger --context"
            )
        if self.config.ring is not None:
            pending = {slot: self._within_window(slot, rows) for slot, rows in pending.items()}
        elif longest > self._capacity:
            self._resize(next(capacity for capacity in self.capacities if capacity >= longest))
        while pending:
            pending = self._append_once(pending)
        self.seconds["context"] += time.perf_counter() - begun

    def draft(
        self,
        anchors: Mapping[int, int],
        noise: Mapping[int, NDArray[np.float32]],
        sampling: Mapping[int, Sampling],
    ) -> Draft:
        """Draft one block after the anchor of each slot.

        Args:
            anchors: last committed token per slot, at the position that follows the slot's context.
            noise: K uniforms in [0, 1) per slot.
            sampling: temperature, and top-k and top-p where the draft is to follow them.
        """
        begun = time.perf_counter()
        slots = list(anchors)
        anchor, temperature = np.zeros(self.batch, np.int64), np.zeros(self.batch, np.float32)
        uniform = np.zeros((self.batch, self.config.proposals), np.float32)
        for slot in slots:
            anchor[slot], uniform[slot] = anchors[slot], noise[slot]
            temperature[slot] = sampling[slot].temperature
        block = self._engine("block", self._capacity)
        assign(self._tensors["anchor"], anchor)
        assign(self._tensors["context_length"], self.length)
        block.run()
        drafted = time.perf_counter()
        stepwise = self.markov == "step" or any(sampling[slot].truncates for slot in slots)
        draft = self._walk(anchor, uniform, temperature, sampling) if stepwise else self._loop(uniform, temperature)
        self.seconds["block"] += drafted - begun
        self.seconds["markov"] += time.perf_counter() - drafted
        return draft

    def release(self, slot: int) -> None:
        """Empty the slot's context; where no slot has one left, go back to the smallest capacity."""
        self.length[slot] = 0
        if not self.length.any() and self._capacity > self.capacities[0]:
            self._resize(self.capacities[0])

    def _within_window(self, slot: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows that a window still sees once all are appended; the others only count."""
        out_of_reach = max(0, len(rows) - self._capacity)
        self.length[slot] += out_of_reach
        return rows[out_of_reach:]

    def _append_once(self, pending: dict[int, NDArray[np.float32]]) -> dict[int, NDArray[np.float32]]:
        wanted = max(len(rows) for rows in pending.values())
        sizes = self.bundle.sizes("context", self.batch)
        size = next((size for size in sizes if size >= wanted), sizes[-1])
        engine, tensors = self._context(size)
        positions = np.zeros((self.batch, size), np.int64)
        for slot, rows in pending.items():
            taken = rows[:size]
            assign(tensors["features"][slot, : len(taken)], taken)
            positions[slot] = self.length[slot] + np.arange(size)
        assign(tensors["positions"], positions)
        engine.run()
        for slot, rows in pending.items():
            start, count = int(self.length[slot]), min(len(rows), size)
            into, kept = cache_rows(start, count, self._capacity)
            for cache, new in (("k_cache", "k"), ("v_cache", "v")):
                self._tensors[cache][:, slot][:, :, into] = tensors[new][:, slot][:, :, kept]
            self.length[slot] += count
        return {slot: rows[size:] for slot, rows in pending.items() if len(rows) > size}

    def _loop(self, noise: NDArray[np.float32], temperature: NDArray[np.float32]) -> Draft:
        engine = self._engine("markov_loop", 0)
        assign(self._tensors["noise"], noise)
        assign(self._tensors["temperature"], temperature)
        engine.run()
        confidence = self._tensors.get("confidence_logits")
        tokens, q = self.backend.to_host(self._tensors["tokens"]), self._tensors["q"]
        # The one large thing that a device would send up: where every slot is greedy, its tokens say it all.
        on_device = not isinstance(q, np.ndarray) and not temperature.any()
        return Draft(
            tokens,
            self._one_hot(tokens) if on_device else self.backend.to_host(q),
            None if confidence is None else self.backend.to_host(confidence),
        )

    def _one_hot(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The laws [B, K, V'] of greedily drafted tokens [B, K], in one array that is used again."""
        ids = tokens
        if self.draft_to_target is not None:
            order = np.argsort(self.draft_to_target)
            ids = order[np.searchsorted(self.draft_to_target, tokens, sorter=order)]
        if self._greedy is None:
            self._greedy = np.zeros((*tokens.shape, self.config.proposal_vocab_size), np.float32)
        else:
            np.put_along_axis(self._greedy, self._greedy_ids[..., None], 0, axis=-1)
        np.put_along_axis(self._greedy, ids[..., None], 1, axis=-1)
        self._greedy_ids = ids
        return self._greedy

    def _walk(
        self,
        anchor: NDArray[np.int64],
        noise: NDArray[np.float32],
        temperature: NDArray[np.float32],
        sampling: Mapping[int, Sampling],
    ) -> Draft:
        """The step engine K times; where a law is truncated, the token is drawn again, from that law."""
        engine, step = self._engine("markov_step", 0), self._tensors
        tokens = np.zeros_like(noise, dtype=np.int64)
        laws: list[NDArray[np.float32]] = []
        confidence = np.zeros_like(noise) if self.config.confidence_head else None
        previous = anchor
        if "state" in step:
            assign(step["state"], np.zeros(step["state"].shape, np.float32))
        assign(step["step.temperature"], temperature)
        for slot in range(self.config.proposals):
            assign(step["previous"], previous)
            step["step.base_logits"][...] = step["base_logits"][:, slot]
            step["step.hidden"][...] = step["hidden"][:, slot]
            assign(step["step.noise"], noise[:, slot])
            engine.run()
            previous = np.array(self.backend.to_host(step["token"]))
            law = np.array(self.backend.to_host(step["step.q"]))
            for row, how in sampling.items():
                if how.truncates:
                    law[row] = truncated(law[row], how)
                    chosen = draw(law[row], float(noise[row, slot]))
                    previous[row] = chosen if self.draft_to_target is None else self.draft_to_target[chosen]
            tokens[:, slot] = previous
            laws.append(law)
            if confidence is not None:
                confidence[:, slot] = self.backend.to_host(step["confidence_logit"])
            if "state" in step:
                step["state"][...] = step["next_state"]
        return Draft(tokens, np.stack(laws, axis=1), confidence)

    def _resize(self, capacity: int) -> None:
        """Caches of another capacity; rows so far are copied, once."""
        for tensor in self.bundle.graph("block", self.batch, capacity).spec.inputs:
            if tensor.name in ("k_cache", "v_cache"):
                resized, old = self.backend.zeros(tensor), self._tensors.get(tensor.name)
                if old is not None:
                    rows = int(self.length.max())
                    resized[:, :, :, :rows] = old[:, :, :, :rows]
                self._tensors[tensor.name] = resized
        self._capacity = capacity
        if ("block", capacity) in self._engines:
            self._engines["block", capacity].bind(self._tensors)

    def _context(self, size: int) -> tuple[Engine, dict[str, Array]]:
        if size not in self._contexts:
            graph = self.bundle.graph("context", self.batch, size)
            engine = self.backend.engine(graph)
            tensors = {spec.name: self.backend.zeros(spec) for spec in (*graph.spec.inputs, *graph.spec.outputs)}
            engine.bind(tensors)
            self._contexts[size] = engine, tensors
        return self._contexts[size]

    def _engine(self, name: str, size: int) -> Engine:
        """An engine bound to the tensors that it shares with the others: block's logits are the loop's."""
        if (name, size) not in self._engines:
            graph = self.bundle.graph(name, self.batch, size)
            engine = self.backend.engine(graph)
            bound: dict[str, Any] = {}
            for spec in (*graph.spec.inputs, *graph.spec.outputs):
                own = name == "markov_step" and spec.name in _PER_STEP
                key = f"step.{spec.name}" if own else spec.name
                if key not in self._tensors:
                    self._tensors[key] = self.backend.zeros(spec)
                bound[spec.name] = self._tensors[key]
            engine.bind(bound)
            self._engines[name, size] = engine
        return self._engines[name, size]


_PER_STEP = (
    "base_logits",
    "hidden",
    "noise",
    "temperature",
    "q",
)  # one slot's share of what the loop has whole
