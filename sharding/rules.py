"""Logical axes of parameters -> mesh axes (Megatron: heads, mlp and vocabulary are split)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slora_jax.sharding.mesh import TP

RULES: Mapping[str, str | None] = {
    "vocab": TP,
    "heads": TP,
    "kv_heads": TP,
    "mlp": TP,
    "shard": TP,
    "embed": None,
    "head_dim": None,
}


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes.

    Raises ValueError for an unknown name, and where two axes would fall on one mesh axis.
    """
    unknown = [a for a in axes if a is not None and a not in RULES]
    if unknown:
        raise ValueError(f"unknown logical axes {unknown}; known: {sorted(RULES)}")
    physical = [None if a is None else RULES[a] for a in axes]
    used = [p for p in physical if p is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} fall on the mesh axes {used}: one mesh axis twice")
    return PartitionSpec(*physical)


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int] | None = None
) -> NamedSharding:
    """The sharding of an array with these logical axes.

    With `shape`, an axis that the mesh does not divide is repeated on every shard instead; only KV heads
    may be (fewer KV heads than shards: each shard then takes the head it needs), others raise ValueError.
    """
    spec = list(partition_spec(axes))
    for i, size in enumerate(shape or ()):
        if spec[i] is not None and size % mesh.shape[spec[i]]:
            if axes[i] != "kv_heads":
                raise ValueError(
                    f"axis '{axes[i]}' of size {size} does not split over {mesh.shape[spec[i]]} shards"
                )
            spec[i] = None
    return NamedSharding(mesh, PartitionSpec(*spec))
