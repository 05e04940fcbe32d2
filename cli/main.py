"""The command line: commands are found by name and imported when they are called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from .common import INTERRUPTED, Console, fail

COMMANDS = {
    "inspect": "Say what a checkpoint or a bundle is.",
    "convert": "Write a checkpoint in another layout.",
    "export": "Export a drafter to a bundle of ONNX graphs, proven against the reference.",
    "build": "Build engines of a bundle, per GPU, also on a machine without one.",
    "validate": "Check a bundle's files, and its graphs against the reference model.",
    "bench": "Time the engines of a bundle on this machine.",
    "generate": "Answer a prompt by speculative decoding.",
}


class LazyGroup(click.Group):
    """A group that imports a command's module only to run that command."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        """Run; what click itself refuses is reported like every other error."""
        words = sys.argv[1:] if args is None else list(args)
        console = Console("--json" in words, "--quiet" in words)
        try:
            sys.exit(super().main(words, *rest, **{**settings, "standalone_mode": False}))
        except click.UsageError as error:
            if not words:  # the help
                error.show()
                sys.exit(error.exit_code)
            hint = f"; see {error.ctx.command_path} --help" if error.ctx else ""
            fail(console, error.exit_code, "usage", error.format_message().rstrip(".") + hint, {})
        except click.Abort:
            fail(console, INTERRUPTED, "interrupted", "interrupted; nothing was left behind", {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"dspark.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dspark-export")
def main() -> None:
    """Take DSpark speculative-decoding drafters from a trained checkpoint to production.

    \b
    Example:
      dspark-export export CHECKPOINT --target TARGET -o BUNDLE
      dspark-export generate BUNDLE --target TARGET --prompt "What is 7 times 8?"

    Exit codes: 0 done, 2 usage, 3 bad input, 4 a check failed, 5 not installed or no such device,
    6 integrity, 130 interrupted.
    """


if __name__ == "__main__":
    sys.exit(main())
