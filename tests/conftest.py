"""Fixtures that several rooms share; what is slow to make is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import make_checkpoint, make_target

from dspark.drafter.checkpoint import open_checkpoint
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle

# Small drafters: a second thread costs more than it brings, and waits long where it shares its core.
torch.set_num_threads(1)

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Golden values and data that lie beside a checkout; tests that need them are skipped without."""
    if not (SHARED / "golden").is_dir():
        pytest.skip("no ../shared beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "drafter")


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def bundle(checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The default drafter in two capacities, batch 1 and 3."""
    output = tmp_path_factory.mktemp("bundle") / "bundle"
    options = ExportOptions(batch=(1, 3), context=(64, 192), prefill=16)
    exported, _ = export_bundle(
        open_checkpoint(checkpoint_folder), output, options, backend_from_name("onnxruntime", threads=1)
    )
    return exported
