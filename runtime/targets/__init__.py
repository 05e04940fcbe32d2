"""Targets: language models that verify drafts. A name becomes a local folder here."""

from __future__ import annotations

import re
from pathlib import Path

from dspark.drafter.errors import BadInputError, NotAvailableError

DEMO = "smollm2"


def target_folder(name: str) -> Path:
    """The local folder of a target: a path, ``smollm2`` (the demo target), or a hub id.

    Raises:
        BadInputError: no such folder, and not a hub id.
        NotAvailableError: the demo target's wheel is not installed, or the hub cannot be reached.
    """
    if Path(name).exists():
        return Path(name)
    if name == DEMO:
        from .smollm2 import demo_target_folder

        return demo_target_folder()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _hub_folder(name)
    raise BadInputError(f"{name}: no such folder; a target is a folder, a hub id, or {DEMO!r}", target=name)


def _hub_folder(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise NotAvailableError("huggingface_hub is not installed; pip install huggingface_hub") from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client has many classes for: offline, unknown, no access
        raise NotAvailableError(
            f"{name}: no such folder here, and the hub did not give it ({type(error).__name__}); "
            "download it first and give its folder"
        ) from error
