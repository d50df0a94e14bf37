"""`slora-jax`: the command line.

Exit codes: 0 done, 1 a request failed or the output cannot be written, 2 wrong input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import slora_jax
from slora_jax.cli import adapters, convert, demo, generate, serve
from slora_jax.cli.errors import InputError
from slora_jax.cli.flags import flag_names, in_flags
from slora_jax.cli.output import OutputError, checked_output, tell
from slora_jax.errors import printable


class _Parser(argparse.ArgumentParser):
    """Shows arguments that are wrong as `printable` does; the commands' parsers are of this class, too."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what a command does not know is an error of the command, with its usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, which takes the arguments and returns the exit code,
    and `flags`, see `in_flags`.
    """
    parser = _Parser(
        prog="slora-jax",
        description="Thousands of LoRA adapters on one base model: one page pool, one batch.",
        epilog="slora-jax COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"slora-jax {slora_jax.__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error arose, for bug reports")
    common.set_defaults(variables={})  # fields that a command took from the environment, and from where
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, generate, serve, adapters, convert):
        command.add_parser(commands, common)
    for own in commands.choices.values():
        own.set_defaults(flags=flag_names(own))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what the user can mend is told in one line, anything else keeps its traceback."""
    try:
        with checked_output():
            return _run(argv)
    except KeyboardInterrupt:
        return 130
    except OutputError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # its reader went away, as `| head` does
            return 0
        tell(error)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(args.run(args))
    except InputError as error:
        if args.traceback:
            raise
        tell(in_flags(str(error), args.flags, args.variables))
        return 2


if __name__ == "__main__":
    sys.exit(main())
