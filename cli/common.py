"""What every command shares: ``--json``, ``--quiet``, errors as messages and exit codes, progress."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dspark.drafter.errors import BadInputError, DsparkError, NotAvailableError

if TYPE_CHECKING:
    from dspark.drafter.formats.reading import Settled

CONTEXT = {"help_option_names": ["-h", "--help"]}
INTERRUPTED = 130


class Console:
    """Where a command's words go: one JSON document or text on stdout, everything else on stderr."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.progress = Progress(show=not quiet and sys.stderr.isatty())

    def result(self, data: dict[str, Any], text: str) -> None:
        """The command's outcome, once: JSON with ``--json``, else the text (unless ``--quiet``)."""
        self.progress.clear()
        if self.as_json:
            click.echo(json.dumps(data, indent=1))
        elif not self.quiet and text:
            click.echo(text)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.progress.clear()
            click.echo(text, err=True)


class Progress:
    """One line on a terminal, with the time left, for whatever takes over two seconds."""

    def __init__(self, show: bool) -> None:
        self.show, self.stage, self.drawn = show, "", False
        self.started = self.begun = self.last = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.begun = stage, now
        if not self.show or now - self.started < 2 or now - self.last < 0.1:
            return
        self.last, self.drawn = now, True
        left = (now - self.begun) * (total - done) / done if done else 0.0
        sys.stderr.write(f"\r\x1b[K{stage} {100 * done // max(total, 1)} %, {left:.0f} s left")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            self.drawn = False


def command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A click command with ``--json`` and ``--quiet``, whose errors become a message and an exit code."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(name, context_settings=CONTEXT)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
        @click.option("--quiet", is_flag=True, help="Print nothing but errors (and JSON, with --json).")
        @functools.wraps(function)
        def run(as_json: bool, quiet: bool, **arguments: Any) -> None:
            console = Console(as_json, quiet)
            # A pipeline that is cancelled sends SIGTERM; it must clean up like Ctrl-C.
            signal.signal(signal.SIGTERM, _interrupt)
            try:
                function(console, **arguments)
            except DsparkError as error:
                fail(console, error.exit_code, error.kind, error.message, dict(error.details))
            except KeyboardInterrupt:
                fail(console, INTERRUPTED, "interrupted", "interrupted; nothing was left behind", {})
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(0)
            except OSError as error:  # no permission, a name too long, a disk that fails
                fail(console, BadInputError.exit_code, BadInputError.kind, _of_system(error), {"errno": error.errno})
            except ImportError as error:
                missing = NotAvailableError(f"{error.name or error} is not installed; pip install {error.name}")
                fail(console, missing.exit_code, missing.kind, missing.message, {})

        run.params.sort(key=lambda parameter: parameter.name in ("as_json", "quiet"))
        return run

    return decorate


def _of_system(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def fail(console: Console, code: int, kind: str, message: str, details: dict[str, Any]) -> NoReturn:
    """End the process with one message on stderr, and with ``--json`` the error as JSON on stdout."""
    console.progress.clear()
    if console.as_json:
        error = {"code": code, "kind": kind, "message": message, "details": details}
        click.echo(json.dumps({"error": error}, indent=1, default=str))
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


BACKENDS = ("onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
backend_option = click.option(
    "--backend", type=click.Choice(BACKENDS), default="onnxruntime", show_default=True, help="What runs the graphs."
)


def checkpoint_options(function: Callable[..., None]) -> Callable[..., None]:
    """Options that settle what a checkpoint leaves open; ``settled`` makes one value of them."""
    for option in reversed((
        click.option("--sample-from-anchor", type=click.Choice(["yes", "no"]),
                     help="Layout, where the checkpoint does not say: slot 0 proposes (yes), or is unused (no)."),
        click.option("--target-layer-ids", metavar="IDS",
                     help="Tapped layers with commas, where the checkpoint does not say."),
        click.option("--d2t", type=click.Choice(["offset", "absolute"]),
                     help="How the draft vocabulary is written, where its numbers do not tell."),
    )):  # fmt: skip
        function = option(function)
    return function


def settled(sample_from_anchor: str | None, target_layer_ids: str | None, d2t: Any) -> Settled:
    """The options of :func:`checkpoint_options` as one value."""
    from dspark.drafter.formats.reading import Settled

    ids = None if target_layer_ids is None else numbers("target-layer-ids", target_layer_ids)
    return Settled(None if sample_from_anchor is None else sample_from_anchor == "yes", ids, d2t)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Comma-separated numbers of an option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of numbers with commas", param_hint=f"--{name}") from error


def table(rows: list[list[str]]) -> str:
    """Rows as left-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
