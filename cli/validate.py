"""``dspark-export validate``: a bundle's files and its parity, again, on any backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Console, backend_option, command as dspark_command
from .export import parity_json, parity_table


@dspark_command("validate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--checkpoint", help="Compare with this checkpoint's weights.")
@click.option("--target", help="Target of a checkpoint without embedding or head.")
@backend_option
def command(console: Console, bundle: Path, checkpoint: str | None, target: str | None, backend: str) -> None:
    """Check every file of BUNDLE against its hash, engines included, and its graphs against the reference model.

    Without --checkpoint the reference model takes its weights from the bundle itself. With a TensorRT backend its own
    parser reads every graph first; parity then needs the GPU and the engines that were built for it.

    \b
    Example:
      dspark-export validate bundle --checkpoint examples/smollm2-dspark-2l --target smollm2
    """
    import dataclasses

    from dspark.drafter.errors import BadInputError, IntegrityError, NotAvailableError
    from dspark.drafter.formats.reading import Settled
    from dspark.engines.backend import backend_from_name
    from dspark.engines.build import parse_graphs
    from dspark.engines.store import engine_sets
    from dspark.export.bundle import open_bundle

    from .checkpoints import open_for

    opened = open_bundle(bundle)
    sets = engine_sets(opened)
    for engines in sets:
        engines.check(opened)
    data: dict[str, Any] = {"bundle": str(bundle), "engines": [engines.name for engines in sets]}
    intact = f"{bundle}: files are intact" + (f", engines of {', '.join(data['engines'])} too" if sets else "")
    if backend.startswith("tensorrt"):
        data["parsed"] = parse_graphs(opened, backend, console.progress)  # type: ignore[arg-type]
        intact += f", the {backend} parser takes all {len(data['parsed'])} graphs"
        try:
            runner = backend_from_name(backend, bundle=opened)
        except NotAvailableError as error:
            data |= {"parity": None, "parity_not_run": error.message}
            console.result(data, f"{intact}; parity on {backend} was not run: {error.message}")
            return
    else:
        runner = backend_from_name(backend, bundle=opened)
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
    report = prove(references, opened.graphs, rounding, runner, console.progress)
    parity = report.to_json()
    console.result(data | parity_json(parity), f"{parity_table(parity)}\n\n{intact}, parity holds")
