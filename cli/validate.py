"""``dspark-export validate``: a bundle's files and its parity, again, on any backend."""

from __future__ import annotations

from pathlib import Path

import click

from .common import Console, command as dspark_command
from .export import parity_json, parity_table


@dspark_command("validate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Compare with this checkpoint's weights.")
@click.option("--target", help="Target of a checkpoint without embedding or head.")
@click.option("--backend", default="onnxruntime", show_default=True, help="onnxruntime or onnxruntime-cuda.")
def command(console: Console, bundle: Path, checkpoint: Path | None, target: str | None, backend: str) -> None:
    """Check every file of BUNDLE against its hash, and its graphs against the reference model.

    Without --checkpoint the reference model takes its weights from the bundle itself.

    \b
    Example:
      dspark-export validate bundle --checkpoint examples/smollm2-dspark-2l --target smollm2
    """
    from dspark.drafter.checkpoint import open_checkpoint
    from dspark.drafter.errors import BadInputError, IntegrityError
    from dspark.drafter.target import open_target
    from dspark.engines.backend import backend_from_name
    from dspark.export.bundle import open_bundle
    from dspark.runtime.targets import target_folder

    opened = open_bundle(bundle)
    load = opened.load
    if checkpoint is not None:
        source = open_checkpoint(checkpoint, open_target(target_folder(target)) if target else None)
        if source.config != opened.config:
            raise BadInputError(f"{checkpoint}: is of another configuration than the drafter in {bundle}")
        if source.sha256() != opened.manifest["checkpoint"]["sha256"]:
            raise IntegrityError(
                f"{bundle}: was exported from {opened.manifest['checkpoint']['sha256']}, "
                f"{checkpoint} is {source.sha256()}"
            )
        load = source.load
    from dspark.drafter.model import reference_from_tensors  # torch: seconds, so after all that may be refused
    from dspark.export.exporter import prove
    from dspark.export.graphs import check_identity

    check_identity(opened)
    reference = reference_from_tensors(opened.config, load)
    report = prove(reference, opened.graphs, opened.dtype, backend_from_name(backend), console.progress)
    parity = report.to_json()
    text = f"{parity_table(parity)}\n\n{bundle}: files are intact, parity holds"
    console.result({"bundle": str(bundle), **parity_json(parity)}, text)
