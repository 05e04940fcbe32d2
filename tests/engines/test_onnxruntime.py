"""The ONNX Runtime backend: tensors are bound once, nothing is copied, what is missing is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.errors import DsparkError, NotAvailableError, UsageError
from dspark.engines.backend import backend_from_name
from dspark.engines.onnxruntime import OnnxRuntimeBackend
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle
from dspark.runtime.drafting import Drafting


def test_runs_on_the_bound_memory_itself(bundle: Bundle) -> None:
    """What is written into a bound input before a run is what the run reads; outputs appear in the bound output."""
    backend = backend_from_name("onnxruntime", 1)
    graph = bundle.graph("markov_step", 1)
    tensors = {spec.name: backend.zeros(spec) for spec in (*graph.spec.inputs, *graph.spec.outputs)}
    engine = backend.engine(graph)
    engine.bind(tensors)
    for token in (40, 90):
        tensors["base_logits"][:] = 0
        tensors["base_logits"][0, token] = 100
        engine.run()
        assert tensors["token"].tolist() == [token]


def test_a_round_leaves_the_context_cache_where_it_is(bundle: Bundle) -> None:
    """No copy of the cache per round: the engine reads the very array that rows are written into."""
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1))
    cache = drafting._tensors["k_cache"]
    address = cache.ctypes.data
    for _ in range(3):
        drafting.append({0: np.ones((4, 64), np.float32)})
        drafting.draft({0: 3}, {0: np.zeros(5, np.float32)}, {0: _greedy()})
    assert drafting._tensors["k_cache"] is cache
    bound = drafting._engines["block", 64].bound  # type: ignore[attr-defined]
    assert bound["k_cache"].ctypes.data == address
    assert np.abs(cache[:, :, :, :12]).min(axis=-1).max() > 0
    assert not cache[:, :, :, 12:].any()


def _greedy() -> Any:
    from dspark.runtime.sampling import Sampling

    return Sampling()


def test_a_tensor_of_another_shape_is_refused(bundle: Bundle) -> None:
    backend = backend_from_name("onnxruntime", 1)
    engine = backend.engine(bundle.graph("markov_step", 1))
    with pytest.raises(DsparkError, match=r"hidden: bound tensor is \(1, 3\), the graph takes \(1, 32\)"):
        engine.bind({"hidden": np.zeros((1, 3), np.float32)})


def test_bf16_on_the_cpu_is_refused_with_a_way_out(checkpoint_folder: Path, tmp_path: Path) -> None:
    backend = backend_from_name("onnxruntime", 1)
    options = ExportOptions(dtype="bfloat16", context=(64,))
    exported, report = export_bundle(open_checkpoint(checkpoint_folder), tmp_path / "bundle", options, backend)
    assert report.shadow
    with pytest.raises(NotAvailableError, match=r"no bf16 kernels on the CPU.*--dtype fp32"):
        Drafting(exported, backend)


def test_fp16_runs_on_the_cpu(checkpoint_folder: Path, tmp_path: Path) -> None:
    backend = backend_from_name("onnxruntime", 1)
    options = ExportOptions(dtype="float16", context=(64,))
    exported, _ = export_bundle(open_checkpoint(checkpoint_folder), tmp_path / "bundle", options, backend)
    drafting = Drafting(exported, backend)
    drafting.append({0: np.ones((9, 64), np.float32)})
    draft = drafting.draft({0: 3}, {0: np.zeros(5, np.float32)}, {0: _greedy()})
    assert draft.q.dtype == np.float32
    assert (draft.q.sum(axis=-1) == 1).all()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'tpu' is none of"):
        backend_from_name("tpu")
    if "CUDAExecutionProvider" not in OnnxRuntimeBackend().runtime.get_available_providers():
        with pytest.raises(NotAvailableError, match="onnxruntime-gpu"):
            backend_from_name("onnxruntime-cuda")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(NotAvailableError, match=r"pip install 'dspark-export\[onnxruntime\]'"):
        backend_from_name("onnxruntime")
