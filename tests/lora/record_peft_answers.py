"""Ask PEFT which modules a config targets, and with which rank and scale; the tests compare with its answers.

Run where torch, transformers and peft are installed, from the root of the repository:
    python tests/lora/record_peft_answers.py > tests/lora/peft_answers.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
QKV = ["q_proj", "k_proj", "v_proj"]
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain": {"r": 4, "lora_alpha": 6, "target_modules": QKV},
    "float alpha": {"r": 3, "lora_alpha": 0.7, "target_modules": QKV},
    "negative alpha": {"r": 3, "lora_alpha": -4, "target_modules": ["o_proj"]},
    "rslora": {"r": 5, "lora_alpha": 16, "use_rslora": True, "target_modules": ["down_proj"]},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "all-linear in capitals": {"r": 2, "target_modules": "All-Linear", "exclude_modules": ["mlp.up_proj"]},
    "regex": {"r": 2, "target_modules": r".*\.[1-3]\.(self_attn\.[qv]|mlp\.up)_proj"},
    "regex must match the whole path": {"r": 2, "target_modules": r"model\.layers\.(1|11)\..*k_proj"},
    "regex with an alternative at the top": {"r": 2, "target_modules": r".*\.0\..*q_proj|.*\.5\..*o_proj"},
    "regex is no prefix": {"r": 2, "target_modules": r".*\.0\..*q_proj|model\.layers\.2\.m"},
    "suffix with parents": {"r": 2, "target_modules": ["self_attn.q_proj", "1.self_attn.v_proj"]},
    "suffix starts at a dot": {"r": 2, "target_modules": ["_proj", "proj", "attn.k_proj", "v_proj"]},
    "whole path": {"r": 2, "target_modules": ["model.layers.3.mlp.gate_proj", "layers.1.mlp.up_proj"]},
    "exclude names": {"r": 2, "target_modules": QKV, "exclude_modules": ["k_proj", "0.self_attn.q_proj"]},
    "exclude a path": {"r": 2, "target_modules": QKV, "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
    "exclude a regex": {"r": 2, "target_modules": QKV, "exclude_modules": r".*layers\.1.*(q|k)_proj"},
    "exclude nothing": {"r": 2, "target_modules": QKV, "exclude_modules": ""},
    "exclude from a regex": {"r": 2, "target_modules": r".*_proj", "exclude_modules": r".*mlp.*"},
    "one layer": {"r": 2, "target_modules": QKV, "layers_to_transform": 1},
    "layer 0": {"r": 2, "target_modules": QKV, "layers_to_transform": 0},
    "layers": {"r": 2, "target_modules": QKV, "layers_to_transform": [1, 11, 40]},
    "no layers listed": {"r": 2, "target_modules": QKV, "layers_to_transform": []},
    "layers pattern": {"r": 2, "target_modules": QKV, "layers_to_transform": [2], "layers_pattern": "layers"},
    "layers patterns": {
        "r": 2,
        "target_modules": QKV,
        "layers_to_transform": [0, 2],
        "layers_pattern": ["h", "layers", "blocks"],
    },
    "layers pattern as a regex": {
        "r": 2,
        "target_modules": QKV,
        "layers_to_transform": [0, 2],
        "layers_pattern": "lay[a-z]*",
    },
    "layers pattern with a path": {
        "r": 2,
        "target_modules": QKV,
        "layers_to_transform": [3],
        "layers_pattern": "model.layers",
    },
    "empty layers pattern": {
        "r": 2,
        "target_modules": QKV,
        "layers_to_transform": [3],
        "layers_pattern": [],
    },
    "a whole path ignores layers_to_transform": {
        "r": 2,
        "target_modules": ["model.layers.5.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "rank and alpha patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": QKV,
        "rank_pattern": {"k_proj": 2, "1.self_attn.q_proj": 7, "model.layers.2.self_attn.v_proj": 5},
        "alpha_pattern": {"v_proj": 3, "1.self_attn.q_proj": 1},
    },
    "the first matching pattern wins": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {"q_proj": 3, "model.layers.1.self_attn.q_proj": 6, ".*k_proj": 5, "k_proj": 2},
        "alpha_pattern": {"model.layers.1.self_attn.q_proj": 6, "q_proj": 3},
    },
    "anchored patterns": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {
            "^model.layers.1.self_attn.q_proj": 3,
            "^layers.2.self_attn.q_proj": 6,
            "^k_proj": 2,
        },
        "alpha_pattern": {"^model\\.layers\\.\\d+\\.self_attn\\.v_proj$": 5, "^self_attn.q_proj": 9},
    },
    "an unescaped dot": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {"layers.1..self_attn.q_proj": 3, "layers.1.self_attn.v_proj": 6},
    },
    "an alternative inside a pattern": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {"q_proj|k_proj": 3, "(1|2).self_attn.v_proj": 6},
        "alpha_pattern": {"0.*": 5, "[a-z_.]*1[01].*(q|v)_proj": 6},
    },
    "a pattern that matches the end of a name only": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {"proj": 3, "_proj": 2, "self_attn": 6, "attn.v_proj": 5},
    },
    "more than twenty names": {
        "r": 2,
        "target_modules": [f"model.layers.{i}.self_attn.{m}" for i in range(1, 12) for m in QKV],
        "rank_pattern": {"1.self_attn.k_proj": 3},
    },
    "groups and flags": {
        "r": 4,
        "target_modules": QKV,
        "rank_pattern": {"(?:layers)\\.(\\d)\\.self_attn\\.q_proj": 3, "(?=v)v_proj": 5},
    },
    "rslora with patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": [*QKV, "o_proj", "gate_proj"],
        "rank_pattern": {"^model.layers.(0|3).self_attn.q_proj": 9, "gate_proj": 1},
        "alpha_pattern": {"self_attn.[qk]_proj": 5.5, "mlp.gate_proj": 64},
    },
    "everything": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "exclude_modules": ["3.mlp.down_proj"],
        "layers_to_transform": [0, 3, 10],
        "layers_pattern": ["layers"],
        "rank_pattern": {"10.mlp.down_proj": 16, "v_proj": 2},
        "alpha_pattern": {"^model.layers.0.*": 1},
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
    },
}


def answer(fields: dict[str, Any]) -> list[tuple[int, float, str]]:
    """(rank, scale, "0.q_proj 3.v_proj ...") of the PEFT model that this config makes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
        config = peft.PeftConfig.from_pretrained(folder)
    model = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**MODEL)), config).get_base_model()
    places: dict[tuple[int, float], list[str]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            _, _, layer, _, projection = name.split(".")
            assert module.lora_A["default"].weight.shape[0] == module.r["default"]
            key = (module.r["default"], module.scaling["default"])
            places.setdefault(key, []).append(f"{layer}.{projection}")
    return [(rank, scale, " ".join(found)) for (rank, scale), found in places.items()]


def main() -> None:
    warnings.simplefilter("ignore")
    fields = sorted(field.name for field in dataclasses.fields(peft.LoraConfig))
    head = {"made_by": "tests/lora/record_peft_answers.py", "peft": peft.__version__, "model": MODEL}
    cases = {name: {"config": config, "answer": answer(config)} for name, config in CASES.items()}
    lines = [
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in (head | {"fields": fields}).items()
    ]
    of_cases = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + ',\n "cases": {\n' + ",\n".join(of_cases) + "\n }\n}\n")


if __name__ == "__main__":
    main()
