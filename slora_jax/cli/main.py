"""`slora-jax`: the command line. Exit codes: 0 done, 1 a request failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import slora_jax
from slora_jax.cli import adapters, convert, demo, generate, serve
from slora_jax.cli.errors import InputError


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, which takes the arguments and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="slora-jax",
        description="Thousands of LoRA adapters on one base model: one page pool, one batch.",
        epilog="slora-jax COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"slora-jax {slora_jax.__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error arose, for bug reports")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, generate, serve, adapters, convert):
        command.add_parser(commands, common)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what the user can mend is told in one line, anything else keeps its traceback."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        code = args.run(args)
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except InputError as error:
        if args.traceback:
            raise
        print(f"slora-jax: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
