"""``dspark-export inspect``: what a path is, in one screen or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Console, checkpoint_options, command as dspark_command, settled, table


@dspark_command("inspect")
@click.argument("path")
@click.option("--target", help="Folder, hub id, or smollm2; checked against the drafter.")
@click.option("--probe", is_flag=True, help="Let the target decide what the checkpoint leaves open.")
@click.option("--scan", is_flag=True, help="Read every weight too, and name rows with NaN or Inf.")
@checkpoint_options
def command(console: Console, path: str, target: str | None, probe: bool, scan: bool, **open_values: Any) -> None:
    """Say what PATH is: a drafter's checkpoint in any layout that is read, a bundle, or a folder of engines.

    Of a checkpoint it reads configuration and headers only, and lists everything that is wrong at once (exit code 3).
    Of a bundle and its engines it checks every hash (exit code 6).

    \b
    Example:
      dspark-export inspect examples/smollm2-dspark-2l
    """
    if (Path(path) / "engine.json").exists():
        data = _engines(Path(path))
        rows = [[key, _text(value)] for key, value in data.items() if not isinstance(value, dict) and key != "warnings"]
    elif (Path(path) / "manifest.json").exists():
        data = _bundle(Path(path))
        rows = [[key, _text(value)] for key, value in data.items() if not isinstance(value, dict) and key != "warnings"]
    else:
        data = _checkpoint(console, path, target, probe, scan, settled(**open_values))
        origins = data["origins"]
        rows = [
            [key, _text(value), origins.get(_CANONICAL.get(key, key), "").removeprefix(f"{path}/")]
            for key, value in data.items()
            if not isinstance(value, dict) and key != "warnings"
        ]
    notes = "".join(f"\nwarning: {warning}" for warning in data["warnings"])
    console.result(data, table(rows) + notes)


_CANONICAL = {"proposals": "sample_from_anchor"}


def _checkpoint(
    console: Console, name: str, target: str | None, probe: bool, scan: bool, open_values: Any
) -> dict[str, Any]:
    from .checkpoints import open_for

    checkpoint, _ = open_for(console, name, target, open_values, probe, warn=False)
    if scan:
        _scan(console, checkpoint)
    absent = [f"{name} is not in the checkpoint; it is taken from the target" for name in checkpoint.missing_shared]
    return {
        "kind": "checkpoint",
        **_drafter(checkpoint.config),
        "parameters": checkpoint.parameters(),
        "tensors": len(checkpoint.folder.entries),
        "dtypes": sorted({entry.dtype for entry in checkpoint.folder.entries.values()}),
        "warnings": [*absent, *checkpoint.warnings],
        "config": checkpoint.config.to_json(),
        "origins": checkpoint.origins,
        "target": checkpoint.target_said,
    }


def _scan(console: Console, checkpoint: Any) -> None:
    from dspark.drafter.errors import BadInputError
    from dspark.drafter.scan import non_finite_rows

    faults = [
        f"{name} holds NaN or Inf, in rows {', '.join(map(str, rows))}"
        for name, rows in non_finite_rows(checkpoint, console.progress)
    ]
    if faults:
        raise BadInputError(f"{checkpoint.path}: {'; '.join(faults)}", faults=faults)


def _bundle(path: Path) -> dict[str, Any]:
    from dspark.engines.store import engine_sets
    from dspark.export.bundle import open_bundle

    bundle = open_bundle(path)
    sets = engine_sets(bundle)
    for engines in sets:
        engines.check(bundle)
    manifest = bundle.manifest
    parameters = sum(_size(weight["shape"]) for weight in manifest["weights"] if _is_parameter(weight))
    return {
        "kind": "bundle",
        **_drafter(bundle.config),
        "parameters": parameters,
        "warnings": manifest["checkpoint"]["warnings"],
        **{key: manifest["export"][key] for key in ("dtype", "batch", "context", "prefill", "markov", "opset")},
        **_quantization(manifest),
        "checkpoint_sha256": manifest["checkpoint"]["sha256"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "parity": "passed" if manifest["parity"]["passed"] else "failed",
        "graphs": [graph["file"] for graph in manifest["graphs"]],
        "engines": [f"{engines.name} ({engines.version}, {engines.size / 1e6:.1f} MB)" for engines in sets],
        "config": bundle.config.to_json(),
        "target": manifest["target"],
    }


def _engines(path: Path) -> dict[str, Any]:
    from dspark.engines.store import open_engine_set
    from dspark.export.bundle import MANIFEST, open_bundle

    engines = open_engine_set(path)
    home = path.resolve().parents[2]
    inside = (home / MANIFEST).is_file()
    if inside:
        engines.check(open_bundle(home))
    else:
        engines.check_files()
    data = engines.to_json()
    return {
        "kind": "engines",
        "name": engines.name,
        **{key: data[key] for key in ("backend", "sku", "versions", "options")},
        "compute_capabilities": data["sku"]["compute_capabilities"],
        "version": engines.version,
        "bytes": engines.size,
        "seconds": round(sum(entry["seconds"] for entry in engines.engines), 3),
        "of_bundle": str(home) if inside else None,
        "files": [f"{entry['file']} ({entry['bytes'] / 1e6:.1f} MB)" for entry in engines.engines],
        "warnings": [] if inside else ["these engines lie outside their bundle: their graphs were not compared"],
    }


def _is_parameter(weight: dict[str, Any]) -> bool:
    from dspark.export.quantization import is_scales

    return weight["dtype"] != "int64" and not is_scales(weight["name"])


def _quantization(manifest: dict[str, Any]) -> dict[str, Any]:
    """The essentials of a quantised bundle: the rest is in its manifest."""
    if "quantization" not in manifest:
        return {"quantization": "none"}
    record = manifest["quantization"]
    overall = record["tau"][0]
    return {
        "quantization": record["kind"],
        "quantization_block": record["block"],
        "quantized_tensors": len(record["tensors"]),
        "weight_bytes_before": record["bytes"]["before"],
        "weight_bytes_after": record["bytes"]["after"],
        "tau_before": overall["before"],
        "tau_after": overall["after"],
    }


def _drafter(config: Any) -> dict[str, Any]:
    windows = sorted({window for window in config.layer_windows if window})
    return {
        "layout": config.layout,
        "architecture": config.architecture,
        "block_size": config.block_size,
        "proposals": config.proposals,
        "sample_from_anchor": config.sample_from_anchor,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "rope": config.rope.kind,
        "layer_windows": windows,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
    }


def _size(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if value is None:
        return "not stated"
    if isinstance(value, float):
        return f"{value:.3f}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
