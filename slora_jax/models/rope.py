"""Rotary position embeddings with every `rope_scaling` of Hugging Face's Llama family.

Follows transformers' `modeling_rope_utils.py`: "default", "linear", "dynamic", "yarn", "llama3", "longrope".
The frequencies of "dynamic" and "longrope" depend on the length of the sequence that a token belongs to when
it is computed; here each token carries that length, so that chunking, batching and recomputation do not
change its rotation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slora_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """`inv_freq` f32[e/2] for lengths up to `switch_length`, `inv_freq_long` beyond it ("longrope"; else
    None).

    With `dynamic_factor`, lengths beyond `switch_length` stretch `theta` instead (NTK). `attention_factor`
    scales cos and sin.
    """

    inv_freq: np.ndarray
    attention_factor: float = 1.0
    switch_length: int = 0
    inv_freq_long: np.ndarray | None = None
    dynamic_factor: float | None = None
    theta: float = 10000.0

    @classmethod
    def from_config(cls, config: ModelConfig) -> Rope:
        """Raises ValueError for a `rope_type` that is not known or lacks a field it needs."""
        scaling = dict(config.rope_scaling or {})
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in _ROPE_TYPES:
            raise ValueError(
                f"rope_scaling: type '{rope_type}' is not supported; supported: {sorted(_ROPE_TYPES)}"
            )
        if scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("rope_scaling: partial_rotary_factor other than 1.0 is not supported")
        try:
            return _ROPE_TYPES[rope_type](config, scaling)
        except KeyError as missing:
            raise ValueError(f"rope_scaling: type '{rope_type}' needs the field {missing}") from None

    @property
    def length_independent_up_to(self) -> int | None:
        """Longest prompt whose first keys are those of a shorter one; None: any (no rotation by length)."""
        by_length = self.dynamic_factor is not None or self.inv_freq_long is not None
        return self.switch_length if by_length else None

    def cos_sin(self, positions: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos, sin f32[t, e/2] of `positions[t] * inv_freq`, times the attention factor.

        `lengths` i32[t]: tokens of the sequence at the time the token is computed (dynamic and longrope
        only).
        """
        inv_freq = jnp.asarray(self.inv_freq)[None]
        if self.dynamic_factor is not None:
            half = self.inv_freq.shape[0]
            dim = 2 * half
            length = jnp.maximum(lengths, self.switch_length).astype(jnp.float32)
            stretch = (self.dynamic_factor * length / self.switch_length) - (self.dynamic_factor - 1)
            base = self.theta * stretch ** (dim / (dim - 2))
            exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
            inv_freq = jnp.where(
                (lengths > self.switch_length)[:, None], 1.0 / base[:, None] ** exponent, inv_freq
            )
        elif self.inv_freq_long is not None:
            inv_freq = jnp.where((lengths > self.switch_length)[:, None], self.inv_freq_long[None], inv_freq)
        angles = positions.astype(jnp.float32)[:, None] * inv_freq
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def _base_inv_freq(config: ModelConfig) -> np.ndarray:
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    return (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)


def _default(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    return Rope(_base_inv_freq(config))


def _linear(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    return Rope((_base_inv_freq(config) / np.float32(scaling["factor"])).astype(np.float32))


def _dynamic(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    return Rope(
        _base_inv_freq(config),
        switch_length=config.max_position_embeddings,
        dynamic_factor=float(scaling["factor"]),
        theta=config.rope_theta,
    )


def _llama3(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    inv_freq = _base_inv_freq(config)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return Rope(np.where(medium, blended, scaled).astype(np.float32))


def _yarn(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    original = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(scaling.get("factor") or config.max_position_embeddings / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = (
            _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
        )
    dim, theta = config.head_dim, config.rope_theta

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    interpolate = np.clip(ramp, 0, 1)
    inv_freq = _base_inv_freq(config)
    mixed = inv_freq / np.float32(factor) * interpolate + inv_freq * (1 - interpolate)
    return Rope(mixed.astype(np.float32), attention_factor=float(attention))


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _longrope(config: ModelConfig, scaling: Mapping[str, Any]) -> Rope:
    original = int(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(scaling.get("factor") or config.max_position_embeddings / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    inv_freq = _base_inv_freq(config)
    short, long = (np.asarray(scaling[k], np.float32) for k in ("short_factor", "long_factor"))
    if short.shape != inv_freq.shape or long.shape != inv_freq.shape:
        raise ValueError(
            f"rope_scaling: short_factor and long_factor need head_dim / 2 = {inv_freq.size} entries"
        )
    return Rope(inv_freq / short, float(attention), switch_length=original, inv_freq_long=inv_freq / long)


_ROPE_TYPES: Mapping[str, Callable[[ModelConfig, Mapping[str, Any]], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
