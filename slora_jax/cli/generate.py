"""`slora-jax generate`: one mixed batch from the shell."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli.flags import (
    SAMPLING_HELP,
    SAMPLING_SKIP,
    add_flags,
    from_flags,
    name_and_path,
    unique_adapters,
)
from slora_jax.cli.screen import BatchScreen, LoadProgress, Row
from slora_jax.config import EngineConfig
from slora_jax.outputs import CompletionOutput, RequestOutput, StreamEvent
from slora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora_jax.engine import Engine

_EXAMPLES = """examples:
  slora-jax generate ./Llama-3.2-1B-Instruct --chat --prompt "What is a mesh?" --stream
  slora-jax generate model.gguf --adapter sql=./sql pirate=./pirate \\
      --prompt "Hello!" --prompt-for pirate "Hello!" --prompt-for sql "All users" --max-tokens 64

A file for --prompts has one JSON object a line: {"prompt": "Hello!", "adapter_id": "pirate"}, where the
prompt may also be a list of token ids and adapter_id may be left out (the plain base)."""

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the adapter that answers it (None: the plain base)."""

    prompt: Prompt
    adapter_id: str | None = None


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
        type=Question,
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
        "--tokenizer", metavar="DIR", help="folder or file to take the tokenizer from, if not MODEL"
    )


class _PromptFor(argparse.Action):
    """Appends `NAME TEXT` to the questions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, text = values
        _append(namespace, self.dest, [Question(text, name)])


class _PromptsFile(argparse.Action):
    """Appends the lines of a file to the questions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            text = sys.stdin.read() if values == "-" else Path(values).read_text("utf-8")
            _append(namespace, self.dest, [_question(line) for line in text.splitlines() if line.strip()])
        except (OSError, ValueError) as error:
            parser.error(f"--prompts {values}: {error}")


def _append(namespace: argparse.Namespace, dest: str, questions: list[Question]) -> None:
    setattr(namespace, dest, [*(getattr(namespace, dest) or ()), *questions])


def _question(line: str) -> Question:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a line of JSON ({error}): {line[:60]}") from None
    if not isinstance(item, dict) or "prompt" not in item or item.keys() - {"prompt", "adapter_id"}:
        raise ValueError(f'expected {{"prompt": ..., "adapter_id": ...}}, got {line[:60]}')
    return Question(item["prompt"], item.get("adapter_id"))


def run(args: argparse.Namespace) -> int:
    """Load the engine, answer, print."""
    questions: list[Question] = args.questions or []
    if not questions:
        raise ValueError("give at least one --prompt, --prompt-for or --prompts")
    adapters = unique_adapters(args.adapters)
    for name in {q.adapter_id for q in questions} - {None, *adapters}:
        raise ValueError(f"a prompt names the adapter '{name}'; add --adapter {name}=PATH")
    params, config = from_flags(SamplingParams, args, SAMPLING_SKIP), from_flags(EngineConfig, args)

    from slora_jax.engine import Engine

    with LoadProgress(Console(stderr=True)) as progress:
        engine = Engine.from_pretrained(
            args.model, adapters, config, tokenizer=args.tokenizer, progress=progress
        )
    prompts = [chat_prompt(engine, q.prompt) if args.chat else q.prompt for q in questions]
    adapter_ids = [q.adapter_id for q in questions]
    if args.stream:
        return _stream(engine, questions, prompts, params, as_json=args.json)
    outputs = engine.generate(prompts, adapter_ids, [params] * len(prompts))
    for i, (question, output) in enumerate(zip(questions, outputs, strict=True)):
        for completion in output.outputs:
            if args.json:
                print(json.dumps(_as_json(i, question, output, completion), ensure_ascii=False))
            else:
                if len(outputs) > 1 or params.n > 1:
                    print(f"--- {question.adapter_id or 'base'}: {question.prompt}")
                print(_text(engine, completion.text, completion.token_ids))
    return int(any(c.finish_reason == "error" for o in outputs for c in o.outputs))


def chat_prompt(engine: Engine, prompt: Prompt) -> Prompt:
    """The prompt as the user's turn of a chat; token ids are left as they are."""
    if not isinstance(prompt, str):
        return prompt
    if engine.tokenizer is None:
        raise ValueError("a chat needs a tokenizer with a chat template, and this model has none")
    text = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return engine.tokenizer.encode(text, add_special_tokens=False)


def _stream(
    engine: Engine,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    as_json: bool,
) -> int:
    events = engine.stream(prompts, [q.adapter_id for q in questions], [params] * len(prompts))
    failed = False
    if as_json or len(questions) * params.n == 1:
        for event in events:
            failed |= event.finish_reason == "error"
            if as_json:
                print(json.dumps(_event_as_json(event), ensure_ascii=False), flush=True)
            else:
                print(_text(engine, event.text, event.token_ids), end="", flush=True)
        if not as_json:
            print()
        return int(failed)
    rows = {
        (i, k): Row(q.adapter_id, str(q.prompt)) for i, q in enumerate(questions) for k in range(params.n)
    }
    with BatchScreen(Console(), list(rows.values())) as screen:
        for event in events:
            screen.add(rows[event.prompt_index, event.index], event)
    return int(any(row.error for row in rows.values()))


def _text(engine: Engine, text: str, token_ids: Sequence[int]) -> str:
    return text if engine.tokenizer is not None else "".join(f"{token} " for token in token_ids)


def _as_json(
    i: int, question: Question, output: RequestOutput, completion: CompletionOutput
) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "prompt_index": i,
        "index": completion.index,
        "prompt": question.prompt,
        "adapter_id": output.adapter_id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "logprobs": None if logprobs is None else [dataclasses.asdict(entry) for entry in logprobs],
    }


def _event_as_json(event: StreamEvent) -> dict[str, Any]:
    left_out = ("metrics", "logits")
    values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name not in left_out}
    return values | {"logprobs": event.logprobs and [dataclasses.asdict(entry) for entry in event.logprobs]}
