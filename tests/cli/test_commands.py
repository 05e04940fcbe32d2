"""What each command gives: files, JSON, help; the real command in a process of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import make_checkpoint
from safetensors.torch import load_file, save_file

from dspark.export.bundle import Bundle, open_bundle

COMMAND = [sys.executable, "-m", "dspark.cli.main"]
COMMANDS = ["inspect", "convert", "export", "build", "validate", "bench", "generate"]
INSPECT_KEYS = {
    "kind", "layout", "block_size", "proposals", "sample_from_anchor", "target_layer_ids", "mask_token_id",
    "markov_head_type", "markov_rank", "confidence_head", "draft_vocab_size", "vocab_size", "parameters", "warnings",
}  # fmt: skip
PARITY_KEYS = {"graph", "output", "rounds", "max_abs", "tolerance", "passed"}
GENERATE_KEYS = {
    "prompt_tokens", "token_ids", "text", "rounds", "acceptance_length", "accepted_per_position", "tokens_per_second",
}  # fmt: skip


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    return stdout, stderr


def run(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What a command that succeeds says on stdout; it says nothing on stderr."""
    stdout, stderr = finish(start(*arguments, cwd=cwd))
    assert stderr == ""
    return stdout


def run_json(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*arguments, "--json", cwd=cwd))
    return data


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example(command: str) -> None:
    text = run(*command.split(), "--help")
    assert "Example" in text
    assert f"dspark-export {command}" in text


def test_help_lists_every_command() -> None:
    text = run("-h")
    assert [name for name in COMMANDS if f"\n  {name} " not in text] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["export", "--help"], ["generate", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], *arguments], capture_output=True, text=True, check=True
    )
    imported = {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in imported
    assert imported.isdisjoint({"torch", "onnx", "onnxruntime", "numpy", "transformers", "safetensors"})


def test_inspect_a_checkpoint(checkpoint_folder: Path) -> None:
    data = run_json("inspect", checkpoint_folder)
    assert set(data) >= INSPECT_KEYS
    assert data["kind"] == "checkpoint"
    assert (data["block_size"], data["proposals"], data["sample_from_anchor"]) == (5, 5, True)
    assert data["target_layer_ids"] == [0, 2]
    assert (data["markov_head_type"], data["markov_rank"], data["confidence_head"]) == ("vanilla", 8, True)
    assert (data["vocab_size"], data["draft_vocab_size"], data["mask_token_id"]) == (131, 131, 130)
    # embedding, head, Markov: 2·131·(32+8); fc 32·64; a layer 3·32·32 + 3·32·48 + 2·32 + 2·8; 2 norms; confidence 41
    assert data["parameters"] == 10480 + 2048 + 2 * (3072 + 4608 + 64 + 16) + 64 + 41
    assert data["warnings"] == []


def test_inspect_says_what_the_target_has_to_lend(tmp_path: Path) -> None:
    data = run_json("inspect", make_checkpoint(tmp_path / "drafter", shared=False))
    assert [warning.split()[0] for warning in data["warnings"]] == ["embed_tokens.weight", "lm_head.weight"]


def test_inspect_a_bundle(bundle: Bundle, checkpoint_folder: Path) -> None:
    data, checkpoint = run_json("inspect", bundle.path), run_json("inspect", checkpoint_folder)
    assert data["kind"] == "bundle"
    assert {key: data[key] for key in INSPECT_KEYS - {"kind"}} == {
        key: checkpoint[key] for key in INSPECT_KEYS - {"kind"}
    }
    assert (data["dtype"], data["batch"], data["context"]) == ("float32", [1, 3], [64, 192])


def test_inspect_as_text(bundle: Bundle) -> None:
    lines = run("inspect", bundle.path).splitlines()
    assert lines[0].split() == ["kind", "bundle"]
    assert run("inspect", bundle.path, "--quiet") == ""


def test_dry_run_writes_nothing(checkpoint_folder: Path, tmp_path: Path) -> None:
    data = run_json("export", checkpoint_folder, "-o", tmp_path / "deep" / "b", "--context", "64,128", "--dry-run")
    assert [graph["file"] for graph in data["graphs"] if graph["name"] == "block"] == [
        "graphs/block-b1-c64.onnx",
        "graphs/block-b1-c128.onnx",
    ]
    assert data["weight_bytes"] > 4 * 28000
    assert list(tmp_path.iterdir()) == []


def test_export_here_and_replace_it_twice(checkpoint_folder: Path, tmp_path: Path) -> None:
    arguments = ("export", checkpoint_folder, "-o", "deep/bundle", "--context", "64")
    data = run_json(*arguments, cwd=tmp_path)
    output = tmp_path / "deep" / "bundle"
    assert set(data) >= {"bundle", "parity"}
    assert tmp_path / data["bundle"] == output
    assert {row["output"] for row in data["parity"]} >= {"k", "v", "base_logits", "hidden", "token", "tokens", "q"}
    for row in data["parity"]:
        assert set(row) >= PARITY_KEYS
        assert row["passed"] is True
        assert row["rounds"] > 0
    assert open_bundle(output).sizes("block", 1) == (64,)

    first = hashes(output)
    (output / "stale").write_text("of another export")
    for _ in range(2):
        assert "parity holds" in run(*arguments, "--force", cwd=tmp_path)
        assert hashes(output) == first
        assert list(output.parent.iterdir()) == [output]


def test_export_with_what_the_target_lends(target_path: Path, tmp_path: Path) -> None:
    checkpoint, output = make_checkpoint(tmp_path / "drafter", shared=False), tmp_path / "bundle"
    arguments = ("export", checkpoint, "--target", target_path, "-o", output, "--context", "64", "--quiet")
    assert run(*arguments) == ""
    manifest = open_bundle(output).manifest
    assert manifest["checkpoint"]["from_target"] == ["embed_tokens.weight", "lm_head.weight"]
    assert manifest["target"]["sha256"] in manifest["checkpoint"]["sha256"]


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_validate(bundle: Bundle, checkpoint_folder: Path, with_checkpoint: bool) -> None:
    data = run_json("validate", bundle.path, *(["--checkpoint", checkpoint_folder] if with_checkpoint else []))
    blocks = {row["graph"] for row in data["parity"] if row["graph"].startswith("block")}
    assert blocks == {"block-b1-c64", "block-b1-c192", "block-b3-c64", "block-b3-c192"}
    assert all(row["passed"] for row in data["parity"])


def test_validate_with_another_checkpoint(bundle: Bundle, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    _, stderr = finish(start("validate", bundle.path, "--checkpoint", other), 6)
    assert bundle.manifest["checkpoint"]["sha256"] in stderr


def flip_weight(path: Path) -> Path:
    return flip_byte(path / "graphs" / "weights.data", 1000)


def flip_graph(path: Path) -> Path:
    return flip_byte(path / "graphs" / "markov_step-b1.onnx", -1)


def flip_byte(file: Path, position: int) -> Path:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    return file


def change_recorded_hash(path: Path) -> Path:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    name = "graphs/weights.data"
    recorded = manifest["files"][name]["sha256"]
    manifest["files"][name]["sha256"] = recorded[:-1] + ("0" if recorded[-1] != "0" else "1")
    file.write_text(json.dumps(manifest))
    return path / name


def halve_manifest(path: Path) -> Path:
    file = path / "manifest.json"
    file.write_text(file.read_text()[: file.stat().st_size // 2])
    return file


def drop_from_manifest(path: Path) -> Path:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["export"]
    file.write_text(json.dumps(manifest))
    return file


def delete_file(path: Path) -> Path:
    file = path / "graphs" / "block-b3-c192.onnx"
    file.unlink()
    return file


def append_byte(path: Path) -> Path:
    file = path / "graphs" / "weights.data"
    with file.open("ab") as stream:
        stream.write(b"\0")
    return file


@pytest.mark.parametrize(
    "damage",
    [flip_weight, flip_graph, change_recorded_hash, halve_manifest, drop_from_manifest, delete_file, append_byte],
)
def test_a_damaged_bundle(bundle: Bundle, target_path: Path, tmp_path: Path, damage: Callable[[Path], Path]) -> None:
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    file = damage(copy)
    generate = ("generate", copy, "--target", target_path, "--prompt", "hello")
    for arguments in (("validate", copy), ("inspect", copy), generate):
        stdout, stderr = finish(start(*arguments), 6)
        assert stdout == ""
        assert stderr.startswith(f"error: {file}: ")
        assert stderr.count("\n") == 1


def test_generate(bundle: Bundle, target_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs at once, each of which takes as long as its imports."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of three processes would wait for each other
    arguments = ("generate", bundle.path, "--target", target_path, "--prompt", "hello", "--max-new-tokens", "24")
    seeds = [("--seed", "7", "--json"), ("--seed", "7", "--json"), ("--seed", "8")]
    processes = [start(*arguments, "--temperature", "1", *seed) for seed in seeds]
    (one, _), (same, _), (text, note) = (finish(process) for process in processes)
    result = json.loads(one)
    assert set(result) >= GENERATE_KEYS
    assert result["prompt_tokens"] == 5
    assert 0 < len(result["token_ids"]) <= 24
    assert len(result["accepted_per_position"]) == 5
    assert result["token_ids"] == json.loads(same)["token_ids"]
    assert text.endswith("\n")
    assert text != result["text"] + "\n"
    assert f" in {note.split()[3]} rounds, " in note


def test_convert_there_and_back(checkpoint_folder: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    data = run_json("convert", checkpoint_folder, "--to", "speculators", "-o", there)
    assert (data["from"], data["to"], data["left_to_target"]) == ("deepspec", "speculators", [])
    assert f"{back}: deepspec, {data['tensors']} tensors" in run("convert", there, "--to", "deepspec", "-o", back)
    first, last = (load_file(folder / "model.safetensors") for folder in (checkpoint_folder, back))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    before = hashes(back)
    _, stderr = finish(start("convert", there, "--to", "deepspec", "-o", back), 2)
    assert "--force" in stderr
    assert hashes(back) == before
    run("convert", there, "--to", "deepspec", "-o", back, "--force")
    assert hashes(back) == before


def test_convert_refuses_what_a_layout_has_no_place_for(tmp_path: Path) -> None:
    gated = make_checkpoint(tmp_path / "gated", markov_head_type="gated")
    _, stderr = finish(start("convert", gated, "--to", "gguf", "-o", tmp_path / "out"), 3)
    assert "a Markov head of type gated" in stderr
    assert not (tmp_path / "out").exists()


def test_inspect_scans_for_what_is_no_number(checkpoint_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint_folder, tmp_path / "copy"))
    assert run_json("inspect", copy, "--scan")["kind"] == "checkpoint"
    tensors = load_file(copy / "model.safetensors")
    tensors["fc.weight"][3, 5], tensors["fc.weight"][17, 0] = float("nan"), float("inf")
    save_file(tensors, copy / "model.safetensors")
    _, stderr = finish(start("inspect", copy, "--scan"), 3)
    assert "fc.weight holds NaN or Inf, in rows 3, 17" in stderr
    run("inspect", copy)


def test_a_target_with_another_tokenizer_or_template(
    checkpoint_folder: Path, target_path: Path, tmp_path: Path
) -> None:
    """The tokenizer that a bundle was exported for is a condition, its template a warning."""
    path = tmp_path / "bundle"
    run("export", checkpoint_folder, "--target", target_path, "-o", path, "--context", "64")
    generate = ("generate", path, "--prompt", "hello", "--max-new-tokens", "2", "--target")
    other = Path(shutil.copytree(target_path, tmp_path / "template"))
    (other / "chat_template.jinja").write_text("{% for m in messages %}>{{ m['content'] }}{% endfor %}")
    _, stderr = finish(start(*generate, other))
    assert stderr.startswith("warning: ")
    assert "chat template" in stderr
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    stdout, stderr = finish(start(*generate, other), 3)
    assert stdout == ""
    assert "tokenizer" in stderr
