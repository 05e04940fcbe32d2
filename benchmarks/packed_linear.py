"""Rows of a linear layer against its time, PyTorch's own and with a matrix packed for a verify step.

python benchmarks/packed_linear.py
"""

from __future__ import annotations

import statistics
import time

import click
import torch

from dspark.runtime.targets.packed_linear import pack_linear_layers

SHAPES = ((49152, 576), (1536, 576), (576, 1536), (576, 576))  # out, in: the demo target's layers


@click.command()
@click.option("--rows", type=int, default=8, show_default=True, help="Rows that the packed matrix is for.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(rows: int, threads: int) -> None:
    torch.set_num_threads(threads)
    click.echo("out x in, ms for 1, 2, 3, 4, ... rows")
    for out, size in SHAPES:
        layer = torch.nn.Linear(size, out, bias=False)
        for name in ("torch", "packed"):
            if name == "packed" and not pack_linear_layers(layer, rows):
                raise click.ClickException("this build of PyTorch has no MKL")
            cells = [f"{1e3 * median(layer, torch.randn(m, size)):6.2f}" for m in range(1, rows + 1)]
            click.echo(f"{out:6} x {size:<5} {name:7}" + " ".join(cells))


@torch.inference_mode()
def median(layer: torch.nn.Module, x: torch.Tensor) -> float:
    times = []
    for _ in range(25):
        begun = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[5:])


if __name__ == "__main__":
    main()
