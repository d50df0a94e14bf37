"""The prompts of `slora-jax generate`: flags and JSON lines, each with the place where the user wrote it."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import io
import json
import reprlib
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, cast

from slora_jax.cli.flags import SAMPLING_SKIP
from slora_jax.errors import some_of
from slora_jax.sampling_params import SamplingParams

Prompt = str | list[int]
_FIELDS = ("prompt", "adapter_id")  # of a line of --prompts


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the adapter that answers it (None: the plain base), and where the user wrote each."""

    prompt: Prompt
    adapter_id: str | None
    prompt_place: str
    adapter_place: str


@dataclasses.dataclass(frozen=True)
class PromptsFile:
    """A file of JSON lines that is yet to be read; `-` is stdin."""

    name: str

    def questions(self) -> list[Question]:
        """Its lines that are not blank. Raises ValueError naming the file, the line and the field."""
        file = "stdin" if self.name == "-" else self.name
        try:
            data = _stdin() if self.name == "-" else Path(self.name).read_bytes()
        except OSError as error:
            raise ValueError(f"--prompts {file}: cannot be read: {error.strerror}") from error
        data = data.removeprefix(codecs.BOM_UTF8)
        # bytes.splitlines: that of str also ends lines at U+2028 and its like, which a JSON string may hold.
        places = ((f"{file}, line {n}", line) for n, line in enumerate(data.splitlines(), 1))
        lines = ((place, _decoded(place, line)) for place, line in places)
        return [_question(place, line) for place, line in lines if line.strip()]


def add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags whose values `read_questions` takes from `args.prompts`, in the order given."""
    group.add_argument(
        "--prompt", dest="prompts", action="append", type=_plain, metavar="TEXT", help="for the plain base"
    )
    group.add_argument(
        "--prompt-for",
        dest="prompts",
        action=_PromptFor,
        nargs=2,
        metavar=("NAME", "TEXT"),
        help="for an adapter",
    )
    group.add_argument(
        "--prompts",
        dest="prompts",
        action="append",
        type=PromptsFile,
        metavar="FILE",
        help="JSON lines, see below; - reads stdin",
    )


def read_questions(args: argparse.Namespace) -> list[Question]:
    """The prompts; reads files and stdin. Raises ValueError naming file, line and field."""
    given: list[Question | PromptsFile] = args.prompts or []
    questions = [
        question
        for item in given
        for question in (item.questions() if isinstance(item, PromptsFile) else [item])
    ]
    if not questions:
        raise ValueError("give at least one --prompt, --prompt-for or --prompts")
    return questions


def check_adapter_ids(questions: Iterable[Question], adapters: Collection[str]) -> None:
    """Raise ValueError naming its place where a prompt is for an adapter that is not among these."""
    from slora_jax.lora.registry import check_adapter_name

    known = set(adapters)
    for question in questions:
        name, place = question.adapter_id, question.adapter_place
        if name is None or name in known:
            continue
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise ValueError(f"{place}: {error}; a prompt for the plain base names no adapter") from None
        fix = f"add --adapter {shlex.quote(f'{name}=PATH')}"
        if "=" in name:
            fix = "only --adapters-dir takes a folder of such a name"
        raise ValueError(f"{place}: '{name}' is not among the adapters given ({some_of(adapters)}); {fix}")


def _plain(text: str) -> Question:
    place = f"--prompt {reprlib.repr(text)}"
    return Question(text, None, place, place)


class _PromptFor(argparse.Action):
    """Appends `NAME TEXT` to the prompts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, text = values
        place = f"--prompt-for {name} {reprlib.repr(text)}"
        given = getattr(namespace, self.dest) or ()
        setattr(namespace, self.dest, [*given, Question(text, name, place, place)])


def _stdin() -> bytes:
    if sys.stdin is None:
        raise ValueError("--prompts - reads stdin, which is closed: pipe the lines in, or name a file")
    chunks: list[bytes] = []
    stream = cast(io.BufferedReader, sys.stdin.buffer)
    while chunk := stream.read1():  # `read` would hold back a Ctrl-C that comes between two reads
        chunks.append(chunk)
    return b"".join(chunks)


def _decoded(place: str, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte {error.start + 1} of the line, 0x{line[error.start]:02x}: "
            f"{error.reason}); save it as UTF-8"
        ) from None


def _question(place: str, line: str) -> Question:
    """A line of JSON as a question. Raises ValueError naming its place and the field."""
    try:
        item = json.loads(line, object_pairs_hook=tuple)  # a dict would keep the last of two alike
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place}: not a line of JSON ({reason}): {line[:60]}") from None
    if not isinstance(item, tuple):
        raise ValueError(f'{place}: expected {{"prompt": ..., "adapter_id": ...}}, got {line[:60]}')
    names = [name for name, _ in item]
    if unknown := [name for name in names if name not in _FIELDS]:
        flags = [n for n in unknown if n in SamplingParams.__dataclass_fields__ and n not in SAMPLING_SKIP]
        fix = f"; --{flags[0].replace('_', '-')} sets it for all prompts" if flags else ""
        raise ValueError(
            f"{place}: field {(flags or unknown)[0]!r} is none of {', '.join(_FIELDS)}{fix}: {line[:60]}"
        )
    for name in _FIELDS:
        if names.count(name) > 1:
            raise ValueError(f"{place}: field '{name}' is given twice; keep one: {line[:60]}")
    if "prompt" not in names:
        raise ValueError(f"{place}: field 'prompt' is missing: {line[:60]}")
    fields = dict(item)
    prompt, adapter_id = fields["prompt"], fields.get("adapter_id")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    prompt_place, adapter_place = (f"{place}, field '{field}'" for field in _FIELDS)
    if not (isinstance(prompt, str) or is_ids):
        raise ValueError(f"{prompt_place}: a prompt is a string or a list of token ids, got {line[:60]}")
    if not isinstance(adapter_id, str | None):
        raise ValueError(f"{adapter_place}: the name of an adapter is a string or null, got {line[:60]}")
    return Question(prompt, adapter_id, prompt_place, adapter_place)
