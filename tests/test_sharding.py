"""Meshes and the rules from logical to mesh axes."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from slora_jax.sharding.mesh import make_mesh
from slora_jax.sharding.rules import named_sharding, partition_spec


def test_heads_are_split_and_the_hidden_axis_is_not() -> None:
    assert partition_spec(("embed", "heads", "head_dim")) == PartitionSpec(None, "tp", None)


def test_an_unknown_axis_and_a_collision_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown logical axes"):
        partition_spec(("embed", "haeds"))
    with pytest.raises(ValueError, match="one mesh axis twice"):
        partition_spec(("heads", "mlp"))


def test_kv_heads_that_do_not_split_are_repeated_and_nothing_else_is() -> None:
    mesh = make_mesh(4)
    assert named_sharding(mesh, ("embed", "kv_heads"), (64, 2)).spec == PartitionSpec(None, None)
    assert named_sharding(mesh, ("embed", "kv_heads"), (64, 8)).spec == PartitionSpec(None, "tp")
    with pytest.raises(ValueError, match="does not split"):
        named_sharding(mesh, ("embed", "mlp"), (64, 6))


def test_more_shards_than_devices_says_how_many_there_are() -> None:
    with pytest.raises(ValueError, match=f"found {len(jax.devices())}"):
        make_mesh(64)
