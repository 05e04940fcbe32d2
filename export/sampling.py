"""Sampling inside a graph: a two-level inverse CDF driven by one uniform per slot.

No Multinomial and no RandomUniform: noise comes from outside, so every draft can be replayed. Both levels
accumulate at most about √V' terms, which keeps fp32 rounding of the CDF far below 1e-6.
"""

from __future__ import annotations

import math

import numpy as np

from .builder import GraphBuilder


def draw(b: GraphBuilder, logits: str, noise: str, temperature: str, batch: int, vocab: int) -> tuple[str, str]:
    """Draw from softmax(logits / temperature); temperature 0 is argmax with a one-hot law.

    Args:
        logits: [B, V'] fp32. noise: [B] in [0, 1). temperature: [B].

    Returns:
        token [B] int64, and q [B, V'] fp32, the very vector that the token was drawn from.
    """
    q = _law(b, logits, temperature, batch, vocab)
    size, count = block_split(vocab)
    blocks = _blocks(b, q, batch, vocab)
    sums = b.op("ReduceSum", blocks, b.constant([2]), keepdims=0)  # [B, count]
    cumulative = b.op("CumSum", sums, b.constant(1))
    total = b.slice(cumulative, 1, count - 1, count)  # [B, 1]
    threshold = b.op("Mul", b.reshape(noise, batch, 1), total)
    block = _first_beyond(b, cumulative, sums, threshold, count)  # [B, 1]

    zero = b.constant(np.zeros((batch, 1)), np.float32)
    before = b.op("Concat", zero, b.slice(cumulative, 1, 0, count - 1), axis=1) if count > 1 else zero
    rest = b.op("Sub", threshold, b.op("GatherElements", before, block, axis=1))  # [B, 1]
    chosen = b.op("GatherND", blocks, block, batch_dims=1)  # [B, size]
    inside = _first_beyond(b, b.op("CumSum", chosen, b.constant(1)), chosen, rest, size)  # [B, 1]
    token = b.op("Add", b.op("Mul", block, b.constant(size)), inside)
    return b.reshape(token, batch), q


def block_split(vocab: int) -> tuple[int, int]:
    """(block size, number of blocks) near √V'; a divisor of V' within a factor of 4, so that nothing is padded."""
    root = math.isqrt(vocab - 1) + 1
    divisors = [size for size in range(max(1, root // 4), 4 * root + 1) if vocab % size == 0]
    size = min(divisors, key=lambda size: abs(math.log(size / root)), default=root)
    return size, -(-vocab // size)


def _law(b: GraphBuilder, logits: str, temperature: str, batch: int, vocab: int) -> str:
    column = b.reshape(temperature, batch, 1)
    hot = b.op("Greater", column, b.constant(0, np.float32))
    divisor = b.op("Where", hot, column, b.constant(1, np.float32))
    softmax = b.op("Softmax", b.op("Div", logits, divisor), axis=1)  # [B, V']
    # A runtime's softmax may add V' terms in one fp32 sum, and its law then misses 1 by 4e-6; two levels mend that.
    total = b.op("ReduceSum", _blocks(b, softmax, batch, vocab), b.constant([2]), keepdims=0)
    total = b.op("ReduceSum", total, b.constant([1]), keepdims=1)  # [B, 1]
    scale = b.op("Div", b.cast(hot, "float32"), total)
    # A greedy row is zeroed and gets its one; in any other row the largest entry is written over with itself. That is
    # half the time of a Where over [B, V'].
    greedy = _argmax(b, logits, batch, vocab)
    kept = b.op("Mul", softmax, scale)
    largest = b.op("Where", hot, b.op("GatherElements", kept, greedy, axis=1), b.constant(1, np.float32))
    return b.op("ScatterElements", kept, greedy, largest, axis=1)


def _blocks(b: GraphBuilder, mass: str, batch: int, vocab: int) -> str:
    """[B, V'] as [B, count, size], with zeros at the end where V' has no fitting divisor."""
    size, count = block_split(vocab)
    if size * count > vocab:
        mass = b.op("Concat", mass, b.constant(np.zeros((batch, size * count - vocab)), np.float32), axis=1)
    return b.reshape(mass, batch, count, size)


def _argmax(b: GraphBuilder, logits: str, batch: int, vocab: int) -> str:
    """Index [B, 1] of the first largest logit: block maxima first, which is 4 × faster than one long ArgMax."""
    size, count = block_split(vocab)
    if size * count > vocab:
        return b.op("ArgMax", logits, axis=1, keepdims=1)
    blocks = b.reshape(logits, batch, count, size)
    block = b.op("ArgMax", b.op("ReduceMax", blocks, b.constant([2]), keepdims=0), axis=1, keepdims=1)
    inside = b.op("ArgMax", b.op("GatherND", blocks, block, batch_dims=1), axis=1, keepdims=1)
    return b.op("Add", b.op("Mul", block, b.constant(size)), inside)


def _first_beyond(b: GraphBuilder, cumulative: str, mass: str, threshold: str, size: int) -> str:
    """Index [B, 1] of the first entry with mass whose cumulative sum exceeds the threshold.

    Where rounding leaves none, the entry of the largest mass. Scores are distinct among the candidates, so the
    result does not hang on how a runtime breaks ties.
    """
    positive = b.op("Greater", mass, b.constant(0, np.float32))
    candidate = b.op("And", b.op("Greater", cumulative, threshold), positive)
    earliest_wins = b.constant([np.arange(size + 1, 1, -1)], np.float32)  # all above any mass
    return b.op("ArgMax", b.op("Where", candidate, earliest_wins, mass), axis=1, keepdims=1)
