"""A draft round (context + block + Markov loop): ONNX Runtime against eager PyTorch, and against the bandwidth floor.

    python benchmarks/draft_round.py BUNDLE

Same process, same threads, groups of rounds in turn; medians, and the median over pairs of groups of the ratio of their
medians. With ``--group 1`` each engine round directly follows an eager one and competes with PyTorch's threads, which
spin on for some milliseconds after their work. The eager side is the reference model on a cache of exactly the
context's length; the engine's cache has the bundle's capacity. Floor: bytes of weights
that a round must read ÷ measured read bandwidth, with the Markov table W2 read once per slot, and once per round (where
it stays in the processor's cache).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch

from dspark.drafter.model import reference_from_tensors
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import Bundle, open_bundle
from dspark.export.weights import WeightRegion
from dspark.runtime.drafting import Drafting
from dspark.runtime.sampling import Sampling


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--context", type=int, default=200, show_default=True, help="Context length at the first round.")
@click.option("--rows", type=int, default=3, show_default=True, help="Feature rows appended per round.")
@click.option("--pairs", type=int, default=15, show_default=True)
@click.option("--group", type=int, default=8, show_default=True, help="Rounds of one side before the other's turn.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
def main(bundle: Path, context: int, rows: int, pairs: int, group: int, threads: int, temperature: float) -> None:
    opened = open_bundle(bundle)
    torch.set_num_threads(threads)
    engine = engine_round(opened, context, rows, threads, temperature)
    eager = eager_round(opened, context, rows, temperature)
    groups = [(median(engine, group), median(eager, group)) for _ in range(pairs + 1)][1:]
    gb_per_second = bandwidth()
    per_slot, once = (1e3 * weight_bytes(opened, times) / gb_per_second / 1e9 for times in (opened.config.proposals, 1))
    engine_ms, eager_ms = (1e3 * statistics.median(side) for side in zip(*groups, strict=True))
    figures = {
        "engine_ms": engine_ms,
        "eager_ms": eager_ms,
        "ratio": statistics.median(a / b for a, b in groups),
        "bandwidth_gb_per_second": gb_per_second,
        "floor_ms_w2_per_slot": per_slot,
        "ratio_to_floor_w2_per_slot": engine_ms / per_slot,
        "floor_ms_w2_once": once,
        "ratio_to_floor_w2_once": engine_ms / once,
    }
    click.echo(json.dumps(figures, indent=1))


def engine_round(bundle: Bundle, context: int, rows: int, threads: int, temperature: float) -> Callable[[], None]:
    drafting = Drafting(bundle, backend_from_name("onnxruntime", threads))
    random, config = np.random.default_rng(0), bundle.config
    features = random.standard_normal((context, config.feature_size)).astype(np.float32)
    drafting.append({0: features})
    noise, sampling = random.random(config.proposals, dtype=np.float32), Sampling(temperature)

    def run() -> None:
        drafting.length[0] = context  # the same round again
        drafting.append({0: features[:rows]})
        drafting.draft({0: 17}, {0: noise}, {0: sampling})

    return run


def eager_round(bundle: Bundle, context: int, rows: int, temperature: float) -> Callable[[], None]:
    model, config = reference_from_tensors(bundle.config, bundle.load), bundle.config
    features = torch.randn(1, context + rows, config.feature_size)
    heat = torch.tensor([temperature])
    with torch.inference_mode():
        k, v = model.context(features, torch.arange(context + rows)[None])
    noise = torch.rand(1, config.proposals)

    def run() -> None:
        with torch.inference_mode():
            new_k, new_v = model.context(features[:, :rows], torch.arange(context, context + rows)[None])
            k[..., context:, :], v[..., context:, :] = new_k, new_v
            base, hidden = model.block(torch.tensor([17]), torch.tensor([context + rows]), k, v)
            model.markov_loop(torch.tensor([17]), base, hidden, noise, heat)

    return run


def median(function: Callable[[], None], group: int) -> float:
    return statistics.median(timed(function) for _ in range(group))


def timed(function: Callable[[], None]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def bandwidth() -> float:
    """GB/s of reading 0.8 GB once, the best of several."""
    data = torch.ones(200_000_000)
    return max(0.8 / timed(data.sum) for _ in range(7))


def weight_bytes(bundle: Bundle, markov_slots: int) -> int:
    """Bytes that a round reads: every matrix once, keys and values twice (context and block), W2 per slot."""
    total = 0
    for weight in bundle.manifest["weights"]:
        name, count = weight["name"], WeightRegion.from_json(weight).bytes
        if name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
            continue  # a few rows
        times = markov_slots if name.endswith("markov_w2.weight") else 2 if "k_proj" in name or "v_proj" in name else 1
        total += times * count
    return total


if __name__ == "__main__":
    main()
