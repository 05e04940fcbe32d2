"""Damaged configurations and headers: opened, or refused with one message; ``make fuzz`` looks for minutes."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import make_config, random_tensors, write_layout
from hypothesis import HealthCheck, given, settings, strategies as st

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.config import DrafterConfig
from dspark.drafter.convert import convert
from dspark.drafter.errors import BadInputError
from dspark.drafter.target import open_target
from dspark.drafter.tensors import tensor_shapes

SECONDS = float(os.environ.get("DSPARK_FUZZ_SECONDS", 0))  # of each test; 0: one short run
NO_HEADS = {
    "sample_from_anchor": False,
    "markov_rank": 0,
    "markov_head_type": "none",
    "confidence_head": False,
    "confidence_head_with_markov": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspec": {},
    "speculators": {"draft_vocab_size": 40},
    "specforge": {},
    "modelopt": {},
    "z-lab": NO_HEADS,
}
Change = Callable[[Any], Any]
EDGES = (0, 1, -1, 2, 7, 130, 131, 255, 4096, 2**31 - 1, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**400)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(EDGES)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["yarn", "linear", "default", "gated", "rnn", "vanilla", "llama", "F32", "BOOL", "\ud800", "x" * 9999]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target_path: Path) -> dict[str, Path]:
    """A checkpoint in each layout, and one of them as GGUF."""
    root, made = tmp_path_factory.mktemp("fuzz"), {}
    for layout, overrides in LAYOUTS.items():
        config = make_config(layout, **overrides)
        made[layout] = write_layout(root / layout, config, random_tensors(config))
    convert(open_checkpoint(made["speculators"], open_target(target_path)), "gguf", root / "gguf")
    made["gguf"] = next((root / "gguf").glob("*.gguf"))
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def damaged(draw: st.DataObject, value: Any) -> Any:
    """A JSON value with one to three of its places replaced, removed, renamed or copied over another."""
    value = copy.deepcopy(value)
    for _ in range(draw.draw(st.integers(1, 3))):
        found = [place for place in places(value) if place]
        if not found:
            return value
        *above, key = draw.draw(st.sampled_from(found))
        parent = value
        for step in above:
            parent = parent[step]
        how = draw.draw(st.sampled_from(["replace", "replace", "remove", "rename", "copy", "nudge"]))
        if how == "remove":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw.draw(st.text(max_size=12))] = parent.pop(key)
        elif how == "nudge" and isinstance(parent[key], int):
            parent[key] += draw.draw(st.sampled_from([-64, -4, -1, 1, 4, 64]))
        elif how == "copy":
            other = value
            for step in draw.draw(st.sampled_from(found)):
                other = other[step]
            parent[key] = copy.deepcopy(other)
        else:
            parent[key] = draw.draw(values)
    return value


def garbled(draw: st.DataObject, data: bytes, reach: int) -> bytes:
    """Bytes with one to four changes in the first ``reach``: set, cut, inserted, or the end removed."""
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, max(0, min(reach, len(changed)) - 1)))
        how = draw.draw(st.sampled_from(["set", "set", "insert", "cut", "end"]))
        if how == "set":
            changed[place : place + 1] = draw.draw(st.binary(min_size=1, max_size=1))
        elif how == "insert":
            changed[place:place] = draw.draw(st.binary(max_size=8))
        elif how == "cut":
            del changed[place : place + draw.draw(st.integers(1, 16))]
        else:
            del changed[place:]
    return bytes(changed)


def opened_or_refused(path: Path) -> None:
    """Open the checkpoint and read all of its tensors; nothing but a clear refusal may come out, and soon."""
    start, refusal = time.monotonic(), None
    try:
        checkpoint = open_checkpoint(path)
        for name in tensor_shapes(checkpoint.config):
            if name not in checkpoint.missing_shared:
                checkpoint.load(name)
        data = json.loads(json.dumps(checkpoint.config.to_json()))
        assert DrafterConfig.from_json(data) == checkpoint.config
        assert all(warning.isprintable() for warning in checkpoint.warnings)
    except BadInputError as error:
        refusal = error
    if refusal:
        assert refusal.message.isprintable()
        assert len(refusal.message) < 20_000
        assert str(path) in refusal.message
        json.dumps(dict(refusal.details), allow_nan=False)
    assert time.monotonic() - start < 5


def search(test: Callable[[], None], examples: int = 60) -> None:
    """Run a property on fresh examples, again until the time of ``make fuzz`` is spent."""
    run = settings(
        max_examples=max(examples, int(SECONDS) * 10), deadline=None, suppress_health_check=list(HealthCheck)
    )(test)
    end = time.monotonic() + SECONDS
    run()
    while time.monotonic() < end:
        run()


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configurations(folders: dict[str, Path], layout: str, tmp_path: Path) -> None:
    start = json.loads((folders[layout] / "config.json").read_text())
    shutil.copy(folders[layout] / "model.safetensors", tmp_path)

    @given(draw=st.data())
    def damage(draw: st.DataObject) -> None:
        (tmp_path / "config.json").write_bytes(dumped(damaged(draw, start)))
        opened_or_refused(tmp_path)

    search(damage)


def test_headers(folders: dict[str, Path], tmp_path: Path) -> None:
    data = (folders["speculators"] / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    start, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    shutil.copy(folders["speculators"] / "config.json", tmp_path)

    @given(draw=st.data())
    def damage(draw: st.DataObject) -> None:
        text = dumped(damaged(draw, start))
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + rest)
        opened_or_refused(tmp_path)

    search(damage)


def test_indexes(folders: dict[str, Path], tmp_path: Path) -> None:
    header = (folders["deepspec"] / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]).keys() - {"__metadata__"}
    shutil.copy(folders["deepspec"] / "config.json", tmp_path)
    shutil.copy(folders["deepspec"] / "model.safetensors", tmp_path / "a.safetensors")
    start = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(sorted(names), "a.safetensors")}

    @given(draw=st.data())
    def damage(draw: st.DataObject) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(dumped(damaged(draw, start)))
        opened_or_refused(tmp_path)

    search(damage)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_bytes(folders: dict[str, Path], file: str, tmp_path: Path) -> None:
    for path in folders["specforge"].iterdir():
        shutil.copy(path, tmp_path)
    start = (tmp_path / file).read_bytes()

    @given(draw=st.data())
    def damage(draw: st.DataObject) -> None:
        (tmp_path / file).write_bytes(garbled(draw, start, 4096))
        opened_or_refused(tmp_path)

    search(damage)


def test_gguf_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    start, file = folders["gguf"].read_bytes(), tmp_path / "received.gguf"

    @given(draw=st.data())
    def damage(draw: st.DataObject) -> None:
        file.write_bytes(garbled(draw, start, 4096))
        opened_or_refused(file)

    search(damage)
