"""What a person gets for a mistake: one message, an exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import make_checkpoint
from safetensors.torch import load_file, save_file

from dspark.export.bundle import Bundle, open_bundle

# A shell that starts tests in the background makes SIGINT ignored, which children inherit.
COMMAND = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import dspark.cli.main as m; m.main()",
]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where a bundle would go; its folder stays empty if it does not."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "bundle"


@pytest.fixture
def copied(checkpoint_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoint_folder, tmp_path / "copied"))


@pytest.fixture(scope="module")
def without_embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shared") / "drafter", shared=False)


@pytest.fixture(scope="module")
def slow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that an export takes a second after its staging folder appears."""
    return make_checkpoint(
        tmp_path_factory.mktemp("slow") / "drafter", vocab_size=60000, mask_token_id=1, hidden_size=64
    )


def refused(code: int, *arguments: str | Path) -> str:
    """Run a command that must fail with this exit code and one message; returns the message."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    return message_of(done.stderr)


def message_of(stderr: str) -> str:
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    return stderr.removeprefix("error: ").rstrip("\n")


def refused_export(code: int, checkpoint: Path, output: Path, *options: str | Path) -> str:
    """An export that must fail and leave nothing."""
    message = refused(code, "export", checkpoint, "-o", output, "--context", "64", *options)
    assert list(output.parent.iterdir()) == []
    return message


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensor(folder: Path, name: str, value: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "bogus"),
        (["export", "c", "-o", "b", "--bogus"], "--bogus"),
        (["export", "c"], "--output"),
        (["export", "-o", "b"], "CHECKPOINT"),
        (["export", "c", "-o", "b", "--dtype", "int8"], "int8"),
        (["export", "c", "-o", "b", "--opset", "x"], "'x'"),
        (["generate", "b", "--prompt", "p"], "--target"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_line_that_does_not_parse(arguments: list[str], said: str) -> None:
    assert said in refused(2, *arguments)


@pytest.mark.parametrize(
    "options",
    [
        ("--context", "64,32"),
        ("--context", "64,64"),
        ("--context", "0"),
        ("--context", "64,x"),
        ("--context", ""),
        ("--context", "100000"),
        ("--batch", "-1"),
        ("--batch", "1,,2"),
        ("--prefill", "0"),
        ("--opset", "11"),
    ],
    ids="=".join,
)
def test_an_option_of_export_out_of_range(checkpoint_folder: Path, output: Path, options: tuple[str, str]) -> None:
    assert options[1].split(",")[0] in refused_export(2, checkpoint_folder, output, *options)


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-k", "-1"),
        ("--seed", "-1"),
        ("--max-new-tokens", "0"),
        ("--policy", "bogus"),
        ("--policy", "fixed:0"),
        ("--backend", "bogus"),
    ],
    ids="=".join,
)
def test_an_option_of_generate_out_of_range(bundle: Bundle, target_path: Path, options: tuple[str, str]) -> None:
    assert options[1] in refused(2, "generate", bundle.path, "--target", target_path, "--prompt", "hello", *options)


def test_an_output_that_exists(output: Path, tmp_path: Path) -> None:
    """Refused before the checkpoint is looked at, let alone converted."""
    output.mkdir()
    (output / "theirs").write_text("theirs")
    assert "--force" in refused(2, "export", tmp_path / "unread", "-o", output)
    assert list(output.parent.iterdir()) == [output]
    assert (output / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("command", ["inspect", "export", "validate", "generate"])
def test_a_path_that_does_not_exist(target_path: Path, output: Path, tmp_path: Path, command: str) -> None:
    options = {"export": ["-o", output], "generate": ["--target", target_path, "--prompt", "hello"]}
    message = refused(3, command, tmp_path / "nowhere", *options.get(command, []))
    assert f"{tmp_path / 'nowhere'}: no such " in message
    assert list(output.parent.iterdir()) == []


def test_a_path_that_the_system_refuses() -> None:
    assert "name too long" in refused(3, "inspect", "n" * 300)


def test_a_folder_without_config(copied: Path, output: Path) -> None:
    (copied / "config.json").unlink()
    assert "holds no config.json" in refused_export(3, copied, output)


def test_a_target_that_does_not_exist(checkpoint_folder: Path, output: Path, tmp_path: Path) -> None:
    assert "nowhere" in refused_export(3, checkpoint_folder, output, "--target", tmp_path / "nowhere")


def test_a_configuration_that_lies_about_a_shape(copied: Path, output: Path) -> None:
    change_config(copied, intermediate_size=64)
    message = refused_export(3, copied, output)
    assert "layers.0.mlp.gate_proj.weight is [48, 32]" in message
    assert "the configuration says [64, 32]" in message


def test_half_a_weight_file(copied: Path, output: Path) -> None:
    file = copied / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    message = refused_export(3, copied, output)
    assert "model.safetensors" in message
    assert str(file.stat().st_size) in message


@pytest.mark.parametrize(
    ("field", "value", "wanted"), [("hidden_size", 64, 32), ("vocab_size", 200, 131), ("num_hidden_layers", 6, 4)]
)
def test_a_target_that_does_not_fit(
    without_embeddings: Path, bundle: Bundle, target_path: Path, output: Path, tmp_path: Path,
    field: str, value: int, wanted: int,
) -> None:  # fmt: skip
    target = Path(shutil.copytree(target_path, tmp_path / "target"))
    change_config(target, **{field: value})
    exported = refused_export(3, without_embeddings, output, "--target", target)
    generated = refused(3, "generate", bundle.path, "--target", target, "--prompt", "hello")
    for message in (exported, generated):
        assert f" {wanted}, " in message
        assert f"has {value}" in message


def test_no_embeddings_and_no_target(without_embeddings: Path, output: Path) -> None:
    assert "--target" in refused_export(3, without_embeddings, output)


def test_nan_in_a_tensor(copied: Path, output: Path) -> None:
    change_tensor(copied, "layers.1.mlp.up_proj.weight", float("nan"))
    assert "layers.1.mlp.up_proj.weight holds NaN or Inf, in rows [0]" in refused_export(3, copied, output)


def test_a_weight_that_fp16_cannot_hold(copied: Path, output: Path) -> None:
    change_tensor(copied, "layers.0.self_attn.o_proj.weight", 70000.0)
    message = refused_export(3, copied, output, "--dtype", "fp16")
    assert "layers.0.self_attn.o_proj.weight reaches 7e+04" in message


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt(bundle: Bundle, target_path: Path, prompt: str) -> None:
    assert "empty" in refused(3, "generate", bundle.path, "--target", target_path, "--prompt", prompt)


def test_a_prompt_longer_than_the_context(bundle: Bundle, target_path: Path) -> None:
    message = refused(3, "generate", bundle.path, "--target", target_path, "--prompt", "hello" * 40)
    assert "200 tokens" in message
    assert "192" in message


def test_a_disk_that_is_too_small(checkpoint_folder: Path, output: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(output.parent)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        message = refused_export(5, checkpoint_folder, output)
        assert "needs" in message
        assert "2.1 MB are free" in message
    finally:
        subprocess.run(["umount", str(output.parent)], check=True)


def test_a_hub_that_cannot_be_reached(checkpoint_folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no/such" in refused_export(5, checkpoint_folder, output, "--target", "no/such")
    assert "no/such-drafter" in refused_export(5, Path("no/such-drafter"), output)


@contextlib.contextmanager
def export_at_work(checkpoint: Path, output: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """An export that has begun to write."""
    process = subprocess.Popen(
        [*COMMAND, "export", str(checkpoint), "-o", str(output), "--context", "64", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not output.with_name(f".{output.name}.{process.pid}.partial").exists() and process.poll() is None:
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def staging_of(output: Path) -> list[Path]:
    return [path for path in output.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(slow_checkpoint: Path, output: Path, number: signal.Signals) -> None:
    with export_at_work(slow_checkpoint, output) as process:
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert message_of(stderr).startswith("interrupted")
    assert list(output.parent.iterdir()) == []


def test_an_interrupt_before_any_work(slow_checkpoint: Path, output: Path) -> None:
    """While torch is imported: no staging folder exists yet."""
    process = subprocess.Popen(
        [*COMMAND, "export", str(slow_checkpoint), "-o", str(output), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["kind"] == "interrupted"
    assert message_of(stderr).startswith("interrupted")
    assert list(output.parent.iterdir()) == []


def test_a_killed_export_leaves_a_bundle_or_none(slow_checkpoint: Path, output: Path) -> None:
    """kill -9 from the first byte to after the end; first onto an empty place, then over a bundle."""
    for delay in (0.0, 0.4):
        with export_at_work(slow_checkpoint, output) as process:
            time.sleep(delay)
            process.kill()
            process.wait()
        assert staging_of(output)
        assert not output.exists()
    with export_at_work(slow_checkpoint, output) as process:
        process.wait(timeout=60)
    assert list(output.parent.iterdir()) == [output]  # the last run removed what the killed ones left
    open_bundle(output)

    left = []
    for delay in (0.05, 0.5, 1.0):
        with export_at_work(slow_checkpoint, output, "--force") as process:
            time.sleep(delay)
            process.kill()
            process.wait()
        open_bundle(output)
        left += staging_of(output)
    assert left
    with export_at_work(slow_checkpoint, output, "--force") as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(output.parent.iterdir()) == [output]
    open_bundle(output)


def test_an_error_as_json(copied: Path, output: Path) -> None:
    change_config(copied, intermediate_size=64)
    cases = [
        (2, "usage", ["bogus", "--json"]),
        (2, "usage", ["export", copied, "-o", output, "--opset", "x", "--json"]),
        (2, "usage", ["export", copied, "-o", copied, "--json"]),
        (3, "bad_input", ["inspect", copied, "--json"]),
        (3, "bad_input", ["export", copied, "-o", output, "--json", "--quiet"]),
    ]
    for code, kind, arguments in cases:
        done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)
        error = json.loads(done.stdout)["error"]  # which refuses a second document
        assert set(error) == {"code", "kind", "message", "details"}
        assert (done.returncode, error["code"], error["kind"]) == (code, code, kind)
        assert error["message"] == message_of(done.stderr)
    assert "[48, 32]" in error["details"]["faults"][0]


def test_a_library_that_is_not_installed(checkpoint_folder: Path, output: Path) -> None:
    script = "import sys; sys.modules['onnxruntime'] = None; import dspark.cli.main as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "export", str(checkpoint_folder), "-o", str(output), "--context", "64"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 5
    assert "is not installed; pip install" in message_of(done.stderr)
    assert list(output.parent.iterdir()) == []
