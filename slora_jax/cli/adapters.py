"""`slora-jax adapters`: what is in a folder of adapters, and why one is refused. Loads no model."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from slora_jax.cli.errors import reading_input
from slora_jax.cli.flags import a_path, add_flags, from_flags, in_flags
from slora_jax.config import EngineConfig
from slora_jax.errors import printable

_FIELDS = (  # of EngineConfig, that decide what an adapter takes or whether it is refused
    "dtype",
    "page_tokens",
    "num_pages",
    "max_lora_rank",
    "tensor_parallel_size",
    "load_format",
)
_SKIP = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name not in _FIELDS)

_EXAMPLES = """example:
  slora-jax adapters ./adapters --model ./Llama-3.2-1B-Instruct
  slora-jax adapters ./adapters --model model.gguf --json | jq 'select(.refused) | .name, .refused'

Every tensor is read and checked as when an adapter is loaded. The exit code is 1 where one is refused."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One adapter; its fields are those of `--json`. `refused` says why, and the sizes are then unknown."""

    name: str
    path: str
    refused: str | None = None
    rank: int | None = None  # the largest over modules
    modules: Mapping[str, int] | None = None  # ranks by module
    bytes: int | None = None  # in host memory
    pages: int | None = None  # in the pool
    base_model: str | None = None


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "adapters",
        usage="slora-jax adapters FOLDER --model MODEL [--json] [options]",
        help="list and check a folder of adapters, and say why one is refused",
        description="List the adapters in a folder, each checked as if it were loaded: its rank, modules\n"
        "and size, or why it is refused. Only the model's config is read.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "folder", metavar="FOLDER", type=a_path, help="an adapter, or a folder with one in each sub-folder"
    )
    parser.add_argument(
        "--model",
        type=a_path,
        required=True,
        metavar="MODEL",
        help="their base: Hugging Face folder, GGUF file, Orbax checkpoint or Hub id",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip=_SKIP)


def run(args: argparse.Namespace) -> int:
    """Check all and print them in the order of their names."""
    from slora_jax.lora.peft_folder import find_adapters
    from slora_jax.memory.layout import PageLayout
    from slora_jax.weights import load_model_config, resolve_model

    with reading_input():
        config = from_flags(EngineConfig, args, skip=_SKIP)
        found = find_adapters(args.folder)
        model = load_model_config(resolve_model(args.model, config.load_format))
        layout = PageLayout.for_model(model, config.page_tokens, config.tensor_parallel_size)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        check = functools.partial(_check, model=model, layout=layout, config=config, flags=args.flags)
        reports = pool.map(check, found.items())
        refused = _print_json(reports) if args.json else _print_table(list(reports), args.folder)
    return int(refused > 0)


def _check(
    item: tuple[str, Path], *, model: Any, layout: Any, config: EngineConfig, flags: Collection[str]
) -> Report:
    from slora_jax.lora.packing import pack_adapter
    from slora_jax.lora.peft import read_adapter
    from slora_jax.lora.registry import check_adapter_name

    name, path = item
    try:
        check_adapter_name(name)
        adapter = read_adapter(path, model, max_rank=config.max_lora_rank)
        packed = pack_adapter(adapter, layout, _dtype(config))
        pages = packed.layout.num_pages
        if config.num_pages is not None and pages >= config.num_pages - 1:
            raise ValueError(
                f"needs {pages} pages, the pool would have {config.num_pages - 1}: raise num_pages"
            )
    except Exception as error:  # whatever it is, the other folders are of interest too
        known = isinstance(error, ValueError | OSError)
        refused = in_flags(str(error), flags) if known else f"{type(error).__name__}: {error}"
        return Report(name, str(path), refused=refused)
    return Report(
        name, str(path), None, packed.rank, dict(adapter.ranks), packed.nbytes, pages, adapter.base_model
    )


def _dtype(config: EngineConfig) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(config.dtype)


def _print_json(reports: Any) -> int:
    refused = 0
    for report in reports:
        refused += report.refused is not None
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    return refused


def _print_table(reports: list[Report], folder: str) -> int:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("adapter", "rank", "modules", "bytes", "pages"):
        right = column in ("rank", "bytes", "pages")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    refused = [report for report in reports if report.refused is not None]
    for report in reports:
        name = Text(printable(report.name))
        if report.modules is not None and report.bytes is not None:
            modules = Text(_modules(report.modules))
            table.add_row(name, str(report.rank), modules, decimal(report.bytes), str(report.pages))
        else:
            table.add_row(name, "", Text("refused", style="red"), "", "")
    console = Console()
    console.print(table)
    for report in refused:
        name_and_why = (f"\n{printable(report.name)}: ", "bold red"), printable(str(report.refused))
        console.print(Text.assemble(*name_and_why), soft_wrap=True)
    pages, nbytes = sum(r.pages or 0 for r in reports), sum(r.bytes or 0 for r in reports)
    served = f"{len(reports) - len(refused)} of {len(reports)} adapters in {printable(folder)}"
    console.print(
        f"\n{served} can be served: {decimal(nbytes)} of host memory, {pages} pages all together",
        highlight=False,
        markup=False,
    )
    return len(refused)


def _modules(ranks: Mapping[str, int]) -> str:
    """`q,k,v,o`, with ranks where they differ."""
    short = {module: module.removesuffix("_proj") for module in ranks}
    if len(set(ranks.values())) == 1:
        return ",".join(short.values())
    return ",".join(f"{short[module]}:{rank}" for module, rank in ranks.items())
