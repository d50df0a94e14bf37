"""`slora-jax generate`: one mixed batch from the shell."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli.errors import InputError, reading_input
from slora_jax.cli.flags import SAMPLING_HELP, SAMPLING_SKIP, add_flags, from_flags
from slora_jax.cli.model import Refusals, add_model_arguments, model_adapters
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
from slora_jax.errors import LimitExceededError, PromptError
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
    add_model_arguments(parser, needed="is pinned, or named by --adapters or a prompt")
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
        prompt = chat_prompt(tokenizer, question.prompt, limits) if chat else question.prompt
        return token_ids(prompt, tokenizer, limits)
    except ValueError as error:
        raise ValueError(f"{question.prompt_place}: {error}") from error


def chat_prompt(tokenizer: Tokenizer | None, prompt: Prompt, limits: RequestLimits | None = None) -> Prompt:
    """The prompt as the user's turn of a chat, in token ids; these are left as they are. Raises ValueError
    where the model has no chat, or the turn is surely longer than `limits` allow.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("a chat needs a tokenizer with a chat template, and this model has none")
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    if limits is not None:
        limits.check_text(text, tokenizer)
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
