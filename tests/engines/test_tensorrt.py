"""The TensorRT runner, over a TensorRT and a CUDA runtime that are neither."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from drafters import canonical_checkpoint, make_config
from fake_gpu import VERSION, FakeCuda, fake_tensorrt, write_fake_plans

from dspark.drafter.errors import IntegrityError, NotAvailableError
from dspark.drafter.model import reference_from_tensors
from dspark.engines import backend as backend_module, tensorrt as tensorrt_module
from dspark.engines.backend import backend_from_name, backend_or_fallback
from dspark.engines.cuda import CudaPython
from dspark.engines.sku import Sku, gpu_without_device
from dspark.engines.store import MismatchError
from dspark.engines.tensorrt import TensorRtBackend
from dspark.export.bundle import Bundle, open_bundle
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle
from dspark.export.parity import check_parity
from dspark.runtime.drafting import Drafting
from dspark.runtime.sampling import Sampling

DEVICE = Sku("nvidia", "NVIDIA RTX 6000", ((8, 9),))


@pytest.fixture
def copied(bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine with one GPU of compute capability 8.9 and TensorRT."""
    cuda = FakeCuda()
    monkeypatch.setattr(tensorrt_module, "import_tensorrt", lambda name: fake_tensorrt(cuda))
    monkeypatch.setattr(tensorrt_module, "open_cuda", lambda: CudaPython(cuda))
    return cuda


def test_parity_holds_on_it(copied: Bundle, fake: FakeCuda) -> None:
    """All graphs over 20 rounds and more, through device memory and captured graphs."""
    write_fake_plans(copied, DEVICE)
    reference = reference_from_tensors(copied.config, copied.load)
    backend = backend_from_name("tensorrt", bundle=copied)
    graphs = [graph for graph in copied.graphs if graph.spec.batch == 1]
    report = check_parity(reference, graphs, reference, backend)
    assert report.passed
    assert report.runner == "tensorrt"
    assert fake.launches > 200


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_those_of_onnx_runtime(copied: Bundle, fake: FakeCuda, temperature: float) -> None:
    write_fake_plans(copied, DEVICE)
    drafts = {}
    for name in ("tensorrt", "onnxruntime"):
        drafting = Drafting(copied, backend_from_name(name, bundle=copied), batch=3)
        random, drafts[name] = np.random.default_rng(0), []
        for number in range(12):  # over the smallest capacity too
            features = random.standard_normal((3, 9, copied.config.feature_size), np.float32)
            drafting.append({slot: features[slot, : 9 - slot] for slot in range(3)})
            noise = random.random((3, copied.config.proposals), np.float32)
            draft = drafting.draft(
                {slot: 7 * number + slot for slot in range(3)}, dict(enumerate(noise)),
                {slot: Sampling(temperature, top_k=5 if number == 4 else 0) for slot in range(3)},
            )  # fmt: skip
            drafts[name].append((draft.tokens.copy(), draft.q.copy(), draft.confidence_logits.copy()))
    for ours, theirs in zip(drafts["tensorrt"], drafts["onnxruntime"], strict=True):
        for found, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_reduced_vocabulary_gives_the_same_greedy_laws(tmp_path: Path, fake: FakeCuda) -> None:
    checkpoint = canonical_checkpoint(tmp_path / "drafter", make_config(draft_vocab_size=70))
    assert checkpoint.config.reduced_vocabulary
    options = ExportOptions(context=(64,), prefill=16)
    bundle, _ = export_bundle(checkpoint, tmp_path / "bundle", options, backend_from_name("onnxruntime", 1))
    write_fake_plans(bundle, DEVICE)
    laws = []
    for name in ("tensorrt", "onnxruntime"):
        drafting = Drafting(bundle, backend_from_name(name, bundle=bundle))
        for seed in range(3):
            features = np.random.default_rng(seed).standard_normal((5, bundle.config.feature_size), np.float32)
            drafting.append({0: features})
            draft = drafting.draft({0: 3}, {0: np.zeros(bundle.config.proposals, np.float32)}, {0: Sampling()})
        laws.append(draft.q.copy())
    np.testing.assert_array_equal(*laws)


def test_a_greedy_round_moves_ids_and_features_up_and_tokens_down(copied: Bundle, fake: FakeCuda) -> None:
    write_fake_plans(copied, DEVICE)
    config, drafting = copied.config, Drafting(copied, backend_from_name("tensorrt", bundle=copied))
    features, noise = np.ones((3, config.feature_size), np.float32), np.zeros(config.proposals, np.float32)
    for _ in range(3):
        fake.bytes.clear()
        drafting.append({0: features})
        drafting.draft({0: 5}, {0: noise}, {0: Sampling()})
    slots, rows = config.proposals, config.proposals + 1
    ids = 8 + 8  # anchor, context length
    assert fake.bytes["up"] == features.nbytes + 8 * rows + ids + 4 * slots + 4  # positions; noise, temperature
    assert fake.bytes["down"] == 8 * slots + 4 * slots  # tokens, confidence logits
    size = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert fake.bytes["on"] == 2 * 3 * size  # three rows of keys and of values into the cache


def test_engines_share_scratch_and_survive_its_growth(copied: Bundle, fake: FakeCuda) -> None:
    write_fake_plans(copied, DEVICE)
    backend = TensorRtBackend("tensorrt", copied)
    graphs = sorted(copied.graphs, key=lambda graph: len(graph.spec.inputs) + len(graph.spec.outputs))
    small, large = backend.engine(graphs[0]), None
    for engine in (small, small, small, large, small):
        engine = engine or backend.engine(graphs[-1])
        engine.bind(
            {spec.name: backend.zeros(spec) for spec in (*engine.graph.spec.inputs, *engine.graph.spec.outputs)}
        )
        engine.run()
        assert engine.scratch is backend.scratch


def test_a_rebound_tensor_is_not_replayed_from_its_old_place(copied: Bundle, fake: FakeCuda) -> None:
    write_fake_plans(copied, DEVICE)
    backend = TensorRtBackend("tensorrt", copied)
    graph = copied.graph("context", 1, copied.sizes("context", 1)[0])
    engine = backend.engine(graph)
    tensors = {spec.name: backend.zeros(spec) for spec in (*graph.spec.inputs, *graph.spec.outputs)}
    engine.bind(tensors)
    for _ in range(3):
        engine.run()
    assert engine.replay is not None
    old = backend.to_host(tensors["v"])
    features = backend.zeros(graph.spec.inputs[0])
    features.assign(np.ones(features.shape, np.float32))
    engine.bind({"features": features})
    engine.run()
    assert not np.array_equal(backend.to_host(tensors["v"]), old)


@pytest.mark.parametrize(
    ("sku", "version", "options", "said"),
    [
        (gpu_without_device([(8, 6)]), VERSION, {}, "built for compute capability 8.6, this device has 8.9"),
        (gpu_without_device([(8, 0), (12, 0)]), VERSION, {}, "compute capability 8.0, 12.0, this device has 8.9"),
        (DEVICE, "11.3.0", {}, f"built with tensorrt 11.3.0, installed is {VERSION}"),
        (DEVICE, "11.5.0", {"version_compatible": True}, f"built with tensorrt 11.5.0, installed is {VERSION}"),
        (DEVICE, "9.3.0", {"version_compatible": True}, f"built with tensorrt 9.3.0, installed is {VERSION}"),
        (Sku("nvidia", "NVIDIA L4", ((8, 9),)), VERSION, {}, "built on NVIDIA L4, this device is NVIDIA RTX 6000"),
        (Sku("nvidia", "H200", ((9, 0),)), VERSION, {"hardware_compatible": "same_compute_capability"}, "has 8.9"),
    ],
)  # fmt: skip
def test_a_plan_for_another_device_or_version_is_refused_with_both_values(
    copied: Bundle, fake: FakeCuda, sku: Sku, version: str, options: dict[str, object], said: str
) -> None:
    write_fake_plans(copied, sku, version=version, **options)
    with pytest.raises(MismatchError) as caught:
        backend_from_name("tensorrt", bundle=copied)
    assert said in caught.value.message
    assert caught.value.exit_code == 6
    notes: list[str] = []
    fallen = backend_or_fallback("tensorrt", "onnxruntime", copied, notes.append)
    assert fallen.name == "onnxruntime"
    assert len(notes) == 1
    assert said in notes[0]


@pytest.mark.parametrize(
    ("sku", "version", "options"),
    [
        (DEVICE, VERSION, {}),
        (gpu_without_device([(8, 0), (8, 9)]), VERSION, {}),
        (DEVICE, "10.9.0", {"version_compatible": True}),
        (Sku("nvidia", "NVIDIA L4", ((8, 9),)), VERSION, {"hardware_compatible": "same_compute_capability"}),
        (Sku("nvidia", "NVIDIA H200", ((9, 0),)), VERSION, {"hardware_compatible": "ampere_plus"}),
    ],
)
def test_a_plan_that_fits_runs(
    copied: Bundle, fake: FakeCuda, sku: Sku, version: str, options: dict[str, object]
) -> None:
    write_fake_plans(copied, sku, version=version, **options)
    assert backend_from_name("tensorrt", bundle=copied).name == "tensorrt"


def test_of_two_that_fit_the_one_of_this_very_device_runs(copied: Bundle, fake: FakeCuda) -> None:
    write_fake_plans(copied, gpu_without_device([(8, 9)]))
    write_fake_plans(copied, DEVICE)
    assert TensorRtBackend("tensorrt", copied).engines.name == "nvidia-rtx-6000-sm89/tensorrt"


def test_damage_is_no_reason_to_fall_back(copied: Bundle, fake: FakeCuda) -> None:
    folder = write_fake_plans(copied, DEVICE)
    plan = folder / "markov_loop-b1.plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    backend = backend_or_fallback("tensorrt", "onnxruntime", copied, lambda note: None)
    with pytest.raises(IntegrityError, match=r"it was changed after the build"):
        Drafting(copied, backend)


def test_without_a_device_damage_is_reported_before_that(copied: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fake_plans(copied, DEVICE)
    monkeypatch.setattr(tensorrt_module, "import_tensorrt", lambda name: fake_tensorrt(FakeCuda()))
    monkeypatch.setattr(tensorrt_module, "open_cuda", lambda: CudaPython(FakeCuda(devices=0)))
    with pytest.raises(NotAvailableError, match=r"no CUDA device"):
        backend_from_name("tensorrt", bundle=copied)
    plan = folder / "block-b1-c64.plan"
    plan.write_bytes(b"?" + plan.read_bytes()[1:])
    with pytest.raises(IntegrityError):
        backend_or_fallback("tensorrt", "onnxruntime", copied, lambda note: None)


def test_a_plan_of_another_graph_never_reaches_tensorrt(copied: Bundle, fake: FakeCuda) -> None:
    folder = write_fake_plans(copied, DEVICE)
    manifest = copied.manifest["files"]["graphs/markov_loop-b1.onnx"]
    manifest["sha256"] = "0" * 64
    with pytest.raises(
        MismatchError, match=r"was built of graphs/markov_loop-b1.onnx with sha256 .* the bundle's is 000"
    ):
        Drafting(copied, backend_from_name("tensorrt", bundle=copied))
    assert folder.is_dir()


def test_a_plan_that_tensorrt_does_not_load_says_why(
    copied: Bundle, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_plans(copied, DEVICE)
    backend = TensorRtBackend("tensorrt", copied)
    monkeypatch.setattr(type(backend.engines), "read", lambda self, bundle, graph: b"garbage")
    with pytest.raises(NotAvailableError, match=r"cannot load graphs/context-b1-n6.onnx: the magic tag does not match"):
        backend.engine(copied.graphs[0])


def test_without_engines_it_says_how_to_build_them(copied: Bundle) -> None:
    with pytest.raises(NotAvailableError, match=r"holds no engines for tensorrt; run dspark-export build"):
        backend_from_name("tensorrt", bundle=copied)
    assert set(backend_module.BACKENDS) >= {"tensorrt", "tensorrt-rtx"}
