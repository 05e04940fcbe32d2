"""``dspark-export convert``: a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Console, checkpoint_options, command as dspark_command, settled

_LAYOUTS = ("deepspec", "speculators", "specforge", "modelopt", "z-lab", "gguf")


@dspark_command("convert")
@click.argument("checkpoint")
@click.option("--to", "layout", required=True, type=click.Choice(_LAYOUTS), help="Layout to write.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--target", help="Folder, hub id, or smollm2; gives embedding and head, or takes them back.")
@click.option("--probe", is_flag=True, help="Let the target decide what the checkpoint leaves open.")
@checkpoint_options
@click.option("--force", is_flag=True, help="Replace the output.")
def command(
    console: Console,
    checkpoint: str,
    layout: str,
    output: Path,
    target: str | None,
    probe: bool,
    force: bool,
    **open_values: Any,
) -> None:
    """Write CHECKPOINT in another layout: the same weights bit for bit, read back and compared.

    What a layout has no place for is refused by name. Embedding and head that are the target's own are left out of
    layouts that take them from there; without --target they stay.

    \b
    Example:
      dspark-export convert examples/smollm2-dspark-2l --to speculators --target smollm2 -o drafter
    """
    from dspark.drafter.atomic import check_output
    from dspark.drafter.convert import convert

    from .checkpoints import open_for

    check_output(output, force)
    opened, _ = open_for(console, checkpoint, target, settled(**open_values), probe)
    conversion = convert(opened, layout, output, force, console.progress)
    data = {
        "checkpoint": str(output),
        "from": opened.config.layout,
        "to": layout,
        "tensors": len(conversion.tensors),
        "bytes": conversion.bytes,
        "left_to_target": list(conversion.left_out),
    }
    left = f"; {', '.join(conversion.left_out)} left to the target" if conversion.left_out else ""
    text = f"{output}: {layout}, {len(conversion.tensors)} tensors, {conversion.bytes / 1e6:.1f} MB, read back{left}"
    console.result(data, text)
