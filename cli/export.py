"""``dspark-export export``: checkpoint to bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from .common import Console, checkpoint_options, command as dspark_command, numbers, settled, table

if TYPE_CHECKING:
    from dspark.export.quantization import Quantization

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
@click.option("--opset", type=int, help="[default: 20, or 21 with --quantize]")
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4"]),
    help="Matrices of layers and head; what it costs is measured with --target and --prompts.",
)
@click.option(
    "--quantize-block",
    type=click.Choice(["64", "128"]),
    default="64",
    show_default=True,
    help="Weights that share a scale.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines, for --quantize.")
@click.option(
    "--max-tau-loss",
    type=click.FloatRange(0, 100),
    default=5.0,
    show_default=True,
    help="Percent of acceptance length that --quantize may cost.",
)
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
    opset: int | None,
    quantize: str | None,
    quantize_block: str,
    prompts: Path | None,
    max_tau_loss: float,
    dry_run: bool,
    force: bool,
    **open_values: Any,
) -> None:
    """Export CHECKPOINT to a bundle of ONNX graphs, proven against the reference model.

    A bundle whose parity does not hold, or that quantisation costs too much, is not written (exit code 4).

    \b
    Example:
      dspark-export export examples/smollm2-dspark-2l --target smollm2 -o bundle
      dspark-export export examples/smollm2-dspark-2l --target smollm2 -o bundle \\
          --quantize int8 --prompts examples/prompts.jsonl
    """
    from dspark.engines.backend import backend_from_name
    from dspark.export.bundle import check_bundle_output
    from dspark.export.contract import ExportOptions, default_context

    from .checkpoints import open_for
    from .prompts import read_prompts

    how = _quantization(quantize, quantize_block, target, prompts)
    check_bundle_output(output, force)
    asked = [] if prompts is None else read_prompts(prompts)
    opened, folder = open_for(console, checkpoint, target, settled(**open_values), probe)
    options = ExportOptions(
        dtype=_DTYPES[dtype],  # type: ignore[arg-type]
        batch=numbers("batch", batch),
        context=default_context(opened.config) if context is None else numbers("context", context),
        prefill=prefill,
        markov=markov,
        opset=opset or (20 if how is None else 21),
        quantization=how,
    )
    from dspark.export.exporter import export_bundle, plan_export  # torch: seconds, so after all that may be refused

    plan = plan_export(opened, options)
    if dry_run:
        data = plan.to_json()
        files = "\n".join(graph["file"] for graph in data["graphs"])
        console.result(data, f"{files}\ngraphs/weights.data ({data['weight_bytes'] / 1e6:.1f} MB)")
        return
    backend = backend_from_name("onnxruntime")
    trial = None
    if how is not None:
        from .acceptance import acceptance_trial

        assert folder is not None
        trial = acceptance_trial(console, backend, folder, asked, opened.config, options, max_tau_loss / 100)
    bundle, report = export_bundle(opened, output, options, backend, force, console.progress, trial)
    parity = report.to_json()
    parts = [parity_table(parity), f"{bundle.path}: complete, parity holds"]
    data = {"bundle": str(output), **parity_json(parity)}
    if how is not None:
        data["quantization"] = bundle.manifest["quantization"]
        parts.insert(1, quantization_table(data["quantization"]))
    console.result(data, "\n\n".join(parts))


def _quantization(kind: Any, block: str, target: str | None, prompts: Path | None) -> Quantization | None:
    """What --quantize asks for, with everything that it needs; before any work."""
    from dspark.drafter.errors import UsageError
    from dspark.export.quantization import Quantization

    if kind is None:
        if prompts is not None:
            raise UsageError("--prompts are what --quantize is measured with; give both, or neither")
        return None
    missing = [name for name, value in (("--target", target), ("--prompts", prompts)) if value is None]
    if missing:
        raise UsageError(f"--quantize measures what it costs in acceptance; give {' and '.join(missing)}")
    return Quantization(kind, int(block))


def quantization_table(record: dict[str, Any]) -> str:
    """What quantisation costs: bytes, acceptance length by domain, and the outputs of the reference."""
    before, after = record["bytes"]["before"], record["bytes"]["after"]
    tau = [["τ", "prompts", "before", "after", "loss", "rounds before", "after", "equal to plain"]]
    for row in record["tau"]:
        ties = f", {row['near_ties']} near ties" if row["near_ties"] else ""
        tau.append([
            row["domain"], str(row["prompts"]), f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['loss']:.1%}",
            str(row["rounds_before"]), str(row["rounds_after"]), f"{row['equal_to_plain']}{ties}",
        ])  # fmt: skip
    cost = [["cost by", "output", "rounds", "max", "rms", "rms of output", "agreement"]]
    for row in record["cost"]:
        ids = "agreement" in row
        cost.append([
            row["graph"], row["output"], str(row["rounds"]),
            *(["", "", ""] if ids else [f"{row[key]:.2e}" for key in ("max_abs", "rms", "magnitude")]),
            f"{row['agreement']:.3f}" if ids else "",
        ])  # fmt: skip
    head = (
        f"{record['kind']} in blocks of {record['block']}: {len(record['tensors'])} matrices, "
        f"weights {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after"
    )
    return f"{head}\n\n{table(tau)}\n\n{table(cost)}"


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
