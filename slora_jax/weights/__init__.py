"""Models on disk: finding them, their configs, their weights in the mesh's shardings, converting them."""

from slora_jax.weights.conversion import ConvertFormat, convert
from slora_jax.weights.load import Progress, load_checkpoint, load_model_config
from slora_jax.weights.resolve import ModelNotFoundError, ResolvedModel, WeightFormat, resolve_model

__all__ = [
    "ConvertFormat",
    "ModelNotFoundError",
    "Progress",
    "ResolvedModel",
    "WeightFormat",
    "convert",
    "load_checkpoint",
    "load_model_config",
    "resolve_model",
]
