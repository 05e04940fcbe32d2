"""Timing of engines, the command that prints it, and the check for a machine with a GPU, over fakes and on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner
from fake_gpu import FakeCuda, fake_tensorrt, write_fake_plans

from dspark.engines import tensorrt as tensorrt_module
from dspark.engines.backend import backend_from_name
from dspark.engines.cuda import CudaPython
from dspark.engines.sku import Sku
from dspark.engines.timing import Timing, draft_shares, time_engines, weight_bytes_read
from dspark.export.bundle import Bundle, open_bundle
from dspark.export.graphs import markov_variant

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def copied(bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


@pytest.fixture
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_other_way_of_writing_the_loop_computes_the_same(bundle: Bundle) -> None:
    backend = backend_from_name("onnxruntime", 1)
    graph = bundle.graph("markov_loop", 3)
    random = np.random.default_rng(0)
    inputs = {
        spec.name: random.random(spec.shape, np.float32) if spec.dtype == "float32" else np.arange(3)
        for spec in graph.spec.inputs
    }
    unrolled = markov_variant(bundle, graph, "unrolled")
    assert unrolled.model is not None
    assert b"Loop" not in unrolled.model
    assert markov_variant(bundle, graph, "loop").model != unrolled.model
    wanted, found = backend.evaluate(graph, inputs), backend.evaluate(unrolled, inputs)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_weights_are_counted_as_a_run_reads_them(bundle: Bundle) -> None:
    config, sizes = bundle.config, {}
    for graph in bundle.graphs:
        if graph.spec.batch == 1:
            sizes[graph.spec.name] = weight_bytes_read(graph)
    rank, hidden = config.markov_rank, config.hidden_size
    w2, confidence = 4 * config.vocab_size * rank, 4 * (hidden + rank + 1)
    assert sizes["markov_step"] == sizes["markov_loop"] == w2 + confidence  # W1 is gathered from
    stored = {data["name"]: 4 * int(np.prod(data["shape"])) for data in bundle.manifest["weights"]}
    outside = ("fc.", "hidden_norm", "embed_tokens", "markov_head", "confidence_head")
    tied = stored["embed_tokens.weight"] if "lm_head.weight" not in stored else 0
    assert sizes["block"] == tied + sum(size for name, size in stored.items() if not name.startswith(outside))


def test_every_engine_is_timed_and_the_loop_both_ways(bundle: Bundle) -> None:
    rate, timings = time_engines(bundle, backend_from_name("onnxruntime", 1), seconds=0.01)
    assert rate > 1e8
    assert len(timings) == len(bundle.graphs) + len(bundle.batches)
    for timing in timings:
        assert 0 < timing.low <= timing.seconds <= timing.high
        assert timing.floor_seconds == timing.weight_bytes / rate
    shares = draft_shares(bundle.config, timings)
    assert [(one["batch"], one["markov"]) for one in shares] == [
        (1, "loop"), (1, "unrolled"), (3, "loop"), (3, "unrolled")
    ]  # fmt: skip
    for one in shares:
        total = one["context_seconds"] + one["block_seconds"] + one["markov_seconds"]
        assert one["seconds"] == pytest.approx(total)
        assert one["markov_share"] == pytest.approx(one["markov_seconds"] / total)


def test_a_draft_takes_the_rows_of_a_round_and_the_smallest_block(bundle: Bundle) -> None:
    timing = Timing("", "", 1, None, 0, 0, 0, 1, 0, 0)
    timings = [
        dataclasses.replace(timing, name=name, seconds=seconds, markov=markov)
        for name, seconds, markov in (
            ("context", 1.0, None), ("context", 50.0, None), ("block", 6.0, None), ("block", 70.0, None),
            ("markov_step", 9.0, None), ("markov_loop", 3.0, "loop"),
        )
    ]  # fmt: skip
    (share,) = draft_shares(bundle.config, timings)
    assert (share["seconds"], share["markov_share"]) == (10.0, 0.3)


def test_gpu_check_without_a_gpu_says_so_row_by_row(
    copied: Bundle, gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    output = tmp_path / "result.json"
    ran = CliRunner().invoke(gpu_check.main, [str(copied.path), "-o", str(output)], catch_exceptions=False)
    assert ran.exit_code == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["onnxruntime-cuda", "tensorrt", "tensorrt-rtx", "torch"]
    assert all(row["status"].startswith("not run: ") for row in rows)
    assert not (copied.path / "engines").exists()


def test_gpu_check_on_a_gpu(
    copied: Bundle, gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fakes: TensorRT is built, proven and timed; the time limit and a failure cost their own rows only."""
    cuda = FakeCuda()
    device = Sku("nvidia", "NVIDIA RTX 6000", ((8, 9),))
    monkeypatch.setattr(tensorrt_module, "import_tensorrt", lambda name: fake_tensorrt(cuda))
    monkeypatch.setattr(tensorrt_module, "open_cuda", lambda: CudaPython(cuda))
    monkeypatch.setattr(gpu_check, "skus_to_build", lambda options, named, portable: [device])

    def built(bundle: Bundle, options: object, skus: object) -> list[object]:
        from dspark.engines.build import Built
        from dspark.engines.store import open_engine_set

        return [Built(open_engine_set(write_fake_plans(bundle, device)), True)]

    def variant(graph: object, library: object, sku: object) -> bytes:
        raise ValueError("boom")

    monkeypatch.setattr(gpu_check, "build_engines", built)
    monkeypatch.setattr(gpu_check, "BACKENDS", ("tensorrt",))
    monkeypatch.setattr("dspark.engines.timing._BANDWIDTH_BYTES", 1 << 16)
    one = dataclasses.replace(copied, graphs=tuple(g for g in copied.graphs if g.spec.batch == 1))
    monkeypatch.setattr(gpu_check, "open_bundle", lambda path: dataclasses.replace(one, path=path))
    monkeypatch.setattr("dspark.engines.timing._with_variants", lambda bundle: ((g, None) for g in bundle.graphs))
    output = tmp_path / "result.json"
    arguments = [str(copied.path), "-o", str(output), "--seconds", "0.01"]
    ran = CliRunner().invoke(gpu_check.main, arguments, catch_exceptions=False)
    assert ran.exit_code == 0
    tensorrt, _ = json.loads(output.read_text())["rows"]
    assert tensorrt["status"] == "ran", tensorrt
    assert tensorrt["parity"]["passed"]
    assert tensorrt["sku"]["device"] == "NVIDIA RTX 6000"
    assert {timing["graph"] for timing in tensorrt["timings"]} == {graph.path.stem for graph in one.graphs}
    monkeypatch.setattr(gpu_check, "latencies", variant)
    CliRunner().invoke(gpu_check.main, arguments, catch_exceptions=False)
    tensorrt, _ = json.loads(output.read_text())["rows"]
    assert tensorrt["status"] == "failed: ValueError: boom"
    CliRunner().invoke(gpu_check.main, [*arguments, "--limit", "-1"], catch_exceptions=False)
    assert {row["status"] for row in json.loads(output.read_text())["rows"]} == {"not run: the time was up"}


def test_the_peer_computes_what_the_reference_does(bundle: Bundle, gpu_check: ModuleType) -> None:
    timings = gpu_check.torch_timings(bundle, "cpu", 0.01)
    assert [(row["name"], row["batch"]) for row in timings] == [
        ("block", 1), ("markov_loop", 1), ("block", 3), ("markov_loop", 3)
    ]  # fmt: skip
    assert all(row["seconds"] > 0 for row in timings)
