"""``dspark-export validate``: a bundle's files and its parity, again, on any backend."""

from __future__ import annotations

from pathlib import Path

import click

from .common import Console, command as dspark_command
from .export import parity_json, parity_table


@dspark_command("validate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--checkpoint", help="Compare with this checkpoint's weights.")
@click.option("--target", help="Target of a checkpoint without embedding or head.")
@click.option("--backend", default="onnxruntime", show_default=True, help="onnxruntime or onnxruntime-cuda.")
def command(console: Console, bundle: Path, checkpoint: str | None, target: str | None, backend: str) -> None:
    """Check every file of BUNDLE against its hash, and its graphs against the reference model.

    Without --checkpoint the reference model takes its weights from the bundle itself.

    \b
    Example:
      dspark-export validate bundle --checkpoint examples/smollm2-dspark-2l --target smollm2
    """
    import dataclasses

    from dspark.drafter.errors import BadInputError, IntegrityError
    from dspark.drafter.formats.reading import Settled
    from dspark.engines.backend import backend_from_name
    from dspark.export.bundle import open_bundle

    from .checkpoints import open_for

    opened = open_bundle(bundle)
    load = opened.load
    if checkpoint is not None:
        config = opened.config
        source, _ = open_for(console, checkpoint, target, Settled(config.sample_from_anchor, config.target_layer_ids))
        if source.config.num_target_layers is None:  # known by the target that was given to the export
            known = dataclasses.replace(source.config, num_target_layers=config.num_target_layers)
            source = dataclasses.replace(source, config=known)
        if source.config != config:
            raise BadInputError(f"{checkpoint}: is of another configuration than the drafter in {bundle}")
        if source.sha256() != opened.manifest["checkpoint"]["sha256"]:
            raise IntegrityError(
                f"{bundle}: was exported from {opened.manifest['checkpoint']['sha256']}, "
                f"{checkpoint} is {source.sha256()}"
            )
        load = source.load
    # torch: seconds, so after all that may be refused
    from dspark.export.exporter import prove, references_of, rounding_reference
    from dspark.export.graphs import check_identity

    check_identity(opened)
    # The bundle's own weights are quantised already
    references = references_of(opened.config, load, opened.quantization if checkpoint else None, opened.dtype)
    rounding = rounding_reference(references.wanted, opened.dtype, opened.load)
    report = prove(references, opened.graphs, rounding, backend_from_name(backend), console.progress)
    parity = report.to_json()
    text = f"{parity_table(parity)}\n\n{bundle}: files are intact, parity holds"
    console.result({"bundle": str(bundle), **parity_json(parity)}, text)
