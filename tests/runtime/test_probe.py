"""The probe decides what the target's text shows, and refuses where it shows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drafters import make_config, random_tensors, write_layout

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.convert import convert
from dspark.drafter.errors import BadInputError
from dspark.drafter.formats.reading import OPEN
from dspark.drafter.target import open_target
from dspark.runtime.probe import probe_readings
from dspark.runtime.targets import target_folder


def without_flag(folder: Path) -> Path:
    file = folder / "config.json"
    data = json.loads(file.read_text())
    del data["sample_from_anchor"]
    file.write_text(json.dumps(data))
    return folder


def refusal(folder: Path) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(folder)
    return caught.value


def test_random_weights_show_nothing(tmp_path: Path, target_path: Path) -> None:
    config = make_config("speculators")
    folder = without_flag(write_layout(tmp_path / "drafter", config, random_tensors(config)))
    with pytest.raises(BadInputError, match="no reading is clearly above chance") as caught:
        probe_readings(folder, target_path, OPEN, refusal(folder))
    assert [item["reading"] for item in caught.value.details["probe"]] == [
        "--sample-from-anchor yes",
        "--sample-from-anchor no",
    ]


def test_what_no_text_decides_stays_refused(tmp_path: Path, target_path: Path) -> None:
    """Layer ids are never tried out; and a fault beside the open flag is told first."""
    config = make_config("speculators")
    folder = without_flag(write_layout(tmp_path / "drafter", config, random_tensors(config)))
    file = folder / "config.json"
    data = json.loads(file.read_text())
    for broken in ({"aux_hidden_state_layer_ids": None}, {"mask_token_id": "130"}):
        file.write_text(json.dumps(data | broken))
        error = refusal(folder)
        with pytest.raises(BadInputError) as caught:
            probe_readings(folder, target_path, OPEN, error)
        assert caught.value is error


@pytest.mark.demo
def test_a_real_drafter_is_decided(tmp_path: Path) -> None:
    target = target_folder("smollm2")
    shipped = Path(__file__).parents[2] / "examples" / "smollm2-dspark-2l"
    convert(open_checkpoint(shipped, open_target(target)), "modelopt", tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    data = json.loads(file.read_text())
    del data["dflash_config"]["shift_label"]
    file.write_text(json.dumps(data))
    result = probe_readings(tmp_path / "drafter", target, OPEN, refusal(tmp_path / "drafter"))
    assert result.settled.sample_from_anchor is True
    right, wrong = result.readings
    assert right.rate > wrong.rate > result.chance
    assert right.backbone_rate > 1.5 * wrong.backbone_rate
