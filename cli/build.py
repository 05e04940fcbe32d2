"""``dspark-export build``: engines of a bundle, per SKU, into its store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import Console, command as dspark_command, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark.engines.build import Built
    from dspark.engines.preflight import Preflight
    from dspark.engines.sku import Sku


@dspark_command("build")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", required=True, type=click.Choice(["onnxruntime", "tensorrt", "tensorrt-rtx"]))
@click.option(
    "--compute-capability",
    "capabilities",
    multiple=True,
    metavar="X.Y",
    help="A GPU to build for, e.g. 8.9; several with commas or by repeating. Needs tensorrt-rtx.",
)
@click.option("--portable", is_flag=True, help="One set of plans for all compute capabilities named (tensorrt-rtx).")
@click.option("--workspace", metavar="SIZE", help="Most scratch memory a plan may use, e.g. 512M or 4G.")
@click.option("--optimization-level", type=click.IntRange(0, 5), help="Builder effort.  [default: TensorRT's own]")
@click.option("--version-compatible", is_flag=True, help="Plans that later versions of TensorRT load too.")
@click.option(
    "--hardware-compatible",
    type=click.Choice(["ampere_plus", "same_compute_capability"]),
    help="Plans that other GPUs load too, and run slower.",
)
@click.option("--strip", is_flag=True, help="Plans without weights; they are refitted from the bundle when loaded.")
@click.option("--tf32", is_flag=True, help="Let fp32 products round to TF32: faster, and parity may not hold.")
@click.option("--verbose", is_flag=True, help="All that the builder says, in the log beside the plans.")
@click.option("--dry-run", is_flag=True, help="Check the graphs, say what would be built, build nothing.")
@click.option("--force", is_flag=True, help="Replace engines that are there.")
def command(
    console: Console,
    bundle: Path,
    backend: str,
    capabilities: tuple[str, ...],
    portable: bool,
    workspace: str | None,
    dry_run: bool,
    force: bool,
    **options: Any,
) -> None:
    """Build the engines of BUNDLE for GPUs that need not be here, or for this machine, into BUNDLE/engines.

    Every graph is checked first against what the backend is known to refuse. Engines of a SKU are complete or absent;
    building again what is there does nothing.

    \b
    Example:
      dspark-export build bundle --backend tensorrt-rtx --compute-capability 8.6,8.9,12.0
    """  # fmt: skip
    from dspark.engines.build import (
        BuildOptions,
        build_engines,
        preflights,
        require_preflight,
        said_once,
        skus_to_build,
    )
    from dspark.engines.sku import capability_from_text, gpu_without_device
    from dspark.export.bundle import open_bundle

    chosen = BuildOptions(backend, None if workspace is None else _bytes(workspace), **options)  # type: ignore[arg-type]
    named = [capability_from_text(part) for text in capabilities for part in text.split(",")]
    opened = open_bundle(bundle)
    if dry_run:
        skus = [gpu_without_device(named)] if named else []
        checked = preflights(opened, backend, skus)
        console.result({"bundle": str(bundle), **_preflight_json(checked)}, _preflight_text(checked, skus))
        require_preflight(checked)
        return
    skus = skus_to_build(chosen, named, portable)
    checked = preflights(opened, backend, skus)
    for words in said_once(finding for one in checked for finding in one.findings if finding.severity == "warning"):
        console.note(f"warning: {words}")
    require_preflight(checked)
    sets = build_engines(opened, chosen, skus, force, console.progress, console.note)
    data = {"bundle": str(bundle), "sets": [_set_json(one) for one in sets], **_preflight_json(checked)}
    console.result(data, "\n\n".join(_set_text(one) for one in sets))


def _set_json(one: Built) -> dict[str, Any]:
    engines = one.engines
    return {"slug": engines.sku.slug, "path": str(engines.path), "built": one.built, **engines.to_json()}


def _set_text(one: Built) -> str:
    engines = one.engines
    rows = [["graph", "MB", "seconds"]]
    for entry in engines.engines:
        rows.append([Path(entry["graph"]).stem, f"{entry['bytes'] / 1e6:.1f}", f"{entry['seconds']:.1f}"])
    total = f"{engines.size / 1e6:.1f} MB, {sum(entry['seconds'] for entry in engines.engines):.1f} s"
    done = f"complete, {total}" if one.built else f"was built already with the same options, {total}; nothing to do"
    return f"{table(rows)}\n{engines.path}: {engines.backend} {engines.version}, {done}"


def _preflight_json(checked: Sequence[Preflight]) -> dict[str, Any]:
    return {"preflight": [one.to_json() for one in checked]}


def _preflight_text(checked: Sequence[Preflight], skus: Sequence[Sku]) -> str:
    rows = [["graph", "nodes", "weights MB", "activations MB (estimate)", ""]]
    for one in checked:
        words = "; ".join(f"{finding.severity}: {finding.message}" for finding in one.findings) or "nothing against it"
        sizes = (f"{size / 1e6:.1f}" for size in (one.weight_bytes, one.activation_bytes))
        rows.append([one.graph, str(one.nodes), *sizes, words])
    where = ", ".join(sku.slug for sku in skus) or "no compute capability named"
    return f"{table(rows)}\n{where}: nothing was built"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{text!r} is no size like 512M or 4G", param_hint="--workspace")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]
