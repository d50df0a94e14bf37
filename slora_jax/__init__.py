"""S-LoRA in JAX: thousands of LoRA adapters on one base model, one page pool, one batch.

    from slora_jax import Engine, EngineConfig, SamplingParams

`Engine` is imported when it is first used, because it brings JAX; everything else here is cheap.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.errors import (
    AdapterError,
    AdapterExistsError,
    CheckpointError,
    LimitExceededError,
    PromptError,
    UnknownAdapterError,
)
from slora_jax.outputs import (
    AdapterInfo,
    CompletionOutput,
    EngineStats,
    LoadStats,
    RequestMetrics,
    RequestOutput,
    StreamEvent,
    TokenLogprobs,
)
from slora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora_jax.engine import Engine

__version__ = importlib.metadata.version("slora-jax")

__all__ = [
    "AdapterError",
    "AdapterExistsError",
    "AdapterInfo",
    "CheckpointError",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "LimitExceededError",
    "LoadStats",
    "ModelConfig",
    "PromptError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprobs",
    "UnknownAdapterError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from slora_jax.engine import Engine

        return Engine
    raise AttributeError(f"module 'slora_jax' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
