"""``dspark-export inspect``: what a path is, in one screen or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Console, command as dspark_command, table


@dspark_command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
def command(console: Console, path: Path) -> None:
    """Say what PATH is: a drafter's checkpoint, or a bundle.

    \b
    Example:
      dspark-export inspect examples/smollm2-dspark-2l
    """
    data = _bundle(path) if (path / "manifest.json").exists() else _checkpoint(path)
    lines = [[key, _text(value)] for key, value in data.items() if not isinstance(value, dict)]
    console.result(data, table(lines))


def _checkpoint(path: Path) -> dict[str, Any]:
    from dspark.drafter.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    warnings = [f"{name} is not in the checkpoint; it is taken from the target" for name in checkpoint.missing_shared]
    return {"kind": "checkpoint", **_drafter(checkpoint.config), "parameters": checkpoint.parameters(),
            "warnings": warnings}  # fmt: skip


def _bundle(path: Path) -> dict[str, Any]:
    from dspark.export.bundle import open_bundle

    bundle = open_bundle(path)
    manifest = bundle.manifest
    parameters = sum(_size(weight["shape"]) for weight in manifest["weights"])
    return {
        "kind": "bundle",
        **_drafter(bundle.config),
        "parameters": parameters,
        "warnings": [],
        **{key: manifest["export"][key] for key in ("dtype", "batch", "context", "prefill", "markov", "opset")},
        "checkpoint_sha256": manifest["checkpoint"]["sha256"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "parity": "passed" if manifest["parity"]["passed"] else "failed",
        "graphs": [graph["file"] for graph in manifest["graphs"]],
        "target": manifest["target"],
    }


def _drafter(config: Any) -> dict[str, Any]:
    return {
        "layout": config.layout,
        "block_size": config.block_size,
        "proposals": config.proposals,
        "sample_from_anchor": config.sample_from_anchor,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
    }


def _size(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
