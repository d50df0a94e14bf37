"""LoRA adapters on the host: a PEFT folder becomes a `LoraAdapter`, and that a `PackedAdapter`'s pages."""

from slora_jax.lora.packing import PackedAdapter, pack_adapter, unpack_adapter, unpack_delta
from slora_jax.lora.peft import LoraAdapter, LoraWeights, read_adapter

__all__ = [
    "LoraAdapter",
    "LoraWeights",
    "PackedAdapter",
    "pack_adapter",
    "read_adapter",
    "unpack_adapter",
    "unpack_delta",
]
