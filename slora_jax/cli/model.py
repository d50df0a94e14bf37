"""The base model and its adapters as commands take them, and what becomes of adapters that are refused."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection

from slora_jax.cli.flags import a_path, in_flags, name_and_path, unique_adapters
from slora_jax.errors import printable

logger = logging.getLogger(__name__)


def add_model_arguments(parser: argparse.ArgumentParser, *, needed: str) -> None:
    """The base model and its adapters, as `generate` and `serve` take them; `needed` as below."""
    parser.add_argument(
        "model",
        type=a_path,
        metavar="MODEL",
        help="Hugging Face folder, GGUF file, Orbax checkpoint or Hub id (owner/name)",
    )
    parser.add_argument(
        "--adapter", "--adapters", dest="adapters", action="extend", nargs="+", type=name_and_path,
        metavar="NAME=PATH", help="LoRA adapters: the name that prompts choose them by, a PEFT folder",
    )  # fmt: skip
    parser.add_argument(
        "--adapters-dir",
        type=a_path,
        metavar="DIR",
        help="folder whose sub-folders are adapters of their names; --lazy-adapters suits many",
    )
    add_strict_adapters(parser, needed=needed)
    parser.add_argument(
        "--tokenizer",
        type=a_path,
        metavar="DIR",
        help="folder or file to take the tokenizer from, if not MODEL",
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
    from slora_jax.lora.registry import check_adapter_name

    given = unique_adapters(args.adapters)
    for name in given:
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise ValueError(f"--adapters: {error}") from None
    try:
        found = find_adapters(args.adapters_dir) if args.adapters_dir else {}
    except (ValueError, OSError) as error:
        raise ValueError(f"--adapters-dir: {error}") from error
    for name in found:
        if name in given:
            raise ValueError(
                f"adapter '{name}' is given twice, by --adapters, {given[name]}, and in --adapters-dir, "
                f"{found[name]}; rename one"
            )
    return given | {name: str(path) for name, path in found.items()}


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
        by_whom = {"a prompt": asked_for, "--pinned-adapters": args.pinned_adapters, "--adapters": named}
        self._needed = {name: whom for whom, names in by_whom.items() for name in names}
        self.names: list[str] = []

    def __call__(self, name: str, error: Exception) -> None:
        known = isinstance(error, ValueError | OSError)
        whom = self._needed.get(name, "--strict-adapters" if self._args.strict_adapters else None)
        if whom is not None:
            if not known:
                raise error
            raise ValueError(f"{whom}: adapter {name!r} is refused: {error}") from error
        text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}"
        logger.error(
            "adapter '%s' is refused, and not served: %s",
            printable(name),
            printable(in_flags(text, self._args.flags)),
            exc_info=None if known else error,
        )
        self.names.append(name)
        self._left.discard(name)
        if not self._left:
            raise ValueError(
                f"--adapters-dir {self._args.adapters_dir}: none of its {len(self.names)} adapters can be "
                f"served; {name!r} is refused: {text}"
            ) from error
