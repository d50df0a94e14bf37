"""What can be told to be wrong before weights are read, which may take minutes."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection

from jax.sharding import Mesh

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.errors import UnknownAdapterError, some_of
from slora_jax.intake import RequestLimits
from slora_jax.lora.peft import promised_ranks
from slora_jax.lora.peft_folder import folder_stamp
from slora_jax.memory.layout import PageLayout
from slora_jax.memory.sizing import size_pool
from slora_jax.models.rope import Rope
from slora_jax.runner import choose_backend


def check_pinned_names(config: EngineConfig, adapters: Collection[str]) -> None:
    """Raise UnknownAdapterError for a name in `pinned_adapters` that no adapter has; reads nothing."""
    for name in config.pinned_adapters:
        if name not in adapters:
            raise UnknownAdapterError(
                f"pinned_adapters names {name!r}, which is not among the adapters given: {some_of(adapters)}"
            )


def check_adapter(model_config: ModelConfig, config: EngineConfig, path: str | os.PathLike[str]) -> None:
    """Raise what is wrong with an adapter as far as its config shows; with `lazy_adapters`, of which there
    may be very many, its files must exist.
    """
    if config.lazy_adapters:
        folder_stamp(path)
    else:
        promised_ranks(path, model_config, max_rank=config.max_lora_rank)


def check_before_loading(
    model_config: ModelConfig, config: EngineConfig, layout: PageLayout, mesh: Mesh
) -> RequestLimits:
    """What requests may ask at most. Raises what the engine's parts would raise beside the weights, as far as
    it shows without them.

    The pool is never larger than it would be now: what does not fit now, would not then.
    """
    Rope.from_config(model_config)
    gc.collect()  # memory of an engine that was dropped is free
    size = size_pool(model_config, config, layout, mesh)
    if config.kernel_backend != "auto":  # that refuses nothing, and says in the log what it takes
        choose_backend(model_config, config, mesh, layout)
    return RequestLimits.of(model_config, config, size)
