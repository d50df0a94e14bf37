"""Dummy weights: from a config alone, the same whatever the sharding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slora_jax.errors import CheckpointError
from slora_jax.models.params import checkpoint_specs
from slora_jax.sharding.mesh import make_mesh
from slora_jax.sharding.rules import named_sharding
from slora_jax.weights import load_checkpoint, load_model_config, resolve_model
from tests.weights import tiny


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_do_not_depend_on_the_sharding(tiny_model_dir: Path, dtype: str) -> None:
    resolved = resolve_model(tiny_model_dir, "dummy")
    config = load_model_config(resolved)
    one, two, four = (load_checkpoint(resolved, config, make_mesh(tp), dtype, seed=3) for tp in (1, 2, 4))
    for name, spec in checkpoint_specs(config).items():
        assert four[name].sharding == named_sharding(make_mesh(4), spec.axes, spec.shape)
        assert one[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(two[name]), err_msg=name)
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(four[name]), err_msg=name)


def test_distribution(tiny_model_dir: Path) -> None:
    resolved = resolve_model(tiny_model_dir, "dummy")
    config = load_model_config(resolved)
    params = {n: np.asarray(a) for n, a in load_checkpoint(resolved, config, make_mesh(2), "float32").items()}
    assert params["embed_tokens"].std() == pytest.approx(0.02, rel=0.02)
    assert abs(params["embed_tokens"].mean()) < 5e-4
    assert (params["norm"] == 1).all()
    assert not np.array_equal(params["layers.0.q_proj"], params["layers.1.q_proj"])
    other = load_checkpoint(resolved, config, make_mesh(2), "float32", seed=1)
    assert not np.array_equal(params["lm_head"], np.asarray(other["lm_head"]))


def test_what_a_dummy_is_made_from(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path / "hf", tiny.hf_tensors())
    tiny.write_gguf(tmp_path / "one.gguf", tiny.hf_tensors())
    config = load_model_config(resolve_model(tmp_path / "hf"))
    for path in (tmp_path / "hf", tmp_path / "hf" / "config.json", tmp_path / "one.gguf", tmp_path):
        resolved = resolve_model(path, "dummy")
        assert (resolved.format, load_model_config(resolved)) == ("dummy", config)
    (tmp_path / "two.gguf").touch()
    with pytest.raises(CheckpointError, match=r"needs a config.json \(or one GGUF file\)"):
        resolve_model(tmp_path, "dummy")
