"""Ranks, scales and targeted modules equal PEFT's own, recorded by record_peft_answers.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora.peft import promised_ranks, read_adapter
from slora_jax.lora.peft_config import KNOWN_FIELDS
from tests.lora.peft_files import write_peft_adapter

ANSWERS = json.loads((Path(__file__).parent / "peft_answers.json").read_text())
MODEL = ModelConfig(**ANSWERS["model"])
CASES: dict[str, Any] = ANSWERS["cases"]


def peft_modules(case: str) -> dict[tuple[int, str], tuple[int, float]]:
    """(rank, scale) by (layer, module)."""
    found = {}
    for rank, scale, places in CASES[case]["answer"]:
        for place in places.split():
            layer, module = place.split(".")
            found[int(layer), module] = (rank, scale)
    return found


def write(folder: Path, case: str, ranks: dict[tuple[int, str], int]) -> None:
    """A folder with just the case's fields, so that PEFT's defaults are ours to know."""
    write_peft_adapter(folder, MODEL, ranks)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **CASES[case]["config"]}))


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_scales_are_pefts(case: str, tmp_path: Path) -> None:
    expected = peft_modules(case)
    write(tmp_path, case, {place: rank for place, (rank, _) in expected.items()})
    adapter = read_adapter(tmp_path, MODEL, max_rank=256)
    found = {place: (w.a.shape[0], w.scaling) for place, w in adapter.weights.items()}
    assert found == expected
    assert adapter.rank == max(rank for rank, _ in expected.values())
    assert adapter.ranks == {
        module: max(rank for (_, m), (rank, _) in expected.items() if m == module)
        for module in {m for _, m in expected}
    }
    assert promised_ranks(tmp_path, MODEL) == adapter.ranks


@pytest.mark.parametrize("case", CASES)
def test_one_module_more_or_less_than_peft_targets_is_refused(case: str, tmp_path: Path) -> None:
    ranks = {place: rank for place, (rank, _) in peft_modules(case).items()}
    first, *others = ranks
    if others:
        write(tmp_path / "less", case, {place: ranks[place] for place in others})
        with pytest.raises(AdapterError, match=rf"no key for model\.layers\.{first[0]}\..*{first[1]}"):
            read_adapter(tmp_path / "less", MODEL, max_rank=256)
    extra = next(
        ((i, m) for i in range(12) for m in ("q_proj", "k_proj", "up_proj", "o_proj") if (i, m) not in ranks),
        None,
    )
    if extra is not None:
        write(tmp_path / "more", case, {**ranks, extra: 8})
        with pytest.raises(AdapterError, match=rf"key '.*layers\.{extra[0]}\..*{extra[1]}.*\(field '\w+'\)"):
            read_adapter(tmp_path / "more", MODEL, max_rank=256)


def test_every_field_of_loraconfig_has_been_judged() -> None:
    assert set(ANSWERS["fields"]) <= KNOWN_FIELDS
