"""`slora-jax generate`: one mixed batch from the shell."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli.errors import InputError, reading_input
from slora_jax.cli.flags import (
    SAMPLING_HELP,
    SAMPLING_SKIP,
    a_path,
    add_flags,
    from_flags,
    in_flags,
    name_and_path,
    unique_adapters,
)
from slora_jax.cli.output import print_json, tell
from slora_jax.cli.prompts import (
    Prompt,
    Question,
    add_prompt_arguments,
    check_adapter_ids,
    read_questions,
)
from slora_jax.cli.screen import BatchScreen, LoadProgress, Row
from slora_jax.config import EngineConfig
from slora_jax.errors import LimitExceededError, PromptError, printable
from slora_jax.outputs import FinishReason, StreamEvent, TokenLogprobs
from slora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora_jax.intake import RequestLimits
    from slora_jax.text import Tokenizer

logger = logging.getLogger(__name__)

_EXAMPLES = """examples:
  slora-jax generate ./Llama-3.2-1B-Instruct --chat --prompt "What is a mesh?" --stream
  slora-jax generate model.gguf --adapter sql=./sql pirate=./pirate \\
      --prompt "Hello!" --prompt-for pirate "Hello!" --prompt-for sql "All users" --max-tokens 64

A file for --prompts has one JSON object a line: {"prompt": "Hello!", "adapter_id": "pirate"}, where the
prompt may also be a list of token ids and adapter_id may be left out (the plain base)."""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate",
        usage="slora-jax generate MODEL [--adapter NAME=PATH ...] --prompt TEXT ... [options]",
        help="continue prompts, each with an adapter of its own, in one batch",
        description="Continue prompts in one batch; each may name one of the adapters or use the plain base.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(run=run)
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts, answered in the order given")
    add_prompt_arguments(group)
    group.add_argument("--chat", action="store_true", help="wrap each text in the model's chat template")
    group = parser.add_argument_group("output")
    group.add_argument("--stream", action="store_true", help="show text as it comes")
    group.add_argument(
        "--json", action="store_true", help="one JSON object a line: answers, or events with --stream"
    )
    add_flags(parser.add_argument_group("sampling"), SamplingParams, SAMPLING_HELP, skip=SAMPLING_SKIP)
    add_flags(parser.add_argument_group("engine"), EngineConfig)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The base model and its adapters, as `generate` and `serve` take them."""
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
    parser.add_argument(
        "--strict-adapters",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="do not start where an adapter of --adapters-dir is refused; else the log says why, and the "
        "others are served",
    )
    parser.add_argument(
        "--tokenizer",
        type=a_path,
        metavar="DIR",
        help="folder or file to take the tokenizer from, if not MODEL",
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


@dataclasses.dataclass
class _Answer:
    """One continuation, gathered from its events; its fields are those of `--json`."""

    prompt_index: int
    index: int
    prompt: Prompt
    adapter_id: str | None
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None

    def add(self, event: StreamEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        self.error = event.error
        if event.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *event.logprobs]


def run(args: argparse.Namespace) -> int:
    """Load the engine, answer, print."""
    with reading_input():
        params, config = from_flags(SamplingParams, args, SAMPLING_SKIP), from_flags(EngineConfig, args)
        questions, adapters = read_questions(args), model_adapters(args)
        check_adapter_ids(questions, adapters)

    from slora_jax.engine import Engine

    prompts: list[list[int]] = []

    def read_prompts(tokenizer: Tokenizer | None, limits: RequestLimits) -> None:
        limits.check_params(params, tokenizer)
        prompts.extend(_token_ids(q, tokenizer, limits, chat=args.chat) for q in questions)

    with LoadProgress(Console(stderr=True)) as progress, reading_input():
        engine = Engine.from_pretrained(
            args.model,
            adapters,
            config,
            tokenizer=args.tokenizer,
            progress=progress,
            before_weights=read_prompts,
            on_refused=Refusals(args, adapters, [q.adapter_id for q in questions]),
        )
        try:
            events = engine.stream(prompts, [q.adapter_id for q in questions], params)
        except PromptError as error:
            raise ValueError(f"{questions[error.prompt_index].prompt_place}: {error.reason}") from error
    answers = [
        _Answer(i, k, q.prompt, q.adapter_id) for i, q in enumerate(questions) for k in range(params.n)
    ]
    show = _print_stream if args.stream else _print_whole
    try:
        show(events, answers, as_json=args.json, as_text=engine.tokenizer is not None)
    except LimitExceededError as error:  # of the flags; raised where the requests are queued
        raise InputError(str(error)) from error
    return int(any(answer.error for answer in answers))


def _token_ids(
    question: Question, tokenizer: Tokenizer | None, limits: RequestLimits, *, chat: bool
) -> list[int]:
    """The prompt's tokens; raises ValueError naming its place where an engine of these limits refuses it."""
    from slora_jax.intake import token_ids

    try:
        prompt = chat_prompt(tokenizer, question.prompt) if chat else question.prompt
        tokens = token_ids(prompt, tokenizer, limits.vocab_size)
        limits.check_prompt(tokens)
    except ValueError as error:
        raise ValueError(f"{question.prompt_place}: {error}") from error
    return tokens


def chat_prompt(tokenizer: Tokenizer | None, prompt: Prompt) -> Prompt:
    """The prompt as the user's turn of a chat; token ids are left as they are."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("a chat needs a tokenizer with a chat template, and this model has none")
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)


def _by_place(answers: list[_Answer]) -> dict[tuple[int, int], _Answer]:
    return {(answer.prompt_index, answer.index): answer for answer in answers}


def _print_whole(
    events: Iterator[StreamEvent], answers: list[_Answer], *, as_json: bool, as_text: bool
) -> None:
    places = _by_place(answers)
    for event in events:
        places[event.prompt_index, event.index].add(event)
    for answer in answers:
        if as_json:
            print_json(dataclasses.asdict(answer))
            continue
        if len(answers) > 1:
            print(f"--- {answer.adapter_id or 'base'}: {answer.prompt}")
        print(answer.text if as_text else _spaced(answer.token_ids))
        if answer.error:
            tell(answer.error)


def _print_stream(
    events: Iterator[StreamEvent], answers: list[_Answer], *, as_json: bool, as_text: bool
) -> None:
    places = _by_place(answers)
    if as_json:
        for event in events:
            places[event.prompt_index, event.index].add(event)
            print_json(dataclasses.asdict(dataclasses.replace(event, metrics=None, logits=None)))
    elif len(answers) == 1:
        for event in events:
            answers[0].add(event)
            print(event.text if as_text else _spaced(event.token_ids), end="", flush=True)
        print()
        if answers[0].error:
            tell(answers[0].error)
    else:
        rows = {place: Row(answer.adapter_id, str(answer.prompt)) for place, answer in places.items()}
        with BatchScreen(Console(), list(rows.values())) as screen:
            for event in events:
                place = event.prompt_index, event.index
                places[place].add(event)
                shown = event if as_text else dataclasses.replace(event, text=_spaced(event.token_ids))
                screen.add(rows[place], shown)


def _spaced(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)
