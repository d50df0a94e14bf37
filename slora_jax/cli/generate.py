"""`slora-jax generate`: one mixed batch from the shell."""

from __future__ import annotations

import argparse
import dataclasses
import json
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli.errors import InputError, reading_input
from slora_jax.cli.flags import (
    SAMPLING_HELP,
    SAMPLING_SKIP,
    add_flags,
    from_flags,
    name_and_path,
    unique_adapters,
)
from slora_jax.cli.output import print_json, tell
from slora_jax.cli.screen import BatchScreen, LoadProgress, Row
from slora_jax.config import EngineConfig
from slora_jax.errors import LimitExceededError, some_of
from slora_jax.outputs import FinishReason, StreamEvent, TokenLogprobs
from slora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora_jax.intake import RequestLimits
    from slora_jax.text import Tokenizer

_EXAMPLES = """examples:
  slora-jax generate ./Llama-3.2-1B-Instruct --chat --prompt "What is a mesh?" --stream
  slora-jax generate model.gguf --adapter sql=./sql pirate=./pirate \\
      --prompt "Hello!" --prompt-for pirate "Hello!" --prompt-for sql "All users" --max-tokens 64

A file for --prompts has one JSON object a line: {"prompt": "Hello!", "adapter_id": "pirate"}, where the
prompt may also be a list of token ids and adapter_id may be left out (the plain base)."""

Prompt = str | list[int]
_FIELDS = ("prompt", "adapter_id")  # of a line of --prompts


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the adapter that answers it (None: the plain base), and where the user wrote each."""

    prompt: Prompt
    adapter_id: str | None
    prompt_place: str
    adapter_place: str


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
    group.add_argument(
        "--prompt",
        dest="questions",
        action="append",
        type=_plain,
        metavar="TEXT",
        help="for the plain base",
    )
    group.add_argument(
        "--prompt-for",
        dest="questions",
        action=_PromptFor,
        nargs=2,
        metavar=("NAME", "TEXT"),
        help="for an adapter",
    )
    group.add_argument(
        "--prompts",
        dest="questions",
        action=_PromptsFile,
        metavar="FILE",
        help="JSON lines, see below; - reads stdin",
    )
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
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder or file to take the tokenizer from, if not MODEL"
    )


def model_adapters(args: argparse.Namespace) -> dict[str, str]:
    """The adapters that `add_model_arguments` names; raises ValueError or OSError where they are wrong."""
    from slora_jax.lora.peft_folder import find_adapters
    from slora_jax.lora.registry import check_adapters

    found = find_adapters(args.adapters_dir) if args.adapters_dir else {}
    pairs = [*(args.adapters or ()), *((name, str(path)) for name, path in found.items())]
    adapters = unique_adapters(pairs)
    check_adapters(adapters)
    return adapters


def _plain(text: str) -> Question:
    place = f"--prompt {reprlib.repr(text)}"
    return Question(text, None, place, place)


class _PromptFor(argparse.Action):
    """Appends `NAME TEXT` to the questions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, text = values
        place = f"--prompt-for {name} {reprlib.repr(text)}"
        _append(namespace, self.dest, [Question(text, name, place, place)])


class _PromptsFile(argparse.Action):
    """Appends the lines of a file to the questions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            text = sys.stdin.read() if values == "-" else Path(values).read_text("utf-8")
            # Not splitlines: it also ends lines at U+2028 and its like, which a JSON string may hold.
            file = "stdin" if values == "-" else values
            lines = [(f"{file}, line {n}", line) for n, line in enumerate(text.split("\n"), 1)]
            questions = [_question(place, line) for place, line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompts {values}: {error}")
        except ValueError as error:
            parser.error(f"--prompts {error}")
        _append(namespace, self.dest, questions)


def _append(namespace: argparse.Namespace, dest: str, questions: list[Question]) -> None:
    setattr(namespace, dest, [*(getattr(namespace, dest) or ()), *questions])


def _question(place: str, line: str) -> Question:
    """A line of JSON as a question. Raises ValueError naming its place and the field."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place}: not a line of JSON ({reason}): {line[:60]}") from None
    if not isinstance(item, dict):
        raise ValueError(f'{place}: expected {{"prompt": ..., "adapter_id": ...}}, got {line[:60]}')
    if unknown := [name for name in item if name not in _FIELDS]:
        flags = [name for name in unknown if name in SamplingParams.__dataclass_fields__]
        fix = f"; --{flags[0].replace('_', '-')} sets it for all prompts" if flags else ""
        raise ValueError(
            f"{place}: field {(flags or unknown)[0]!r} is none of {', '.join(_FIELDS)}{fix}: {line[:60]}"
        )
    if "prompt" not in item:
        raise ValueError(f"{place}: field 'prompt' is missing: {line[:60]}")
    prompt, adapter_id = item["prompt"], item.get("adapter_id")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    prompt_place, adapter_place = (f"{place}, field '{field}'" for field in _FIELDS)
    if not (isinstance(prompt, str) or is_ids):
        raise ValueError(f"{prompt_place}: a prompt is a string or a list of token ids, got {line[:60]}")
    if not isinstance(adapter_id, str | None):
        raise ValueError(f"{adapter_place}: the name of an adapter is a string or null, got {line[:60]}")
    return Question(prompt, adapter_id, prompt_place, adapter_place)


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
        questions, adapters = _questions(args)
        params, config = from_flags(SamplingParams, args, SAMPLING_SKIP), from_flags(EngineConfig, args)

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
        )
        events = engine.stream(prompts, [q.adapter_id for q in questions], params)
    answers = [
        _Answer(i, k, q.prompt, q.adapter_id) for i, q in enumerate(questions) for k in range(params.n)
    ]
    show = _print_stream if args.stream else _print_whole
    try:
        show(events, answers, as_json=args.json, as_text=engine.tokenizer is not None)
    except LimitExceededError as error:  # of the flags; raised where the requests are queued
        raise InputError(str(error)) from error
    return int(any(answer.error for answer in answers))


def _questions(args: argparse.Namespace) -> tuple[list[Question], dict[str, str]]:
    """The prompts and the adapters by name; raises ValueError where a prompt names another one."""
    questions: list[Question] = args.questions or []
    if not questions:
        raise ValueError("give at least one --prompt, --prompt-for or --prompts")
    adapters = model_adapters(args)
    for question in questions:
        if question.adapter_id not in (None, *adapters):
            name = question.adapter_id
            raise ValueError(
                f"{question.adapter_place}: '{name}' is not among the adapters given "
                f"({some_of(adapters)}); add --adapter {name}=PATH"
            )
    return questions, adapters


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
