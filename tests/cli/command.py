"""The command line, run in this process on the tiny model."""

from __future__ import annotations

import pytest

from slora_jax.cli.main import main

ENGINE = "--load-format dummy --dtype float32 --num-pages 64 --max-batch-size 2 --max-step-tokens 32".split()


def run_command(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Its exit code, and what it wrote to stdout and stderr."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err
