"""Malformed checkpoints through the real command: one message that names the place, nothing written, no cost."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import make_checkpoint, make_config, random_tensors, write_layout

Damage = Callable[[Path], None]
HUGE = 1 << 60
# Memory is the process's own high-water mark; the one that a parent is told includes the parent's before exec.
COMMAND = """
import atexit, sys
path = sys.argv[1]
def peak():
    with open("/proc/self/status") as status, open(path, "w") as out:
        out.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))
atexit.register(peak)
sys.argv = ["dspark-export", *sys.argv[2:]]
import dspark.cli.main as m
m.main()
"""


def weights(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a folder's weight file."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(folder: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + text + data)


def config(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        data = json.loads(file.read_text()) | values
        file.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))

    return damage


def config_text(text: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    return damage


def cut(share: float, more: int = 0) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        os.truncate(file, int(file.stat().st_size * share) + more)

    return damage


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the parsed header and keep the data."""

    def damage(folder: Path) -> None:
        entries, data = weights(folder)
        put(folder, change(entries) or entries, data)

    return damage


def entry(name: str, **values: Any) -> Damage:
    return header(lambda entries: entries[name].update(values))


def raw(text: bytes, length: int | None = None, data: bytes = b"") -> Damage:
    return lambda folder: put(folder, text, data, length)


def sharded(weight_map: Any, **files: str) -> Damage:
    """An index in place of the single file; ``files`` are links by name."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
        for name, link in files.items():
            (folder / f"{name}.safetensors").symlink_to(link)

    return damage


def linked(name: str, link: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(link.format(folder=folder))

    return damage


def moved_out(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return damage


def twice(name: str) -> Damage:
    def damage(folder: Path) -> None:
        entries, data = weights(folder)
        text = json.dumps(entries)
        put(folder, (text[:-1] + f', "{name}": {json.dumps(entries[name])}}}').encode(), data)

    return damage


def two_shards_with_one_name(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data)
    (folder / "b.safetensors").write_bytes(data)
    (folder / "model.safetensors").unlink()
    names = {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def overlapping(entries: dict[str, Any]) -> None:
    first, second = entries["hidden_norm.weight"], entries["norm.weight"]
    second["data_offsets"] = first["data_offsets"]


def renamed(old: str, new: str) -> Damage:
    return header(lambda entries: {new if name == old else name: value for name, value in entries.items()})


def terabytes(folder: Path) -> None:
    """A header that agrees with a configuration of absurd size; the file ends long before."""
    config(vocab_size=2**31 - 1, hidden_size=2**20, head_dim=2**18)(folder)
    entries, _ = weights(folder)
    size = (2**31 - 1) * 2**20 * 4
    entries["embed_tokens.weight"] = {"dtype": "F32", "shape": [2**31 - 1, 2**20], "data_offsets": [0, size]}
    put(folder, {"embed_tokens.weight": entries["embed_tokens.weight"]})


def bin_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_folder_as_file(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


FIRST = "embed_tokens.weight"
NORM = "norm.weight"
CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    # the weight file: cut
    "empty file": (cut(0), ("model.safetensors", "has 0 bytes")),
    "cut in the length": (cut(0, 5), ("model.safetensors", "has 5 bytes")),
    "cut after the length": (cut(0, 8), ("model.safetensors", "has 8 bytes")),
    "cut in the header": (cut(0, 100), ("model.safetensors", "has 100 bytes", "claims")),
    "cut in the data": (cut(0.5), ("model.safetensors", "its tensors end at")),
    "cut by one byte": (cut(1, -1), ("model.safetensors", "its tensors end at")),
    "one byte too many": (cut(1, 1), ("model.safetensors", "its tensors end at")),
    # the weight file: header
    "header of 2^60 bytes": (raw(b"{}", HUGE), ("model.safetensors", str(HUGE))),
    "header of 2^64 - 1 bytes": (raw(b"{}", 2**64 - 1), ("model.safetensors", str(2**64 - 1))),
    "header of no bytes": (raw(b"", 0), ("model.safetensors", "no JSON")),
    "header is no JSON": (raw(b"x" * 40), ("model.safetensors", "no JSON")),
    "header is not UTF-8": (raw(b'{"\xff\xfe": 1}'), ("model.safetensors", "no JSON")),
    "header is a list": (raw(b"[1, 2]"), ("model.safetensors", "a JSON list")),
    "header is a number": (raw(b"17"), ("model.safetensors", "a JSON int")),
    "header of deep nesting": (raw(deep(200_000).encode()), ("model.safetensors", "no JSON")),
    "header with a number of many digits": (raw(b'{"a": ' + b"9" * 10_000 + b"}"), ("model.safetensors", "no JSON")),
    "header with NaN": (raw(b'{"a": NaN}'), ("model.safetensors", "a: the header holds nan")),
    "header without tensors": (raw(b"{}"), ("hold no tensors",)),
    "entry is a list": (header(lambda e: e.update({NORM: [1]})), ("model.safetensors", NORM, "[1]")),
    "entry is null": (header(lambda e: e.update({NORM: None})), ("model.safetensors", NORM, "None")),
    "dtype is absent": (header(lambda e: e[NORM].pop("dtype") and None), (NORM, "dtype is None")),
    "dtype is a number": (entry(NORM, dtype=7), ("model.safetensors", NORM, "dtype is 7")),
    "dtype is unknown": (entry(NORM, dtype="F128"), ("model.safetensors", NORM, "'F128'")),
    "dtype is no weight's": (entry(NORM, dtype="I32"), (NORM, "I32", "F32, F16, BF16")),
    "dtype is too narrow": (entry(NORM, dtype="F16"), (NORM, "F16 [32] takes 64")),
    "shape is a string": (entry(NORM, shape="32"), (NORM, "shape is '32'")),
    "shape is negative": (entry(NORM, shape=[-32]), (NORM, "[-32]")),
    "shape holds a float": (entry(NORM, shape=[32.0]), (NORM, "[32.0]")),
    "shape holds true": (entry(NORM, shape=[True]), (NORM, "[True]")),
    "shape has zero rows": (entry(NORM, shape=[0]), (NORM, "F32 [0] takes 0")),
    "shape of another size": (entry(NORM, shape=[31]), (NORM, "[31] takes 124")),
    "shape of 2^60 rows": (entry(NORM, shape=[HUGE]), (NORM, str(HUGE))),
    "shape that overflows 64 bits": (entry(NORM, shape=[2**40, 2**40]), (NORM, "takes")),
    "shape of 10^5 dimensions": (entry(NORM, shape=[1] * 100_000), (NORM, "it must be a list of sizes")),
    "shape of another order": (entry("fc.weight", shape=[64, 32]), ("fc.weight is [64, 32]", "says [32, 64]")),
    "offsets are absent": (header(lambda e: e[NORM].pop("data_offsets") and None), (NORM, "data_offsets is None")),
    "offsets are three": (entry(NORM, data_offsets=[0, 1, 2]), (NORM, "[0, 1, 2]")),
    "offsets are strings": (entry(NORM, data_offsets=["0", "128"]), (NORM, "['0', '128']")),
    "offsets are negative": (entry(NORM, data_offsets=[-128, 0]), (NORM, "[-128, 0]")),
    "offsets run backwards": (entry(NORM, data_offsets=[128, 0]), (NORM, "hold -128 bytes")),
    "offsets past the end": (entry(NORM, data_offsets=[HUGE, HUGE + 128]), (NORM, "leaves a gap")),
    "offsets overlap": (header(overlapping), (NORM, "hidden_norm.weight", "overlaps")),
    "a name that stands twice": (twice(NORM), ("model.safetensors", NORM, "stands twice")),
    "a tensor is missing": (header(lambda e: e.pop(NORM) and None), ("model.safetensors", "its tensors end at")),
    "a tensor has another name": (renamed(NORM, "norm.wieght"), (f"{NORM} [32] is missing", "norm.wieght")),
    "a name with control characters": (renamed(NORM, "a\x1b[2J\nb"), ("'a\\x1b[2J\\nb'",)),
    "a name of a megabyte": (renamed(NORM, "n" * 1_000_000), (f"{NORM} [32] is missing", "nnnn")),
    "terabytes": (terabytes, ("model.safetensors", "its tensors end at 9007199250546808")),
    # the files
    "a folder for a weight file": (a_folder_as_file("model.safetensors"), ("holds no model.safetensors",)),
    "a folder for a configuration": (a_folder_as_file("config.json"), ("holds no config.json",)),
    "a pickle only": (bin_only, ("pytorch_model.bin", "pickle")),
    "no weights": (no_weights, ("holds no model.safetensors",)),
    "a link out of the folder": (moved_out("model.safetensors"), ("model.safetensors", "links to", "outside")),
    "a configuration out of the folder": (moved_out("config.json"), ("config.json", "links to", "outside")),
    "a link to a device": (linked("model.safetensors", "/dev/zero"), ("holds no model.safetensors",)),
    "a link to itself": (linked("model.safetensors", "{folder}/model.safetensors"), ("model.safetensors",)),
    "a link to nothing": (linked("model.safetensors", "nowhere"), ("holds no model.safetensors",)),
    "an index that is no JSON": (sharded("{"), ("index.json", "not readable as JSON")),
    "an index without weight_map": (sharded("{}"), ("index.json", "weight_map must be")),
    "an index with a list": (sharded([1]), ("index.json", "weight_map must be")),
    "an index with a number": (sharded({NORM: 3}), ("index.json", "weight_map must be")),
    "an empty index": (sharded({}), ("index.json", "weight_map must be")),
    "an index of deep nesting": (sharded(deep(200_000)), ("index.json", "not readable as JSON")),
    "a shard that is absent": (sharded({NORM: "gone.safetensors"}), ("index.json", "'gone.safetensors'")),
    "a shard above the folder": (sharded({NORM: "../part.safetensors"}), ("index.json", "'../part.safetensors'")),
    "a shard by its absolute path": (sharded({NORM: "/etc/passwd"}), ("index.json", "'/etc/passwd'")),
    "a shard with a zero byte": (sharded({NORM: "a\0b"}), ("index.json", "'a\\x00b'")),
    "a shard of a long name": (sharded({NORM: "n" * 5000}), ("index.json", "nnn")),
    "a shard that is the folder": (sharded({NORM: "."}), ("index.json", "'.'")),
    "a shard that links to itself": (sharded({NORM: "a.safetensors"}, a="a.safetensors"), ("a.safetensors",)),
    "shards that link in a circle": (
        sharded({NORM: "a.safetensors"}, a="b.safetensors", b="a.safetensors"), ("a.safetensors",)),
    "a shard that links out": (sharded({NORM: "a.safetensors"}, a="/etc/passwd"), ("a.safetensors", "outside")),
    "one name in two shards": (two_shards_with_one_name, (NORM, "is also in a.safetensors")),
    # the configuration as text
    "configuration is empty": (config_text(""), ("config.json", "not readable as JSON")),
    "configuration is cut": (config_text('{"hidden_size": 3'), ("config.json", "not readable as JSON")),
    "configuration is a list": (config_text("[]"), ("config.json", "a JSON list")),
    "configuration is null": (config_text("null"), ("config.json", "a JSON NoneType")),
    "configuration is not UTF-8": (config_text(b'{"a": "\xff"}'), ("config.json", "not readable as JSON")),
    "configuration of deep nesting": (config_text(deep(200_000)), ("config.json", "not readable as JSON")),
    "configuration of 20 MB": (config_text(" " * 20_000_000), ("config.json", "20000000 bytes")),
    "a key that stands twice": (config_text('{"block_size": 7, "block_size": 8}'), ("config.json", "block_size")),
    "configuration of no family": (config_text("{}"), ("config.json",)),
    # the configuration's values
    "another family": (config(architectures=["LlamaForCausalLM"]), ("config.json", "LlamaForCausalLM")),
    "architectures is a string": (config(architectures="Qwen3DSparkModel"), ("config.json", "architectures")),
    "hidden_size of 2^40": (config(hidden_size=2**40), ("config.json", "hidden_size", str(2**40))),
    "num_hidden_layers of 10^9": (config(num_hidden_layers=10**9), ("num_hidden_layers", str(10**9))),
    "num_hidden_layers of 1000": (config(num_hidden_layers=1000), ("layers.2.", "is missing")),
    "num_hidden_layers of 0": (config(num_hidden_layers=0), ("num_hidden_layers", "0")),
    "block_size of 10^9": (config(block_size=10**9), ("block_size", str(10**9))),
    "block_size of -1": (config(block_size=-1), ("block_size", "-1")),
    "heads of no multiple": (config(num_key_value_heads=3), ("num_attention_heads 4", "num_key_value_heads 3")),
    "heads of 0": (config(num_key_value_heads=0), ("num_key_value_heads", "0")),
    "an odd head_dim": (config(head_dim=7), ("head_dim", "7")),
    "a layer past the target": (config(target_layer_ids=[0, 9]), ("target_layer_ids", "[0, 9]", "4")),
    "the target's last layer": (config(target_layer_ids=[0, 3]), ("target_layer_ids", "[0, 3]")),
    "layers that fall": (config(target_layer_ids=[2, 0]), ("target_layer_ids", "[2, 0]")),
    "no layers": (config(target_layer_ids=[]), ("target_layer_ids",)),
    "layers of 10^6 entries": (config(target_layer_ids=list(range(10**6))), ("target_layer_ids",)),
    "a layer of 2^80": (config(target_layer_ids=[0, 2**80]), ("target_layer_ids",)),
    "a mask past the vocabulary": (config(mask_token_id=131), ("mask_token_id", "131", "130")),
    "an unknown Markov head": (config(markov_head_type="lstm"), ("markov_head_type", "lstm")),
    "a head without a rank": (config(markov_rank=0), ("confidence_head_with_markov", "markov")),
    "a rank of another size": (config(markov_rank=9), ("markov_w1.weight is [131, 8]", "[131, 9]")),
    "a gated head without a gate": (config(markov_head_type="gated"), ("markov_head.gate_proj.weight", "missing")),
    "a confidence head unsaid": (config(enable_confidence_head=False), ("confidence_head.proj.weight",)),
    "an eps of 0": (config(rms_norm_eps=0), ("rms_norm_eps", "0")),
    "rope of two minds": (
        config(rope_theta=10.0), ("rope_theta", "10.0", "10000.0")),
    "rope of an unknown kind": (
        config(rope_parameters={"rope_type": "su", "rope_theta": 1.0}), ("rope_type", "'su'")),
    "rope without its factor": (
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ("factor", "missing")),
    "rope of a negative base": (
        config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), ("rope_theta", "-1")),
    "an activation of another kind": (config(hidden_act="gelu"), ("hidden_act", "'gelu'")),
    "a window below 0": (config(sliding_window=-4, use_sliding_window=True), ("sliding_window", "-4")),
}  # fmt: skip
CASES["an eps that is no number"] = (
    lambda folder: config_text((folder / "config.json").read_text().replace("1e-06", "NaN"))(folder),
    ("rms_norm_eps", "nan"),
)
# Every key of the configuration with a value of a type that it never has.
for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
            "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias", "hidden_act",
            "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):  # fmt: skip
    wrong: Any = {"markov_head_type": 5, "hidden_act": [1]}.get(key, "seven")
    CASES[f"{key} is {wrong!r}"] = (config(**{key: wrong}), ("config.json", key, ascii(wrong)))
    if key not in ("num_key_value_heads", "head_dim", "num_target_layers", "attention_bias", "hidden_act",
                   "confidence_head_with_markov", "rope_parameters"):  # fmt: skip
        CASES[f"{key} is absent"] = (config(**{key: ...}), ("config.json", key, "missing"))


def test_the_table_is_long_enough() -> None:
    assert len(CASES) + len(GGUF_CASES) >= 80


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "received")


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_checkpoint(folder: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(folder)
    refused(folder, words)


def refused(checkpoint: Path, words: tuple[str, ...]) -> None:
    """Export refuses with exit 3 and one message with these words; it wrote nothing, in little time and memory."""
    out, peak = checkpoint.parent / "out", checkpoint.parent / "peak"
    out.mkdir()
    before, begun = listing(checkpoint.parent), time.monotonic()
    command = [sys.executable, "-c", COMMAND, peak, "export", checkpoint, "-o", out / "bundle", "--json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    seconds, memory = time.monotonic() - begun, int(peak.read_text()) * 1024
    peak.unlink()
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 20_000
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["kind"]) == (3, "bad_input")
    assert error["message"] in done.stderr
    for word in (*words, checkpoint.name):
        assert word in error["message"]
    assert listing(checkpoint.parent) == before
    assert seconds < 5
    assert memory < 1 << 30


def listing(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_checkpoint_that_is_a_file(folder: Path) -> None:
    file = folder.parent / "received.safetensors"
    file.write_bytes((folder / "model.safetensors").read_bytes())
    refused(file, ("is a file",))


# The layouts that nest their keys: a wrong type at each, named with its whole path.
NESTED = {
    "specforge": ("dflash_config", "target_layer_ids", "mask_token_id", "sample_from_anchor", "markov_rank",
                  "markov_head_type"),
    "modelopt": ("dflash_config", "shift_label", "use_confidence_head", "target_layer_ids", "markov_rank"),
    "speculators": ("transformer_layer_config", "hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps"),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "key"), [(name, key) for name, (_, *keys) in NESTED.items() for key in keys])
def test_a_wrong_type_in_a_nested_object(tmp_path: Path, layout: str, key: str) -> None:
    drafter_config = make_config(layout)
    folder = write_layout(tmp_path / "received", drafter_config, random_tensors(drafter_config))
    data = json.loads((folder / "config.json").read_text())
    assert key in data[NESTED[layout][0]]
    data[NESTED[layout][0]][key] = {"a": 1}
    (folder / "config.json").write_text(json.dumps(data))
    refused(folder, ("config.json", f"{NESTED[layout][0]}.{key}", "{'a': 1}"))


@pytest.mark.parametrize(("layout", "key"), [(name, keys[0]) for name, keys in NESTED.items()])
@pytest.mark.parametrize("value", [[1], "text", 3], ids=str)
def test_a_nested_object_that_is_none(tmp_path: Path, layout: str, key: str, value: Any) -> None:
    drafter_config = make_config(layout)
    folder = write_layout(tmp_path / "received", drafter_config, random_tensors(drafter_config))
    data = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(data))
    refused(folder, ("config.json", key))


def gguf_bytes(kind: int = 0, dims: tuple[int, ...] = (32,), offset: int = 0, tensors: int = 1) -> bytes:
    """A GGUF file of one tensor."""
    name, key, value = b"output_norm.weight", b"general.architecture", b"dflash"
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1)
    data += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    data += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    data += b"".join(struct.pack("<Q", extent) for extent in dims) + struct.pack("<IQ", kind, offset)
    return data + b"\0" * (-len(data) % 32) + np.ones(32, np.float32).tobytes()


GGUF_CASES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no GGUF": (b"GGML" + bytes(40), ("begin with GGUF",)),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), ("version",)),
    "no tensors": (gguf_bytes(tensors=0), ("holds no tensors",)),
    "2^60 tensors": (gguf_bytes(tensors=HUGE), (str(HUGE), "tensors")),
    "2^60 metadata entries": (b"GGUF" + struct.pack("<IQQ", 3, 1, HUGE), (str(HUGE), "metadata")),
    "a key of 2^60 bytes": (b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, HUGE), (str(HUGE),)),
    "a tensor past the end": (gguf_bytes(offset=HUGE), ("output_norm.weight", str(HUGE)[:6])),
    "a tensor of terabytes": (gguf_bytes(dims=(2**40, 2**40)), ("output_norm.weight", str(2**40))),
    "a tensor of 2^31 dimensions": (gguf_bytes(dims=(1,) * 5), ("output_norm.weight", "5 dimensions")),
    "an unknown type": (gguf_bytes(kind=999), ("output_norm.weight", "999")),
    "cut in the header": (gguf_bytes()[:60], ("60 bytes",)),
    "cut in the data": (gguf_bytes()[:-4], ("output_norm.weight",)),
    "nothing but a tensor": (gguf_bytes(), ("dflash.block_count", "missing")),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_malformed_gguf_file(tmp_path: Path, case: str) -> None:
    data, words = GGUF_CASES[case]
    file = tmp_path / "received.gguf"
    file.write_bytes(data)
    refused(file, words)


def test_a_gguf_array_of_strings_without_an_end(tmp_path: Path) -> None:
    """2^40 empty strings would be walked one by one; the file has no room for them."""
    key = b"tokenizer.ggml.tokens"
    data = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, 1 << 40)
    (tmp_path / "received.gguf").write_bytes(data)
    refused(tmp_path / "received.gguf", ("tokenizer.ggml.tokens", str(1 << 40)))


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_the_other_commands_refuse_the_same(folder: Path, command: str) -> None:
    header(overlapping)(folder)
    output = folder.parent / "out"
    options = ["--to", "speculators", "-o", str(output)] if command == "convert" else []
    code = "import dspark.cli.main as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(folder), *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "overlaps" in done.stderr
    assert not output.exists()


def sparse_checkpoint(folder: Path, gigabytes: int) -> None:
    """A checkpoint whose embedding alone has this size, as a file of holes."""
    rows = gigabytes * 10**9 // (32 * 4)
    make_checkpoint(folder, shared=False)
    config(vocab_size=rows)(folder)
    entries, _ = weights(folder)
    end = 0
    for name in entries.keys() - {"__metadata__"}:
        if "markov_w" in name:
            entries[name]["shape"][0] = rows
        extent = int(np.prod(entries[name]["shape"])) * 4
        entries[name]["data_offsets"] = [end, end + extent]
        end += extent
    for name in ("embed_tokens.weight", "lm_head.weight"):
        entries[name] = {"dtype": "F32", "shape": [rows, 32], "data_offsets": [end, end + rows * 32 * 4]}
        end += rows * 32 * 4
    put(folder, entries)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size + end)


def test_preflight_reads_headers_only(tmp_path: Path) -> None:
    """Everything wrong in 30 GB is told by the headers."""
    folder = tmp_path / "received"
    sparse_checkpoint(folder, 15)
    assert (folder / "model.safetensors").stat().st_size > 30e9
    header(lambda entries: {**entries, "bogus.weight": entries.pop("norm.weight")})
    config(block_size=0, mask_token_id=-3)(folder)
    refused(folder, ("block_size is 0", "mask_token_id -3"))
