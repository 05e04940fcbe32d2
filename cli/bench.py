"""``dspark-export bench``: how long the engines of a bundle take on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Console, backend_option, command as dspark_command, table


@dspark_command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--engines", is_flag=True, required=True, help="Time every engine by itself.")
@backend_option
@click.option(
    "--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Of timing per engine."
)
def command(console: Console, bundle: Path, engines: bool, backend: str, seconds: float) -> None:
    """Time the engines of BUNDLE on this machine, against the time that reading their weights takes.

    The Markov loop is timed both as one Loop and unrolled, whichever the bundle holds; its share is of a draft round
    (context rows of a round, the smallest block, the loop).

    \b
    Example:
      dspark-export bench bundle --engines --backend tensorrt-rtx
    """
    from dspark.engines.backend import backend_from_name
    from dspark.engines.timing import draft_shares, time_engines
    from dspark.export.bundle import open_bundle
    from dspark.export.version import library_versions, tool_version

    opened = open_bundle(bundle)
    runner = backend_from_name(backend, bundle=opened)
    rate, timings = time_engines(opened, runner, seconds, console.progress)
    rounds = draft_shares(opened.config, timings)
    environment: dict[str, Any] = {
        "backend": backend,
        "sku": runner.sku().to_json(),
        "bandwidth_bytes_per_second": rate,
        "dtype": opened.dtype,
        "versions": {"dspark-export": tool_version(), **library_versions()},
    }
    data = {"environment": environment, "engines": [timing.to_json() for timing in timings], "rounds": rounds}
    rows = [["graph", "markov", "ms", "10 %", "90 %", "floor ms", "times floor"]]
    for timing in timings:
        times = (timing.seconds, timing.low, timing.high, timing.floor_seconds)
        ratio = f"{timing.ratio_to_floor:.1f}" if timing.floor_seconds else ""
        rows.append([timing.graph, timing.markov or "", *(f"{1e3 * value:.3f}" for value in times), ratio])
    shares = [["batch", "markov", "draft ms", "of it markov"]]
    shares += [
        [str(one["batch"]), one["markov"], f"{1e3 * one['seconds']:.3f}", f"{100 * one['markov_share']:.1f} %"]
        for one in rounds
    ]
    head = f"{backend} on {runner.sku().slug}, {rate / 1e9:.1f} GB/s"
    console.result(data, f"{head}\n{table(rows)}\n\n{table(shares)}")
