"""The base model and its adapters as commands take them, and what becomes of adapters that are refused."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection
from pathlib import Path

from slora_jax.cli.flags import in_flags, name_and_path, unique_adapters
from slora_jax.errors import printable

logger = logging.getLogger(__name__)


def add_model_arguments(parser: argparse.ArgumentParser, *, needed: str) -> None:
    """The base model and its adapters, as `generate` and `serve` take them; `needed` as below."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, GGUF file, Orbax checkpoint or Hub id (owner/name)",
    )
    parser.add_argument(
        "--adapter", "--adapters", dest="adapters", action="extend", nargs="+", type=name_and_path,
        metavar="NAME=PATH", help="LoRA adapters: the name that prompts choose them by, a PEFT folder",
    )  # fmt: skip
    parser.add_argument(
        "--adapters-dir",
        type=Path,
        metavar="DIR",
        help="folder whose sub-folders are adapters of their names; --lazy-adapters suits many",
    )
    add_strict_adapters(parser, needed=needed)
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder or file to take the tokenizer from, if not MODEL"
    )


def add_strict_adapters(parser: argparse.ArgumentParser, *, needed: str) -> None:
    """The flag that `Refusals` goes by; `needed` says which adapters it never leaves out."""
    parser.add_argument(
        "--strict-adapters",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="do not start where an adapter of --adapters-dir is refused; else the log says why and the "
        f"others are served, but one that {needed} is never left out",
    )


def model_adapters(args: argparse.Namespace) -> dict[str, str]:
    """The adapters that `add_model_arguments` names; raises ValueError or OSError where they are wrong."""
    from slora_jax.lora.peft_folder import find_adapters
    from slora_jax.lora.registry import check_given

    found = find_adapters(args.adapters_dir) if args.adapters_dir else {}
    pairs = [*(args.adapters or ()), *((name, str(path)) for name, path in found.items())]
    for name, path in unique_adapters(args.adapters).items():
        check_given(name, path)
    return unique_adapters(pairs)


class Refusals:
    """Takes the adapters of --adapters-dir that are refused: each is told in the log and left out.

    Raises the error of one that `--adapters` names, a prompt asks for or that is pinned, of any with
    --strict-adapters, and ValueError where all in the folder are refused.
    """

    def __init__(
        self, args: argparse.Namespace, adapters: Collection[str], asked_for: Collection[str | None] = ()
    ) -> None:
        self._args = args
        named = {name for name, _ in args.adapters or ()}
        self._left = {*adapters} - named  # of the folder, not refused
        self._needed = named | {*asked_for} | {*args.pinned_adapters}
        self.names: list[str] = []

    def __call__(self, name: str, error: Exception) -> None:
        if self._args.strict_adapters or name in self._needed:
            raise error
        known = isinstance(error, ValueError | OSError)
        text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}"
        logger.error(
            "adapter '%s' is refused, and not served: %s",
            printable(name),
            printable(in_flags(text, vars(self._args))),
            exc_info=None if known else error,
        )
        self.names.append(name)
        self._left.discard(name)
        if not self._left:
            raise ValueError(
                f"--adapters-dir {self._args.adapters_dir}: none of its {len(self.names)} adapters can be "
                f"served; {name!r} is refused: {text}"
            ) from error
