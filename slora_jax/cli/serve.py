"""`slora-jax serve`: the OpenAI-compatible HTTP server. The one module below the server that knows of it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slora_jax.cli.errors import reading_input
from slora_jax.cli.flags import add_flags, from_flags
from slora_jax.cli.model import Refusals, add_model_arguments, model_adapters
from slora_jax.cli.screen import LoadProgress
from slora_jax.config import EngineConfig

if TYPE_CHECKING:
    from slora_jax.engine import Engine

SERVER_HELP: Mapping[str, str] = {  # a field of ServerConfig -> its help text
    "served_model_name": "name of the base in requests; None: that of MODEL",
    "api_key": "key that clients must send; None: $SLORA_API_KEY, else everybody may ask",
    "admin_routes": "offer the routes that load and unload adapters",
    "admin_api_key": "key of those routes; None: $SLORA_ADMIN_API_KEY",
    "adapter_root": "load adapters from folders in this one only; relative paths start there",
    "max_body_bytes": "largest request",
    "body_timeout_seconds": "how long a request's body may take to arrive",
    "max_sequences_per_request": "most prompts times n in one request",
    "watchdog_seconds": "without a step for so long while requests wait, /health is 503 and the log says why "
    "(a first step may compile for minutes); 0: never",
    "drain_seconds": "how long running requests may go on after SIGTERM or Ctrl-C (a second one aborts them)",
}
VARIABLES: Mapping[str, str] = {  # a field of ServerConfig -> where it is from, where no flag gives it
    "api_key": "SLORA_API_KEY",
    "admin_api_key": "SLORA_ADMIN_API_KEY",
}

_EXAMPLES = """example:
  slora-jax serve ./Llama-3.2-1B-Instruct --adapters sql=./sql pirate=./pirate --port 8000
  curl localhost:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"model": "pirate", "prompt": "Hello!"}'"""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    from slora_jax.server.config import ServerConfig

    parser = commands.add_parser(
        "serve",
        usage="slora-jax serve MODEL [--adapters NAME=PATH ...] [options]",
        help="answer OpenAI's API over HTTP, an adapter chosen by `model`",
        description="Serve the base model and its adapters behind OpenAI's HTTP API. A request's `model`\n"
        "names the adapter. Adapters can be loaded and unloaded while it runs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(run=run)
    add_model_arguments(parser, needed="is pinned or named by --adapters")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="address to listen at (%(default)s)"
    )
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one (%(default)s)")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)"
    )
    add_flags(group, ServerConfig, SERVER_HELP)
    add_flags(parser.add_argument_group("engine"), EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    from slora_jax.server.config import ServerConfig
    from slora_jax.server.serve import run_server

    # An empty one, of a shell's unset variable, is ServerConfig's to refuse: never an open server.
    from_environment = [n for n, v in VARIABLES.items() if getattr(args, n) is None and v in os.environ]
    args.variables = {name: VARIABLES[name] for name in from_environment}
    for name, variable in args.variables.items():
        setattr(args, name, os.environ[variable])
    with reading_input():
        server_config, engine_config = from_flags(ServerConfig, args), from_flags(EngineConfig, args)
        adapters = model_adapters(args)
    logging.getLogger("slora_jax").setLevel(args.log_level.upper())

    def load_engine() -> Engine:
        import jax

        from slora_jax.engine import Engine
        from slora_jax.lora.registry import without_refused
        from slora_jax.server.app import check_base_name
        from slora_jax.weights import resolve_model

        refusals, good = Refusals(args, adapters), adapters
        if adapters:  # create_app refuses it, too, but after the weights are loaded
            own_name = server_config.served_model_name
            base_name = own_name or resolve_model(args.model, engine_config.load_format).name
            good = without_refused(adapters, lambda name, _: check_base_name(base_name, [name]), refusals)
        # There a step takes many seconds to compile, in which nobody is answered.
        warmup = jax.default_backend() != "cpu" if engine_config.warmup is None else engine_config.warmup
        config = dataclasses.replace(engine_config, warmup=warmup)
        with LoadProgress(Console(stderr=True)) as progress:
            engine = Engine.from_pretrained(
                args.model, good, config, tokenizer=args.tokenizer, progress=progress, on_refused=refusals
            )
        if refusals.names:  # one that has the base's name among them
            engine.num_refused = len(refusals.names)
        return engine

    with reading_input():  # above all a port that is taken, and what load_engine finds wrong
        run_server(load_engine, args.host, args.port, server_config, log_level=args.log_level)
    return 0
