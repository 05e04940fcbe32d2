"""``export --quantize``: what it asks for before any work, and its bundle through every other command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drafters import make_checkpoint, make_target

from dspark.cli.export import quantization_table
from dspark.cli.prompts import Prompt, read_prompts
from dspark.drafter.errors import BadInputError

COMMAND = [sys.executable, "-m", "dspark.cli.main"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    return stdout, stderr


def run(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    return finish(start(*arguments), code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter whose matrices fall into blocks of 64, its target, and prompts in two domains."""
    folder = tmp_path_factory.mktemp("quantize")
    make_checkpoint(folder / "drafter", hidden_size=64, intermediate_size=64, head_dim=16)
    make_target(folder / "target", hidden_size=64)
    lines = [
        {"domain": "a", "prompt": "hello", "max_new_tokens": 12},
        {"domain": "b", "messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 12},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def arguments(folder: Path, output: Path) -> list[str | Path]:
    return [
        "export", folder / "drafter", "--target", folder / "target", "-o", output, "--context", "64",
        "--quantize", "int8", "--prompts", folder / "prompts.jsonl",
    ]  # fmt: skip


def test_from_export_to_generate(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    stdout, _ = run(*arguments(folder, output), "--max-tau-loss", "100", "--json")
    data = json.loads(stdout)
    assert {row["passed"] for row in data["parity"]} == {True}
    record = data["quantization"]
    assert record == json.loads((output / "manifest.json").read_text())["quantization"]
    assert [(row["domain"], row["prompts"], row["equal_to_plain"]) for row in record["tau"]] == [
        ("all", 2, 2), ("a", 1, 1), ("b", 1, 1),
    ]  # fmt: skip
    assert record["max_tau_loss"] == 1

    words = ("--target", folder / "target", "--prompt", "hello", "--max-new-tokens", "12", "--json")
    others = [  # at once: each takes as long as its imports
        start("validate", output, "--checkpoint", folder / "drafter"),
        start("generate", output, *words),
    ]
    inspected = json.loads(run("inspect", output, "--json")[0])
    assert (inspected["quantization"], inspected["quantization_block"], inspected["opset"]) == ("int8", 64, 21)
    assert inspected["tau_after"] == record["tau"][0]["after"]
    assert inspected["parameters"] == json.loads(run("inspect", folder / "drafter", "--json")[0])["parameters"]

    validated, generated = (finish(process)[0] for process in others)
    assert "parity holds" in validated
    assert json.loads(generated)["rounds"] > 0


def test_the_tables_say_what_it_costs() -> None:
    row = {"prompts": 3, "before": 2.0, "after": 1.9, "loss": 0.05, "rounds_before": 50, "rounds_after": 53}
    record = {
        "kind": "int8", "block": 64, "tensors": ["a", "b"], "bytes": {"before": 4_000_000, "after": 1_100_000},
        "tau": [{"domain": "all", **row, "equal_to_plain": 2, "near_ties": 1}],
        "cost": [
            {"graph": "block-b1-c64", "output": "hidden", "rounds": 20, "max_abs": 0.5, "rms": 0.1, "magnitude": 2.0},
            {"graph": "block-b1-c64", "output": "greedy tokens", "rounds": 20, "agreement": 0.875},
        ],
    }  # fmt: skip
    lines = [line.split() for line in quantization_table(record).splitlines()]
    assert " ".join(lines[0]) == "int8 in blocks of 64: 2 matrices, weights 4.0 MB before, 1.1 MB after"
    assert lines[3] == ["all", "3", "2.000", "1.900", "5.0%", "50", "53", "2,", "1", "near", "ties"]
    assert lines[6] == ["block-b1-c64", "hidden", "20", "5.00e-01", "1.00e-01", "2.00e+00"]
    assert lines[7] == ["block-b1-c64", "greedy", "tokens", "20", "0.875"]


@pytest.mark.parametrize(
    ("left_out", "named"), [("--target", "--target"), ("--prompts", "--prompts"), ("--quantize", "--prompts")]
)
def test_what_belongs_together(folder: Path, tmp_path: Path, left_out: str, named: str) -> None:
    words = arguments(folder, tmp_path / "bundle")
    place = words.index(left_out)
    _, stderr = run(*words[:place], *words[place + 2 :], code=2)
    assert named in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ['{"prompt": "hi"}\nnonsense', '{"prompt": "' + "long " * 40 + '"}'])
def test_prompts_that_cannot_be_used_are_refused_before_any_work(folder: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    words = arguments(folder, tmp_path / "bundle")
    _, stderr = run(*words[:-1], file, code=3)
    assert f"{file}:2: is no JSON" in stderr or "prompt 1 has 160 tokens" in stderr
    assert list(tmp_path.iterdir()) == [file]


def test_the_shipped_prompts() -> None:
    prompts = read_prompts(EXAMPLE)
    assert len(prompts) >= 9
    assert {prompt.domain for prompt in prompts} == {"maths", "code", "chat"}


def test_a_prompts_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({
        "messages": messages, "domain": "chat", "max_new_tokens": 7, "source": "mine",
    }))  # fmt: skip
    one, two = read_prompts(file)
    assert one == Prompt([{"role": "user", "content": "one"}], "-", 64)
    assert two == Prompt(messages, "chat", 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "no object"),
        ({"domain": "chat"}, 'with "prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, 'with "prompt" or "messages"'),
        ({"prompt": 3}, "a prompt is a text"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"messages": []}, "messages are objects"),
        ({"messages": [{"role": "user"}]}, "messages are objects"),
        ({"prompt": "a", "domain": 1}, "domain 1 is no text"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens 0"),
        ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens True"),
    ],
)
def test_a_line_that_is_no_prompt(tmp_path: Path, line: Any, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "first"}) + "\n" + json.dumps(line))
    with pytest.raises(BadInputError, match=rf"prompts.jsonl:2: .*{message}"):
        read_prompts(file)


@pytest.mark.parametrize(("content", "message"), [(b"\n\n", "holds no prompt"), (b"\xff\xfe{", "no UTF-8")])
def test_a_file_without_prompts(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        read_prompts(file)
    with pytest.raises(BadInputError, match="No such file"):
        read_prompts(tmp_path / "absent")
