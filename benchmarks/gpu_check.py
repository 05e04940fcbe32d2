"""Everything that needs a GPU, in one run of some minutes, as JSON.

    python benchmarks/gpu_check.py BUNDLE [BUNDLE …] -o RESULT.json

For each bundle and each backend (ONNX Runtime CUDA, TensorRT, TensorRT-RTX): engines are built where they are not
there, parity is run, and every engine is timed against its floor: the Markov loop both ways, and its share of a draft
round at every batch that the bundle was exported with (export with --batch 1,16,128). The peer is the reference in
PyTorch under CUDA graphs. A row that cannot run says why, and the others go on. Nothing is fetched; bundles are copied
first, so that they stay as they are.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from dspark.drafter.errors import DsparkError
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors
from dspark.engines.backend import Backend, backend_from_name
from dspark.engines.build import BuildOptions, build_engines, skus_to_build
from dspark.engines.timing import draft_shares, time_engines
from dspark.export.bundle import Bundle, open_bundle
from dspark.export.exporter import rounding_reference
from dspark.export.parity import check_parity
from dspark.export.version import library_versions, tool_version

BACKENDS = ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx")


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Of timing per engine.")
@click.option("--limit", type=float, default=280.0, show_default=True, help="Seconds after which no row is begun.")
def main(bundles: tuple[Path, ...], output: Path, seconds: float, limit: float) -> None:
    until = time.monotonic() + limit
    rows: list[dict[str, Any]] = []
    for path in bundles:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "bundle"
            shutil.copytree(path, copy)
            bundle = open_bundle(copy)
            what = {"bundle": path.name, "dtype": bundle.dtype, "batch": list(bundle.batches)}
            for name in BACKENDS:
                rows.append(what | {"backend": name} | row(partial(on_backend, bundle, name, seconds), until))
            rows.append(what | {"backend": "torch"} | row(partial(on_torch, bundle, seconds), until))
            output.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")
    click.echo("\n".join(f"{r['bundle']} {r['backend']}: {r['status']}" for r in rows))


def environment() -> dict[str, Any]:
    versions = {"dspark-export": tool_version(), "torch": torch.__version__, **library_versions()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"device": device, "versions": versions}


def row(work: Callable[[], dict[str, Any]], until: float) -> dict[str, Any]:
    """What ``work`` found, or why it did not run."""
    if time.monotonic() > until:
        return {"status": "not run: the time was up"}
    begun = time.monotonic()
    try:
        found = {"status": "ran", **work()}
    except DsparkError as error:
        found = {"status": f"not run: {error.message}"}
    except Exception as error:  # one row's failure is a result, and must not cost the others
        found = {"status": f"failed: {type(error).__name__}: {error}"}
    return found | {"wall_seconds": round(time.monotonic() - begun, 1)}


def on_backend(bundle: Bundle, name: str, seconds: float) -> dict[str, Any]:
    """Build, parity, latencies and shares on one backend."""
    found: dict[str, Any] = {}
    if name.startswith("tensorrt"):
        options = BuildOptions(name)  # type: ignore[arg-type]
        (built,) = build_engines(bundle, options, skus_to_build(options, (), portable=False))
        found["engines"] = built.engines.to_json()
    backend = backend_from_name(name, bundle=bundle)
    return {**found, **parity(bundle, backend), **latencies(bundle, backend, seconds)}


def parity(bundle: Bundle, backend: Backend) -> dict[str, Any]:
    """Of the smallest batch: every graph goes through it, and the others are the same nodes."""
    reference = reference_from_tensors(bundle.config, bundle.load)
    rounding = rounding_reference(reference, bundle.dtype, bundle.load)
    graphs = [graph for graph in bundle.graphs if graph.spec.batch == bundle.batches[0]]
    return {"parity": check_parity(reference, graphs, rounding, backend).to_json()}


def latencies(bundle: Bundle, backend: Backend, seconds: float) -> dict[str, Any]:
    rate, timings = time_engines(bundle, backend, seconds)
    return {
        "sku": backend.sku().to_json(),
        "bandwidth_bytes_per_second": rate,
        "timings": [timing.to_json() for timing in timings],
        "draft_rounds": draft_shares(bundle.config, timings),
    }


def on_torch(bundle: Bundle, seconds: float) -> dict[str, Any]:
    """The reference model under CUDA graphs, in fp32: block and a greedy Markov loop, per batch."""
    if not torch.cuda.is_available():
        return {"status": "not run: torch finds no CUDA device"}
    return {"timings": torch_timings(bundle, "cuda", seconds)}


def torch_timings(bundle: Bundle, device: str, seconds: float) -> list[dict[str, Any]]:
    """Medians per batch; on the CPU without graphs, which a test does."""
    found = []
    with torch.inference_mode(), torch.device(device):
        model = reference_from_tensors(bundle.config, lambda name, rows: bundle.load(name, rows).to(device))
        model.inverse_frequencies = model.inverse_frequencies.to(device)
        for batch in bundle.batches:
            capacity = bundle.sizes("block", batch)[0]
            for name, work in torch_work(model, batch, capacity).items():
                taken = timed(captured(work) if device == "cuda" else work, device, seconds)
                found.append({"name": name, "batch": batch, "seconds": statistics.median(taken), "runs": len(taken)})
    return found


def torch_work(model: ReferenceDrafter, batch: int, capacity: int) -> dict[str, Callable[[], Any]]:
    config = model.config
    cache = torch.zeros(config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
    anchor = torch.ones(batch, dtype=torch.int64)
    length = torch.full((batch,), capacity - config.proposals)
    base = torch.randn(batch, config.proposals, config.proposal_vocab_size)
    hidden = torch.randn(batch, config.proposals, config.hidden_size)

    def markov_loop() -> Tensor:
        previous, state = anchor, torch.zeros(batch, config.markov_rank)
        for slot in range(config.proposals):
            bias, state = model.markov_bias(previous, hidden[:, slot], state)
            logits = base[:, slot] if bias is None else base[:, slot] + bias
            model.confidence_logit(previous, hidden[:, slot])
            previous = logits.argmax(dim=-1)
        return previous

    return {"block": lambda: model.block(anchor, length, cache, cache), "markov_loop": markov_loop}


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of ``work``, after three runs on a side stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def timed(work: Callable[[], Any], device: str, seconds: float) -> list[float]:
    taken, until = [], time.perf_counter() + seconds
    for _ in range(3):
        work()
    while len(taken) < 5 or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return taken


if __name__ == "__main__":
    main()
