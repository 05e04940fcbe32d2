"""Engines built with the real TensorRT-RTX, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import CASES

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.errors import CheckFailedError, DsparkError, IntegrityError, NotAvailableError, UsageError
from dspark.drafter.target import open_target
from dspark.engines import build as build_module
from dspark.engines.backend import backend_from_name
from dspark.engines.build import (
    BuildOptions,
    build_engines,
    parse_graphs,
    preflights,
    require_preflight,
    skus_to_build,
)
from dspark.engines.sku import gpu_without_device
from dspark.engines.store import engine_sets
from dspark.export.bundle import Bundle, open_bundle
from dspark.export.contract import DTYPES, Dtype, ExportOptions
from dspark.export.exporter import export_bundle
from dspark.runtime.targets import target_folder

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (12, 0)]
PORTABLE = [gpu_without_device(CAPABILITIES)]
ADA = [gpu_without_device([(8, 9)])]
RTX = BuildOptions("tensorrt-rtx")


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


@pytest.fixture
def small(bundle: Bundle, tmp_path: Path) -> Bundle:
    """Three graphs of batch 1, in a folder of their own."""
    shutil.copytree(bundle.path, tmp_path / "bundle")
    copied = open_bundle(tmp_path / "bundle")
    names = ("context", "markov_step", "markov_loop")
    graphs = [graph for graph in copied.graphs if graph.spec.batch == 1 and graph.spec.name in names]
    return dataclasses.replace(copied, graphs=tuple(graphs[-3:]))


def exported(folder: Path, output: Path, target: Any = None, **options: Any) -> Bundle:
    checkpoint = open_checkpoint(folder, target)
    return export_bundle(checkpoint, output, ExportOptions(**options), backend_from_name("onnxruntime", 1))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_golden_drafters_build_for_every_gpu(shared: Path, tmp_path: Path, case: str, dtype: Dtype) -> None:
    """All four graphs as plans for 8.0, 8.6, 8.9 and 12.0; and the loop unrolled, which is fp32 whatever the dtype."""
    folder, common = shared / "golden" / "deepspec" / case, {"dtype": dtype, "context": (64,), "prefill": 16}
    looped = exported(folder, tmp_path / "loop", **common)
    require_preflight(preflights(looped, "tensorrt-rtx", PORTABLE))
    (built,) = build_engines(looped, RTX, PORTABLE)
    assert built.engines.sku.slug == "sm80-sm86-sm89-sm120"
    assert [entry["graph"] for entry in built.engines.engines] == [graph.spec.file for graph in looped.graphs]
    assert all(entry["bytes"] > 10_000 for entry in built.engines.engines)
    if dtype == "float32":
        unrolled = exported(folder, tmp_path / "unrolled", markov="unrolled", **common)
        loop = tuple(graph for graph in unrolled.graphs if graph.spec.name == "markov_loop")
        unrolled = dataclasses.replace(unrolled, graphs=loop)
        require_preflight(preflights(unrolled, "tensorrt-rtx", PORTABLE))
        (built,) = build_engines(unrolled, RTX, PORTABLE)
        built.engines.check(unrolled)


@pytest.mark.demo
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_demo_drafter_builds_for_every_gpu(tmp_path: Path, dtype: Dtype) -> None:
    folder, target = Path("examples/smollm2-dspark-2l"), open_target(target_folder("smollm2"))
    markov = "unrolled" if dtype == "float32" else "loop"
    bundle = exported(folder, tmp_path / markov, target, dtype=dtype, context=(512,), prefill=64, markov=markov)
    one_each = [gpu_without_device([capability]) for capability in CAPABILITIES]
    sets = build_engines(bundle, RTX, one_each if dtype == "float16" else PORTABLE)
    assert len(sets) == (4 if dtype == "float16" else 1)
    for built in sets:
        built.engines.check(bundle)
        assert built.engines.size > 70e6


def test_two_builds_give_the_same_bytes(small: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another place, with another environment: TensorRT-RTX follows addresses, which are held fixed."""
    (first,) = build_engines(small, RTX, ADA)
    if first.engines.engines[0]["addresses_randomised"]:
        pytest.skip("this system does not let a process fix its addresses")
    elsewhere = tmp_path / "a folder of quite another length"
    shutil.copytree(small.path, elsewhere)
    shutil.rmtree(elsewhere / "engines")
    monkeypatch.setenv("SOME_VARIABLE", "x" * 4000)
    other = dataclasses.replace(open_bundle(elsewhere), graphs=small.graphs)
    (second,) = build_engines(other, RTX, ADA)
    hashes = [[entry["sha256"] for entry in built.engines.engines] for built in (first, second)]
    assert hashes[0] == hashes[1]


def test_what_is_built_is_not_built_again(small: Bundle) -> None:
    stages: list[str] = []
    (first,) = build_engines(
        small, RTX, ADA, progress=lambda stage, done, total: stages.append(f"{stage} {done}/{total}")
    )
    assert first.built
    assert len(stages) > 50  # TensorRT's own progress
    assert stages[-1].startswith("sm89 markov_loop-b1")
    folder = first.engines.path
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert set(before) == {*(f"{graph.path.stem}.plan" for graph in small.graphs), "engine.json", "build.log"}
    (again,) = build_engines(small, RTX, ADA)
    assert not again.built
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    with pytest.raises(UsageError, match=r"was built with tf32 False, here True; add --force"):
        build_engines(small, dataclasses.replace(RTX, tf32=True), ADA)
    (forced,) = build_engines(small, dataclasses.replace(RTX, tf32=True), ADA, force=True)
    assert forced.built
    assert forced.engines.options["tf32"]


def test_a_damaged_set_is_not_taken_for_built(small: Bundle) -> None:
    (first,) = build_engines(small, RTX, ADA)
    plan = first.engines.path / first.engines.engines[0]["file"]
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError):
        build_engines(small, RTX, ADA)
    (mended,) = build_engines(small, RTX, ADA, force=True)
    mended.engines.check(small)


def test_the_record_states_shapes_types_flags_versions_and_sources(small: Bundle) -> None:
    (built,) = build_engines(small, RTX, ADA)
    data = json.loads((built.engines.path / "engine.json").read_text())
    assert data["sku"]["compute_capabilities"] == ["8.9"]
    assert data["versions"].keys() == {"dspark-export", "tensorrt_rtx", "polygraphy"}
    assert data["options"]["strip"] is False
    for entry, graph in zip(data["engines"], small.graphs, strict=True):
        spec = graph.spec.to_json()
        assert {key: entry[key] for key in spec} == spec
        assert entry["source_sha256"] == small.manifest["files"][graph.spec.file]["sha256"]
        assert entry["seconds"] > 0
        assert entry["layers"] > 10


def test_several_gpus_in_one_call_get_a_folder_each(small: Bundle) -> None:
    loop = dataclasses.replace(small, graphs=small.graphs[-1:])
    skus = skus_to_build(RTX, [(12, 0), (8, 0), (8, 0)], portable=False)
    assert [built.engines.name for built in build_engines(loop, RTX, skus)] == [
        "sm80/tensorrt-rtx",
        "sm120/tensorrt-rtx",
    ]
    assert len(engine_sets(small)) == 2


def test_the_real_parser_reads_every_graph(small: Bundle) -> None:
    layers = parse_graphs(small, "tensorrt-rtx")
    assert layers.keys() == {graph.spec.file for graph in small.graphs}
    assert min(layers.values()) > 10
    assert not (small.path / "engines").exists()


def test_what_the_builder_says_is_in_the_error(small: Bundle) -> None:
    """Compute capability 7.5 has no fp32 products; the preflight knows, and the builder's own words come through."""
    turing = [gpu_without_device([(7, 5)])]
    with pytest.raises(CheckFailedError, match=r"tensorrt-rtx would not build this bundle: .*7\.5"):
        require_preflight(preflights(small, "tensorrt-rtx", turing))
    with pytest.raises(CheckFailedError, match=r"context-b1-n16.onnx: tensorrt-rtx does not build it: .*FP32 GEMM"):
        build_engines(dataclasses.replace(small, graphs=_context(small)), RTX, turing)
    assert not (small.path / "engines").exists()


def _context(bundle: Bundle) -> tuple[Any, ...]:
    return tuple(graph for graph in bundle.graphs if graph.spec.name == "context")


def test_a_builder_that_dies_leaves_nothing_and_says_how(small: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(_dying(small.path.parent)))
    with pytest.raises(CheckFailedError, match=r"the builder ended with signal 11"):
        build_engines(small, RTX, ADA)
    assert not (small.path / "engines").exists()


def _dying(folder: Path) -> Path:
    script = folder / "dying"
    script.write_text("#!/bin/sh\ncat > /dev/null\nkill -SEGV $$\n")
    script.chmod(0o755)
    return script


BUILD = [sys.executable, "-m", "dspark.cli.main", "build", "--backend", "tensorrt-rtx", "--compute-capability", "8.9"]


def test_killed_twice_in_a_row_the_next_build_succeeds(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    engines = tmp_path / "bundle" / "engines"
    for _ in range(2):
        process = subprocess.Popen([*BUILD, str(tmp_path / "bundle")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _wait_for(lambda: list(engines.glob("sm89/.*/*.plan")))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert engine_sets(open_bundle(tmp_path / "bundle")) == []
        assert not (engines / "sm89" / "tensorrt-rtx").exists()
        _wait_for(lambda: not _workers())  # the builder goes with its parent
    done = subprocess.run([*BUILD, str(tmp_path / "bundle"), "--json"], capture_output=True, text=True, check=True)
    assert [one["built"] for one in json.loads(done.stdout)["sets"]] == [True]
    (folder,) = (engines / "sm89").iterdir()
    assert folder.name == "tensorrt-rtx"


def test_two_processes_build_the_same_engines_once(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    both = [
        subprocess.Popen(
            [*BUILD, str(tmp_path / "bundle"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(json.loads(stdout)["sets"][0]["built"] for stdout, _ in said) == [False, True]
    assert sum("another process builds for sm89; waiting" in stderr for _, stderr in said) == 1


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _workers() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"dspark.engines.build_worker" in words:
            found.append(folder.name)
    return found


def test_onnxruntime_engines_compute_the_same_and_are_what_runs(small: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_from_name("onnxruntime", 1)
    graph = _context(small)[0]
    random = np.random.default_rng(0)
    inputs = {
        "features": random.standard_normal(graph.spec.inputs[0].shape, np.float32),
        "positions": np.arange(graph.spec.size)[None],
    }
    wanted = backend.evaluate(graph, inputs)
    options = BuildOptions("onnxruntime")
    (built,) = build_engines(small, options, skus_to_build(options, [], False))
    assert built.engines.path.parent.name.startswith("cpu-")
    assert {entry["file"].rpartition(".")[2] for entry in built.engines.engines} == {"ort"}
    found = backend_from_name("onnxruntime", 1, small).evaluate(graph, inputs)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    plan = built.engines.path / f"{graph.path.stem}.ort"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError):
        backend_from_name("onnxruntime", 1, small).evaluate(graph, inputs)


@pytest.mark.parametrize(
    ("values", "code", "said"),
    [
        ({"optimization_level": 6}, 2, "optimization level 6 is outside 0..5"),
        ({"workspace_bytes": 0}, 2, "workspace 0 must be at least 1 byte"),
        ({"version_compatible": True}, 2, "TensorRT-RTX has no lean runtime"),
        ({"hardware_compatible": "ampere_plus"}, 2, "name several instead"),
        ({"backend": "onnxruntime", "strip": True}, 2, "strip: options of TensorRT"),
    ],
)
def test_options_that_do_not_go_together_without_tensorrt(values: dict[str, Any], code: int, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        BuildOptions(**{"backend": "tensorrt-rtx", **values})
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("backend", "capabilities", "portable", "code", "said"),
    [
        ("onnxruntime", [(8, 9)], False, 2, "are of GPUs"),
        ("tensorrt-rtx", [(8, 9)], True, 2, "name two or more"),
        ("tensorrt-rtx", [], False, 5, "name the GPUs to build for with --compute-capability"),
        ("tensorrt", [(8, 9), (9, 0)], True, 2, "tensorrt has --hardware-compatible"),
        ("tensorrt", [], False, 5, "without one, build with --backend tensorrt-rtx"),
    ],
)
def test_gpus_that_cannot_be_built_for_here_without_tensorrt(
    monkeypatch: pytest.MonkeyPatch, backend: Any, capabilities: Any, portable: bool, code: int, said: str
) -> None:
    monkeypatch.setattr(build_module, "_library_version", lambda name: "1.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(DsparkError, match=said) as caught:
        skus_to_build(BuildOptions(backend), capabilities, portable)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_without_the_extra_the_line_to_install_it(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle, backend: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    for call in (
        lambda: skus_to_build(BuildOptions(backend), [(8, 9)], False),
        lambda: build_engines(bundle, BuildOptions(backend), ADA),
        lambda: parse_graphs(bundle, backend),
    ):
        with pytest.raises(NotAvailableError, match=rf"pip install 'dspark-export\[{backend}\]'") as caught:
            call()
        assert caught.value.exit_code == 5
    assert not (bundle.path / "engines").exists()


def test_stripped_rtx_plans_need_a_driver(small: Bundle) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a driver")
    with pytest.raises(NotAvailableError, match=r"build without --strip"):
        build_engines(small, dataclasses.replace(RTX, strip=True), ADA)
    assert not (small.path / "engines").exists()
