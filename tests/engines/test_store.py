"""The engine store: what is believed of a set of engines, and who may write it."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
from drafters import make_target
from fake_gpu import write_fake_plans

from dspark.cli.main import main
from dspark.drafter.errors import IntegrityError
from dspark.engines.sku import Sku, capability_from_text, gpu_without_device, this_cpu
from dspark.engines.store import engine_sets, locked, open_engine_set
from dspark.export.bundle import Bundle, open_bundle


@pytest.fixture
def copied(bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << place % 8
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["engine.json", "block-b1-c64.plan"])
def test_a_flipped_byte_is_exit_6_from_every_command(
    copied: Bundle, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_fake_plans(copied, gpu_without_device([(8, 9)]))
    target = make_target(tmp_path / "target")
    path = str(copied.path)
    commands = {
        "inspect": ["inspect", path],
        "inspect of the engines": ["inspect", str(folder)],
        "validate": ["validate", path],
        "generate": ["generate", path, "--target", str(target), "--prompt", "x", "--backend", "tensorrt"],
    }
    file = folder / name
    intact = file.read_bytes()
    places = random.Random(0).sample(range(len(intact)), 20)
    for place in [0, len(intact) - 1, *places]:
        flip(file, place)
        for command, words in commands.items():
            with pytest.raises(SystemExit) as ended:
                main(words)
            said = capsys.readouterr().err
            assert ended.value.code == 6, (command, place, said)
            assert str(file) in said
        file.write_bytes(intact)
    for words in (commands["inspect"], commands["inspect of the engines"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code


@pytest.mark.parametrize("how", ["missing plan", "missing record", "short plan", "other schema", "not JSON", "empty"])
def test_what_is_not_whole_is_refused(copied: Bundle, how: str) -> None:
    folder = write_fake_plans(copied, gpu_without_device([(8, 9)]))
    record, plan = folder / "engine.json", folder / "context-b1-n6.plan"
    match how:
        case "missing plan":
            plan.unlink()
        case "missing record":
            record.unlink()
        case "short plan":
            plan.write_bytes(plan.read_bytes()[:-1])
        case "other schema":
            data = json.loads(record.read_text())
            record.write_text(json.dumps({**data, "schema_version": 9}, indent=1) + "\n")
        case "not JSON":
            record.write_text("[")
        case "empty":
            record.write_text("")
    with pytest.raises(IntegrityError) as caught:
        [engines.check(copied) for engines in engine_sets(copied)]
    assert caught.value.exit_code == 6


def test_a_killed_build_leaves_nothing_that_is_looked_at(copied: Bundle) -> None:
    folder = write_fake_plans(copied, gpu_without_device([(8, 9)]))
    (folder.parent / ".tensorrt-rtx.1.partial").mkdir()
    (folder.parent / ".tensorrt-rtx.1.partial" / "half.plan").write_text("x")
    assert [engines.name for engines in engine_sets(copied)] == ["sm89/tensorrt"]


def test_a_record_keeps_everything(copied: Bundle) -> None:
    sku = Sku("nvidia", "NVIDIA H200", ((9, 0),), 141 << 30, 700.0, "580.65", "13.0")
    engines = open_engine_set(write_fake_plans(copied, sku, hardware_compatible="ampere_plus"))
    assert engines.sku == sku
    assert engines.name == "nvidia-h200-sm90/tensorrt"
    assert engines.options["hardware_compatible"] == "ampere_plus"
    (block,) = (entry for entry in engines.engines if entry["file"] == "block-b3-c192.plan")
    assert block["inputs"] == copied.graph("block", 3, 192).spec.to_json()["inputs"]


@pytest.mark.parametrize(
    ("sku", "slug"),
    [
        (Sku("nvidia", "NVIDIA H200", ((9, 0),)), "nvidia-h200-sm90"),
        (Sku("nvidia", "NVIDIA GeForce RTX 4090", ((8, 9),)), "nvidia-rtx-4090-sm89"),
        (Sku("nvidia", "Tesla T4", ((7, 5),)), "nvidia-tesla-t4-sm75"),
        (gpu_without_device([(8, 0), (12, 0)]), "sm80-sm120"),
        (Sku("amd", "AMD EPYC 9654 96-Core Processor", cores=2), "cpu-amd-epyc-9654-2c"),
        (Sku("intel", "Intel(R) Xeon(R) Platinum 8581C CPU @ 2.60GHz", cores=8), "cpu-intel-xeon-platinum-8581c-8c"),
        (Sku("cpu", None, machine="aarch64", cores=4), "cpu-aarch64-4c"),
    ],
)
def test_slugs(sku: Sku, slug: str) -> None:
    assert sku.slug == slug
    assert Sku.from_json(json.loads(json.dumps(sku.to_json()))) == sku


def test_this_cpu_is_known() -> None:
    cpu = this_cpu()
    assert cpu.cores
    assert cpu.machine
    assert cpu.slug.startswith("cpu-")
    assert capability_from_text("12.0") == (12, 0)


def _hold(folder: Path, log: Path, seconds: float) -> None:
    with locked(folder):
        with log.open("a") as stream:
            stream.write("in\n")
        time.sleep(seconds)
        (folder.parent / "kept").mkdir(exist_ok=True)
        with log.open("a") as stream:
            stream.write("out\n")


def test_one_process_at_a_time_holds_a_sku(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "engines" / "sm89" / "tensorrt"
    context = multiprocessing.get_context("fork")
    holders = [context.Process(target=_hold, args=(folder, log, 0.2)) for _ in range(4)]
    for holder in holders:
        holder.start()
    for holder in holders:
        holder.join()
    assert log.read_text().split() == ["in", "out"] * 4


def test_a_lock_leaves_no_folder_where_nothing_was_built(tmp_path: Path) -> None:
    with locked(tmp_path / "engines" / "sm89" / "tensorrt"):
        pass
    assert list(tmp_path.iterdir()) == []
