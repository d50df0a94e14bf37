"""`slora-jax convert`: any model that loads -> an Orbax checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from rich.console import Console

from slora_jax.cli.errors import reading_input
from slora_jax.cli.flags import a_path
from slora_jax.cli.screen import LoadProgress
from slora_jax.config import Dtype, LoadFormat


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "convert",
        help="write a model as an Orbax checkpoint or a safetensors folder",
        description="Write a model as an Orbax checkpoint, which restores straight into any sharding, or as "
        "a Hugging Face folder. Needs host memory for the whole model.",
        parents=[common],
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        type=a_path,
        metavar="MODEL",
        help="Hugging Face folder, GGUF file, Orbax checkpoint or Hub id",
    )
    parser.add_argument("out", type=a_path, metavar="OUT", help="folder to write; must be new or empty")
    parser.add_argument("--format", choices=("orbax", "safetensors"), default="orbax", help="(%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="bfloat16",
        help="number type of the weights (%(default)s)",
    )
    parser.add_argument(
        "--load-format", choices=get_args(LoadFormat), default="auto", help="form of MODEL (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert and say where the result lies."""
    from slora_jax.weights import convert

    with reading_input(), LoadProgress(Console(stderr=True)) as progress:
        path = convert(
            args.model,
            args.out,
            format=args.format,
            dtype=args.dtype,
            load_format=args.load_format,
            progress=progress,
        )
    print(f"wrote {path} ({args.format}, {args.dtype})")
    return 0
