"""The two-level inverse CDF of the graphs draws from q: by the measure of noise intervals, and by counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from dspark.export.builder import GraphBuilder
from dspark.export.bundle import Bundle
from dspark.export.contract import TensorSpec
from dspark.export.sampling import block_split, draw
from dspark.export.weights import WeightPlan
from dspark.runtime import sampling as host

LARGEST = float(np.nextafter(np.float32(1), np.float32(0)))


def session(vocab: int, batch: int) -> onnxruntime.InferenceSession:
    """Only the nodes that draw, as the Markov graphs have them."""
    builder = GraphBuilder(WeightPlan({}, False))
    token, q = draw(builder, "logits", "noise", "temperature", batch, vocab)
    builder.output(token, "token")
    builder.output(q, "q")
    inputs = [
        TensorSpec("logits", "float32", (batch, vocab)),
        TensorSpec("noise", "float32", (batch,)),
        TensorSpec("temperature", "float32", (batch,)),
    ]
    outputs = [TensorSpec("token", "int64", (batch,)), TensorSpec("q", "float32", (batch, vocab))]
    model = builder.model("draw", inputs, outputs, 20, {"dspark.version": "test"})
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def logits_of(kind: str, vocab: int) -> np.ndarray:
    random = np.random.default_rng(vocab)
    if kind == "flat":
        return np.zeros(vocab, np.float32)
    if kind == "one-hot":
        return np.where(np.arange(vocab) == vocab // 3, 200.0, 0.0).astype(np.float32)
    return (random.standard_normal(vocab) * {"peaked": 6.0, "usual": 2.0}[kind]).astype(np.float32)


@pytest.mark.parametrize("kind", ["flat", "peaked", "usual", "one-hot"])
@pytest.mark.parametrize("vocab", [3, 17, 320, 1031, 49152])
def test_each_noise_interval_measures_q(vocab: int, kind: str) -> None:
    """For a token t, the noise below which the draw is under t and the one below which it is at most t, by bisection
    over fp32; their distance is q[t] to 1e-6."""
    batch = 16
    run = session(vocab, batch)
    logits = logits_of(kind, vocab)
    order = np.argsort(-logits, kind="stable")
    tokens = np.unique([*order[:6], *order[:: max(1, vocab // 6)], 0, vocab - 1])[:batch]
    tokens = np.concatenate([tokens, np.full(batch - len(tokens), tokens[0])])
    feed = {"logits": np.tile(logits, (batch, 1)), "temperature": np.ones(batch, np.float32)}

    def drawn(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        token, q = run.run(["token", "q"], {**feed, "noise": noise.astype(np.float32)})
        return token, q

    def boundary(limit: np.ndarray) -> np.ndarray:
        """Smallest noise (over fp32 bit patterns, which are ordered) whose token is at least ``limit``."""
        low, high = np.zeros(batch, np.int64), np.full(batch, np.float32(1).view(np.int32), np.int64)
        while (high - low).max() > 0:
            middle = (low + high) // 2
            token, _ = drawn(middle.astype(np.int32).view(np.float32))
            reached = token >= limit
            high, low = np.where(reached, middle, high), np.where(reached, low, middle + 1)
            low = np.minimum(low, high)
        return high.astype(np.int32).view(np.float32).astype(np.float64)

    _, q = drawn(np.full(batch, 0.5))
    assert abs(q[0].sum(dtype=np.float64) - 1) < 5e-7
    measure = boundary(tokens + 1) - boundary(tokens)
    np.testing.assert_allclose(measure, q[0, tokens].astype(np.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["flat", "peaked", "usual", "one-hot"])
@pytest.mark.parametrize("vocab", [3, 320, 49152])
def test_the_ends_of_the_noise_draw_tokens_with_mass(vocab: int, kind: str) -> None:
    noise = np.array([0.0, LARGEST, np.float32(1e-45), 0.5], np.float32)
    feed = {"logits": np.tile(logits_of(kind, vocab), (4, 1)), "noise": noise}
    token, q = session(vocab, 4).run(["token", "q"], {**feed, "temperature": np.ones(4, np.float32)})
    assert (np.take_along_axis(q, token[:, None], axis=1) > 0).all()
    assert token[0] == np.flatnonzero(q[0])[0]
    assert token[1] >= np.searchsorted(q[1].cumsum(dtype=np.float64), 1 - 1e-6)


def test_mixed_temperatures_and_ties() -> None:
    """Temperature 0 is the first largest logit with a one-hot law, whatever the noise; rows do not mix."""
    logits = np.array([[1, 5, 5, 0], [1, 5, 5, 0], [0, 1, 2, 3]], np.float32)
    temperature = np.array([0, 2, 0], np.float32)
    noise = np.array([LARGEST, LARGEST, 0], np.float32)
    token, q = session(4, 3).run(["token", "q"], {"logits": logits, "noise": noise, "temperature": temperature})
    assert token.tolist() == [1, 3, 3]
    assert q[0].tolist() == [0, 1, 0, 0]
    assert q[2].tolist() == [0, 0, 0, 1]
    scaled = np.exp(logits[1] / 2 - 2.5)
    np.testing.assert_allclose(q[1], scaled / scaled.sum(), atol=1e-7)


@pytest.mark.parametrize("vocab", [1, 2, 3, 97, 320, 49152, 151936])
def test_blocks_cover_the_vocabulary(vocab: int) -> None:
    size, count = block_split(vocab)
    assert (count - 1) * size < vocab <= size * count


def test_chi_squared_through_the_real_graphs(bundle: Bundle) -> None:
    """1.2e5 draws of the exported loop against its own q; a wrong q is refused by the same test."""
    graph = bundle.graph("markov_loop", 3)
    run = onnxruntime.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    shapes = {spec.name: spec.shape for spec in graph.spec.inputs}
    feed: dict[str, Any] = {
        "anchor": np.array([3, 3, 3]),
        "base_logits": np.tile(random.standard_normal(shapes["base_logits"][2]) * 2, (3, 5, 1)).astype(np.float32),
        "hidden": np.zeros(shapes["hidden"], np.float32),
        "temperature": np.full(3, 0.8, np.float32),
    }
    counts = np.zeros(131)
    for _ in range(40_000):
        tokens, q = run.run(["tokens", "q"], {**feed, "noise": random.random(shapes["noise"], dtype=np.float32)})
        np.add.at(counts, tokens[:, 0], 1)  # the first slot's law does not hang on a draw
    law = q[0, 0].astype(np.float64)
    assert counts.sum() == 120_000
    assert chi_squared(counts, law) < 4
    wrong = law.copy()
    wrong[int(law.argmax())] *= 0.9
    assert chi_squared(counts, wrong / wrong.sum()) > 4


def chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's statistic over cells of at least 20 expected draws, in standard deviations above its mean."""
    expected = law / law.sum() * counts.sum()
    large = expected >= 20
    cells = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 0)
    freedom = len(cells) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_the_host_draws_the_same_way() -> None:
    """Truncated laws are drawn on the host: measure of the intervals, ends of the noise, tokens without mass."""
    law = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [host.draw(law, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]
