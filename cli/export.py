"""``dspark-export export``: checkpoint to bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from .common import Console, checkpoint_options, command as dspark_command, numbers, settled, table

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dspark_command("export")
@click.argument("checkpoint")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--target", help="Folder, hub id, or smollm2; needed where the checkpoint has no embedding or head.")
@click.option("--probe", is_flag=True, help="Let the target decide what the checkpoint leaves open.")
@checkpoint_options
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="fp32", show_default=True)
@click.option("--batch", default="1", show_default=True, help="Slots per engine, several with commas.")
@click.option("--context", help="Context capacities, ascending, with commas.  [default: 512,2048,8192]")
@click.option("--prefill", type=int, default=256, show_default=True, help="Rows of the large context graph.")
@click.option("--markov", type=click.Choice(["loop", "unrolled"]), default="loop", show_default=True)
@click.option("--opset", type=int, default=20, show_default=True)
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be written, write nothing.")
@click.option("--force", is_flag=True, help="Replace the output.")
def command(
    console: Console,
    checkpoint: str,
    output: Path,
    target: str | None,
    probe: bool,
    dtype: str,
    batch: str,
    context: str | None,
    prefill: int,
    markov: Literal["loop", "unrolled"],
    opset: int,
    dry_run: bool,
    force: bool,
    **open_values: Any,
) -> None:
    """Export CHECKPOINT to a bundle of ONNX graphs, proven against the reference model.

    A bundle whose parity does not hold is not written (exit code 4).

    \b
    Example:
      dspark-export export examples/smollm2-dspark-2l --target smollm2 -o bundle
    """
    from dspark.engines.backend import backend_from_name
    from dspark.export.bundle import check_bundle_output
    from dspark.export.contract import ExportOptions, default_context

    from .checkpoints import open_for

    check_bundle_output(output, force)
    opened, _ = open_for(console, checkpoint, target, settled(**open_values), probe)
    options = ExportOptions(
        dtype=_DTYPES[dtype],  # type: ignore[arg-type]
        batch=numbers("batch", batch),
        context=default_context(opened.config) if context is None else numbers("context", context),
        prefill=prefill,
        markov=markov,
        opset=opset,
    )
    from dspark.export.exporter import export_bundle, plan_export  # torch: seconds, so after all that may be refused

    if dry_run:
        plan = plan_export(opened, options).to_json()
        files = "\n".join(graph["file"] for graph in plan["graphs"])
        console.result(plan, f"{files}\ngraphs/weights.data ({plan['weight_bytes'] / 1e6:.1f} MB)")
        return
    backend = backend_from_name("onnxruntime")
    bundle, report = export_bundle(opened, output, options, backend, force, console.progress)
    parity = report.to_json()
    text = f"{parity_table(parity)}\n\n{bundle.path}: complete, parity holds"
    console.result({"bundle": str(output), **parity_json(parity)}, text)


def parity_table(parity: dict[str, Any]) -> str:
    """The parity report as a table of one line per output."""
    rows = [["graph", "output", "rounds", "max error", "tolerance", "agreement", "common prefix", ""]]
    for row in parity["outputs"]:
        ids = "agreement" in row
        rows.append([
            row["graph"], row["output"], str(row["rounds"]),
            "" if ids else f"{row['max_abs']:.2e}", f">= {row['tolerance']:.2f}" if ids else f"{row['tolerance']:.2e}",
            f"{row['agreement']:.3f}" if ids else "", f"{row['common_prefix']:.3f}" if ids else "",
            "ok" if row["passed"] else "FAILED",
        ])  # fmt: skip
    shadow = ", bf16 graphs through their fp32 shadow" if parity["fp32_shadow"] else ""
    return f"reference against {parity['runner']}{shadow}\n{table(rows)}"


def parity_json(parity: dict[str, Any]) -> dict[str, Any]:
    """The parity report under the keys that other tools rely on (DESIGN §8)."""
    return {"parity": parity["outputs"], "runner": parity["runner"], "fp32_shadow": parity["fp32_shadow"]}
