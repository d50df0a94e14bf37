"""PEFT's `adapter_config.json`: which modules a LoRA targets, with which rank and scale, and what is refused.

Follows PEFT 0.21 (`tuners/lora/config.py`, `tuners_utils.check_target_module_exists`,
`utils/other.get_pattern_key`). Module paths are those of the base model without PEFT's wrapper:
`model.layers.3.self_attn.q_proj`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slora_jax.errors import AdapterError
from slora_jax.lora.module_regex import MOST_WAYS, check_module_regex

CONFIG_FILE = "adapter_config.json"
_LARGEST_FILE = 1 << 20  # bytes

# What PEFT targets where the config names nothing, by model_type.
_DEFAULT_TARGETS = {"llama": ("q_proj", "v_proj")}

# Fields that change what an adapter computes or what its file holds: refused when truthy.
_REFUSED = {
    "use_dora": "DoRA also rescales the base weight; merge it into a base, or train with use_dora=False",
    "lora_bias": "a bias on lora_B is not computed; train with lora_bias=False",
    "modules_to_save": "retrained modules cannot share a base model; train with modules_to_save=None",
    "fan_in_fan_out": "this base stores no transposed weights; train on it with fan_in_fan_out=False",
    "alora_invocation_tokens": "activated LoRA switches on within a sequence; train a plain LoRA",
    "use_qalora": "QALoRA pools its input; train with use_qalora=False",
    "trainable_token_indices": "retrained embeddings are not served; train with trainable_token_indices=None",
    "target_parameters": "LoRA on bare parameters is not served; train with target_modules",
    "megatron_config": "Megatron's layers are not served; export the adapter as a plain PEFT LoRA",
    "layer_replication": "it changes the base; serve the replicated model as a base of its own",
    "use_bdlora": "block-diagonal LoRA stores other shapes; train with use_bdlora=None",
    "arrow_config": "Arrow routes between adapters; serve its experts one by one",
    "kasa_config": "KaSA truncates the base weight; train with kasa_config=None",
    "monteclora_config": "MonteCLoRA adds sampled weights; train with monteclora_config=None",
    "velora_config": "VeLoRA stores extra tensors; remove them and this field",
}

# Fields that decide nothing at inference: provenance, dropout, parameters of initialisations or of the above.
_IGNORED = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
_READ = frozenset(
    {
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "init_lora_weights",
    }
)
KNOWN_FIELDS = _READ | _IGNORED | frozenset(_REFUSED)

# Initialisations that leave the base weights as they were; the others train against a changed base.
_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "lora_ga", "loftq")


@dataclasses.dataclass(frozen=True)
class PeftLoraConfig:
    """The fields of a plain LoRA's config that matter at inference, checked.

    `target_modules` and `exclude_modules` are suffixes (tuple) or a regex (str); `target_modules`
    "all-linear" is kept as that word. `layers_to_transform` and `layers_pattern` are None where unused.
    """

    path: Path  # of the file, for messages
    base_model: str | None
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...] | None

    def refused_by(self, module: str) -> str | None:
        """The field that keeps LoRA off the module at this path, or None where the config targets it."""
        if isinstance(self.exclude_modules, str):
            if self.exclude_modules and re.fullmatch(self.exclude_modules, module):
                return "exclude_modules"
        elif _has_suffix(module, self.exclude_modules):
            return "exclude_modules"
        if isinstance(self.target_modules, str):
            if self.target_modules == "all-linear":
                targeted = module not in ("lm_head", "model.embed_tokens")
            else:
                targeted = re.fullmatch(self.target_modules, module) is not None
            return None if targeted else "target_modules"
        if module in self.target_modules:  # a whole path wins over layers_to_transform, as in PEFT
            return None
        if not _has_suffix(module, self.target_modules):
            return "target_modules"
        if self.layers_to_transform is None or self._layer_index(module) in self.layers_to_transform:
            return None
        return "layers_to_transform"

    def rank(self, module: str) -> tuple[int, str]:
        """The rank of the module at this path, and the field that says so."""
        key = _pattern_key(self._rank_regexes, module)
        return (self.r, "r") if key is None else (self.rank_pattern[key], f"rank_pattern[{_shown(key)}]")

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with use_rslora, for the module at this path."""
        key = _pattern_key(self._alpha_regexes, module)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        rank = self.rank(module)[0]
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    # Compiled once: `re` itself remembers a few hundred, and a config may have one for every module.

    @functools.cached_property
    def _rank_regexes(self) -> dict[str, re.Pattern[str]]:
        return {key: re.compile(_whole_or_from_a_dot(key)) for key in self.rank_pattern}

    @functools.cached_property
    def _alpha_regexes(self) -> dict[str, re.Pattern[str]]:
        return {key: re.compile(_whole_or_from_a_dot(key)) for key in self.alpha_pattern}

    @functools.cached_property
    def _layer_regexes(self) -> list[re.Pattern[str]]:
        return [re.compile(_before_a_number(pattern)) for pattern in self.layers_pattern or ()]

    def _layer_index(self, module: str) -> int | None:
        """The first numbered segment of the path, or the one after a name in `layers_pattern`."""
        if self.layers_pattern is None:
            match = re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", module)
        else:
            matches = (regex.match(module) for regex in self._layer_regexes)
            match = next((m for m in matches if m is not None), None)
        return None if match is None else int(match["idx"])


def read_config(path: Path, model_type: str) -> PeftLoraConfig:
    """Read and check an `adapter_config.json`; `model_type` gives PEFT's default targets where it names none.

    Raises AdapterError naming the file, the field and the fix. A field that this version does not know is
    refused when its value is truthy (it may change what the adapter computes, and a wrong answer is worse
    than a refusal), and ignored when it is false, null, zero or empty.
    """
    return _Fields(path, _read_json(path)).config(model_type)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise AdapterError(f"cannot be read: {error.strerror}", file=path) from error
    if len(text) > _LARGEST_FILE:
        raise AdapterError(
            f"has more than {_LARGEST_FILE} bytes, where a config has a few thousand; save the adapter again",
            file=path,
        )
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdapterError(
            f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; save the "
            "adapter again",
            file=path,
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, endless digits, endless nesting
        raise AdapterError(f"not valid JSON: {error}; save the adapter again", file=path) from error
    if not isinstance(fields, dict):
        raise AdapterError(
            f"must hold a JSON object, found {type(fields).__name__}; save the adapter again", file=path
        )
    return fields


class _Fields:
    """Typed access to the raw fields; every refusal names file and field."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def config(self, model_type: str) -> PeftLoraConfig:
        self.check_supported()
        base_model = self.raw.get("base_model_name_or_path")
        config = PeftLoraConfig(
            path=self.path,
            base_model=base_model if isinstance(base_model, str) else None,
            r=self.integer("r", self.raw.get("r", 8)),
            lora_alpha=self.number("lora_alpha", self.raw.get("lora_alpha", 8)),
            use_rslora=self.boolean("use_rslora"),
            rank_pattern=self.pattern("rank_pattern", self.integer),
            alpha_pattern=self.pattern("alpha_pattern", self.number),
            target_modules=self.target_modules(model_type),
            exclude_modules=self.names("exclude_modules") or (),
            layers_to_transform=self.layers_to_transform(),
            layers_pattern=self.layers_pattern(),
        )
        if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
            raise self.error("layers_to_transform", "works only where target_modules is a list of names")
        if config.layers_pattern is not None and config.layers_to_transform is None:
            raise self.error("layers_pattern", "works only together with layers_to_transform")
        return config

    def error(self, field: str, reason: str) -> AdapterError:
        return AdapterError(f"field '{field}': {reason}", file=self.path)

    def check_supported(self) -> None:
        peft_type = self.raw.get("peft_type")
        if peft_type != "LORA":
            raise self.error(
                "peft_type", f"only 'LORA' is supported, found {_shown(peft_type)}; train with LoraConfig"
            )
        bias = self.raw.get("bias", "none")
        if bias != "none":
            raise self.error("bias", f"{_shown(bias)} retrains biases of the base; train with bias='none'")
        for field, reason in _REFUSED.items():
            if self.raw.get(field):
                raise self.error(field, f"{_shown(self.raw[field])} is not supported: {reason}")
        self.check_init(self.raw.get("init_lora_weights", True))
        unknown = sorted(field for field in self.raw if field not in KNOWN_FIELDS and self.raw[field])
        if unknown:
            listed = ", ".join(f"'{field}'={_shown(self.raw[field])}" for field in unknown)
            raise AdapterError(
                f"unknown field {listed}: it may change what the adapter computes; "
                "remove it from the file if it does not",
                file=self.path,
            )

    def check_init(self, init: object) -> None:
        name = init.lower() if isinstance(init, str) else None
        if init is None or isinstance(init, bool) or name in _HARMLESS_INITS:
            return
        if name is not None and name.startswith(_BASE_CHANGING_INITS):
            raise self.error(
                "init_lora_weights",
                f"{init!r} was trained against a changed base model; save it as a plain LoRA with "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            )
        raise self.error(
            "init_lora_weights",
            f"{_shown(init)} is unknown and may have changed the base model; set it to true if it did not",
        )

    def integer(self, field: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"must be a whole number of at least 1, found {_shown(value)}")
        return value

    def number(self, field: str, value: object) -> float:
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        ):
            return float(value)
        raise self.error(field, f"must be a finite number, found {_shown(value)}")

    def boolean(self, field: str) -> bool:
        value = self.raw.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, f"must be true or false, found {_shown(value)}")
        return bool(value)

    def pattern[N: (int, float)](self, field: str, check: Callable[[str, object], N]) -> dict[str, N]:
        value = self.raw.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object of regex to number, found {_shown(value)}")
        self.check_regexes(field, [(f"{field}[{_shown(key)}]", _whole_or_from_a_dot(key)) for key in value])
        return {regex: check(f"{field}[{_shown(regex)}]", number) for regex, number in value.items()}

    def names(self, field: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(field)
        if value is None:
            return None
        if isinstance(value, str):
            self.check_regexes(field, [(field, value)])
            return value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, f"must be a list of module names or a regex, found {_shown(value)}")
        return tuple(value)

    def target_modules(self, model_type: str) -> tuple[str, ...] | str:
        if isinstance(value := self.raw.get("target_modules"), str) and value.lower() == "all-linear":
            return "all-linear"
        targets = self.names("target_modules")
        if targets is None:
            if model_type not in _DEFAULT_TARGETS:
                raise self.error("target_modules", "names no modules; list those that were trained")
            return _DEFAULT_TARGETS[model_type]
        return targets

    def layers_to_transform(self) -> tuple[int, ...] | None:
        value = self.raw.get("layers_to_transform")
        layers = [value] if isinstance(value, int) else value
        if layers is None or layers == []:
            return None
        if not isinstance(layers, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in layers):
            raise self.error(
                "layers_to_transform", f"must be a layer or a list of them, found {_shown(value)}"
            )
        return tuple(layers)

    def layers_pattern(self) -> tuple[str, ...] | None:
        value = self.raw.get("layers_pattern")
        patterns = [value] if isinstance(value, str) and value else value
        if not patterns:
            return None
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise self.error("layers_pattern", f"must be a name or a list of names, found {_shown(value)}")
        self.check_regexes("layers_pattern", [("layers_pattern", _before_a_number(p)) for p in patterns])
        return tuple(patterns)

    def check_regexes(self, field: str, regexes: Iterable[tuple[str, str]]) -> None:
        """Regexes of a field, each with its name in messages: all together must be matched in no time."""
        ways = 0
        for name, regex in regexes:
            try:
                ways += check_module_regex(regex)
            except ValueError as error:
                raise self.error(name, f"{error}; name the modules instead") from error
        if ways > MOST_WAYS:
            raise self.error(field, "has too many patterns; name only what differs from the other modules")


def _has_suffix(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _whole_or_from_a_dot(key: str) -> str:
    """What PEFT's get_pattern_key matches for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({key})$"


def _before_a_number(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


def _pattern_key(regexes: Mapping[str, re.Pattern[str]], module: str) -> str | None:
    """The first key that matches the module's path, whole or from a dot on (PEFT's get_pattern_key)."""
    return next((key for key, regex in regexes.items() if regex.match(module)), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
