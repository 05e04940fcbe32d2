"""``build``: what it says and writes; the real command in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.export.bundle import Bundle

COMMAND = [sys.executable, "-m", "dspark.cli.main", "build"]
# As on a machine where neither is installed
WITHOUT = [
    sys.executable,
    "-c",
    "import sys; sys.modules.update(tensorrt=None, tensorrt_rtx=None); from dspark.cli.main import main; main()",
    "build",
]
installed = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX not installed")


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.path, tmp_path / "bundle"))


def run(*arguments: str | Path, code: int = 0, command: list[str] = COMMAND) -> tuple[str, str]:
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_dry_run_needs_no_tensorrt_and_writes_nothing(copy: Path, backend: str) -> None:
    before = sorted(copy.rglob("*"))
    arguments = [copy, "--backend", backend, "--compute-capability", "8.6,8.9", "--dry-run"]
    stdout, _ = run(*arguments, "--json", command=WITHOUT)
    checked = json.loads(stdout)["preflight"]
    assert {one["graph"] for one in checked} == {path.stem for path in (copy / "graphs").glob("*.onnx")}
    assert all(one["findings"] == [] and one["weight_bytes"] > 0 and one["nodes"] > 20 for one in checked)
    assert run(*arguments, command=WITHOUT)[0].endswith("sm86-sm89: nothing was built\n")
    assert sorted(copy.rglob("*")) == before


def test_a_gpu_that_will_not_do_is_said_once_and_before_anything_is_built(copy: Path) -> None:
    arguments = [copy, "--backend", "tensorrt-rtx", "--compute-capability", "8.9", "--compute-capability", "9.0"]
    _, stderr = run(*arguments, "--dry-run", code=4, command=WITHOUT)
    assert stderr.count("compute capability 9.0") == 1
    assert "for other GPUs build with tensorrt (context-b1-n" in stderr
    assert not (copy / "engines").exists()


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_without_the_library_the_line_that_installs_it(copy: Path, backend: str) -> None:
    _, stderr = run(copy, "--backend", backend, "--compute-capability", "8.9", code=5, command=WITHOUT)
    assert f"pip install 'dspark-export[{backend}]'" in stderr
    assert not (copy / "engines").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compute-capability", "8"], "compute capability '8'"),
        (["--compute-capability", "8.9", "--workspace", "much"], "no size like 512M"),
        (["--compute-capability", "8.9", "--optimization-level", "9"], "not in the range 0<=x<=5"),
        (["--compute-capability", "8.9", "--version-compatible"], "no lean runtime"),
    ],
)
def test_usage(copy: Path, arguments: list[str], said: str) -> None:
    _, stderr = run(copy, "--backend", "tensorrt-rtx", *arguments, code=2, command=WITHOUT)
    assert said in stderr
    assert stderr.count("\n") == 1


@installed
def test_built_for_two_gpus_and_then_nothing_to_do(copy: Path) -> None:
    arguments = [copy, "--backend", "tensorrt-rtx", "--compute-capability", "8.6,12.0"]
    stdout, _ = run(*arguments, "--json")
    sets = json.loads(stdout)["sets"]
    assert [(one["slug"], one["built"]) for one in sets] == [("sm86", True), ("sm120", True)]
    for one in sets:
        assert {path.name for path in Path(one["path"]).iterdir()} == {
            "engine.json", "build.log", *(entry["file"] for entry in one["engines"]),
        }  # fmt: skip
    stdout, stderr = run(*arguments)
    assert stdout.count("was built already with the same options") == 2
    assert stderr == ""
