"""How commands open a checkpoint: by name, with what the user settles, or by a probe of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common import Console

if TYPE_CHECKING:
    from pathlib import Path

    from dspark.drafter.checkpoint import Checkpoint
    from dspark.drafter.errors import BadInputError
    from dspark.drafter.formats.reading import Settled


def open_for(
    console: Console, name: str, target: str | None, settled: Settled, probe: bool = False, warn: bool = True
) -> tuple[Checkpoint, Path | None]:
    """The checkpoint, checked against its target where one is given; what deserves a word goes to stderr.

    Returns:
        the checkpoint, and the target's folder.
    """
    from dspark.drafter.checkpoint import open_checkpoint
    from dspark.drafter.errors import BadInputError, UsageError
    from dspark.drafter.hub import local_path
    from dspark.drafter.target import identity_differences, open_target, tokenizer_identity
    from dspark.runtime.targets import target_folder

    if probe and target is None:
        raise UsageError("--probe needs the target that the drafter was trained for; give --target")
    path = local_path(name, "checkpoint")
    try:
        opened = open_checkpoint(path, settled=settled)  # its own faults first: a target may take long to fetch
    except BadInputError as error:
        if not probe or not error.details.get("settle_with"):
            raise
        settled = _probed(console, path, str(target), settled, error)
        opened = open_checkpoint(path, settled=settled)
    folder = None
    if target is not None:
        folder = target_folder(target)
        opened = open_checkpoint(path, open_target(folder), settled)
        own, found = tokenizer_identity(path), tokenizer_identity(folder)
        faults, warnings = identity_differences(own, found, str(folder))
        if faults:
            raise BadInputError(f"{path}: " + "; ".join(faults), faults=faults)
        for warning in warnings:
            console.note(f"warning: {warning}")
    for warning in opened.warnings if warn else ():
        console.note(f"warning: {warning}")
    return opened, folder


def _probed(console: Console, path: Path, target: str, settled: Settled, error: BadInputError) -> Settled:
    from dspark.runtime.probe import probe_readings
    from dspark.runtime.targets import target_folder

    result = probe_readings(path, target_folder(target), settled, error)
    console.note(result.text)
    return result.settled
