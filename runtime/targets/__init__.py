"""Targets: language models that verify drafts. A name becomes a local folder here."""

from __future__ import annotations

from pathlib import Path

from dspark.drafter.hub import local_path

DEMO = "smollm2"


def target_folder(name: str) -> Path:
    """The local folder of a target: a path, ``smollm2`` (the demo target), or a hub id.

    Raises:
        BadInputError: no such folder, and not a hub id.
        NotAvailableError: the demo target's wheel is not installed, or the hub cannot be reached.
    """
    if name == DEMO and not Path(name).exists():
        from .smollm2 import demo_target_folder

        return demo_target_folder()
    return local_path(name, "target")
