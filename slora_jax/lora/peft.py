"""Read a PEFT LoRA folder into host memory, or refuse it with the file, key or field and the reason.

Safetensors only: a pickle can run code when it is opened, so it never is. Only local files are read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora.numerics import all_finite
from slora_jax.lora.peft_config import CONFIG_FILE, PeftLoraConfig, read_config
from slora_jax.lora.peft_folder import adapter_folder, config_file, weights_file
from slora_jax.memory.layout import MODULES, ROW_PARALLEL
from slora_jax.models.params import checkpoint_specs

MAX_RANK = 256

_MLP = ("gate_proj", "up_proj", "down_proj")
_BLOCKS = {module: "mlp" if module in _MLP else "self_attn" for module in MODULES}
_KEY = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<block>self_attn|mlp)\.(?P<module>\w+)"
    r"\.lora_(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight"
)
_DTYPES = ("F32", "F16", "BF16")  # safetensors' names


@dataclasses.dataclass(frozen=True, eq=False)
class LoraWeights:
    """One module's LoRA in one layer, in the file's dtype: y += scaling * B @ (A @ x)."""

    a: npt.NDArray[Any]  # [r, in]
    b: npt.NDArray[Any]  # [out, r]
    scaling: float


@dataclasses.dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A validated adapter in host memory; every tensor fits the base model and is finite.

    `ranks[m]` is module m's largest true rank over the layers that have it; `rank` the largest of all;
    `weights` is by (layer, module) and may lack any of them. `target_modules` is in the order of `MODULES`.
    """

    path: Path
    rank: int
    target_modules: tuple[str, ...]
    ranks: Mapping[str, int]
    weights: Mapping[tuple[int, str], LoraWeights]
    base_model: str | None  # base_model_name_or_path, as the file says


@dataclasses.dataclass(frozen=True)
class _Header:
    key: str
    dtype: str
    shape: tuple[int, ...]


def read_adapter(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    max_rank: int = MAX_RANK,
    checkpoint: Callable[[], None] = lambda: None,
) -> LoraAdapter:
    """Read the PEFT LoRA folder at `path` for a base model of shape `config`.

    Ranks and scales are PEFT's (see `peft_config`). The tensors decide what is there, and the config must
    agree with them. `checkpoint()` is called before each pair of tensors is read; what it raises is raised.
    Raises FileNotFoundError where nothing lies at `path`, and AdapterError naming the file, key or field and
    the fix for everything that is refused: all is checked before anything is returned.
    """
    folder = adapter_folder(path)
    file_path = weights_file(folder)
    lora = read_config(config_file(folder), config.model_type)
    features = module_features(config)
    try:
        with file_path.open("rb"):
            pass  # safe_open says of every file that it cannot open that there is none
        # pread: with a memory map, a file that is overwritten while it is read would kill the process
        with safe_open(file_path, framework="np", backend="pread") as file:
            pairs = _pair_up(file_path, _headers(file), config)
            _check_against_config(file_path, pairs, lora, config)
            for (layer, module), (a, b) in pairs.items():
                _check_shape(file_path, a, (None, features[module][0]), lora)
                _check_shape(file_path, b, (features[module][1], None), lora)
                _check_dtype_and_rank(file_path, a, b, _module_path(layer, module), lora, max_rank)
            weights = {}
            for (layer, module), (a, b) in sorted(pairs.items()):
                checkpoint()
                weights[layer, module] = LoraWeights(
                    _finite(file_path, a, file.get_tensor(a.key)),
                    _finite(file_path, b, file.get_tensor(b.key)),
                    lora.scaling(_module_path(layer, module)),
                )
    except SafetensorError as error:
        raise AdapterError(
            f"corrupt or cut short: {error}; copy or save the file again", file=file_path
        ) from error
    except OSError as error:
        raise AdapterError(
            f"cannot be read: {error.strerror or type(error).__name__}", file=file_path
        ) from error
    ranks = {
        module: max(w.a.shape[0] for (_, m), w in weights.items() if m == module)
        for module in MODULES
        if any(m == module for _, m in weights)
    }
    return LoraAdapter(folder, max(ranks.values()), tuple(ranks), ranks, weights, lora.base_model)


def promised_ranks(
    path: str | os.PathLike[str], config: ModelConfig, *, max_rank: int = MAX_RANK
) -> dict[str, int]:
    """Each module's largest rank by the folder's config alone; `read_adapter` refuses weights of others.

    Opens no weights, so it is cheap and says nothing of them. Raises like `read_adapter` for what the config
    shows, and where a file is missing.
    """
    folder = adapter_folder(path)
    weights_file(folder)
    lora = read_config(config_file(folder), config.model_type)
    _check_targets(lora)
    targeted = _targeted_ranks(
        lora.target_modules,
        lora.exclude_modules,
        lora.layers_to_transform,
        lora.layers_pattern,
        lora.r,
        tuple(lora.rank_pattern.items()),
        config.num_hidden_layers,
    )
    for rank, field in targeted.values():
        if rank > min(max_rank, MAX_RANK):
            raise AdapterError(
                f"field '{field}': rank {rank} is above max_lora_rank "
                f"{min(max_rank, MAX_RANK)}; raise it in EngineConfig (at most {MAX_RANK})",
                file=lora.path,
            )
    if not targeted:
        raise AdapterError(
            f"field 'target_modules' matches no module of the base model ({_base(lora)}); "
            "expected some of " + ", ".join(MODULES),
            file=lora.path,
        )
    return {module: rank for module, (rank, _) in targeted.items()}


@functools.lru_cache(256)  # adapters of one family differ in their weights only, and there may be thousands
def _targeted_ranks(
    target_modules: tuple[str, ...] | str,
    exclude_modules: tuple[str, ...] | str,
    layers_to_transform: tuple[int, ...] | None,
    layers_pattern: tuple[str, ...] | None,
    r: int,
    rank_pattern: tuple[tuple[str, int], ...],
    num_layers: int,
) -> dict[str, tuple[int, str]]:
    """Each targeted module's largest rank over the layers, and the field that says so."""
    lora = PeftLoraConfig(
        path=Path(CONFIG_FILE),
        base_model=None,
        r=r,
        lora_alpha=1,
        use_rslora=False,
        rank_pattern=dict(rank_pattern),
        alpha_pattern={},
        target_modules=target_modules,
        exclude_modules=exclude_modules,
        layers_to_transform=layers_to_transform,
        layers_pattern=layers_pattern,
    )
    ranks: dict[str, tuple[int, str]] = {}
    for module in MODULES:
        places = (_module_path(layer, module) for layer in range(num_layers))
        found = [lora.rank(place) for place in places if lora.refused_by(place) is None]
        if found:
            ranks[module] = max(found)
    return ranks


def module_features(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) features of each LoRA module of this model, unsharded."""
    specs, d = checkpoint_specs(config), config.hidden_size
    other = {module: math.prod(specs[f"layers.0.{module}"].shape) // d for module in MODULES}
    return {m: (n, d) if m in ROW_PARALLEL else (d, n) for m, n in other.items()}


def _headers(file: Any) -> list[_Header]:
    slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    return [_Header(key, part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()]


def _module_path(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{_BLOCKS[module]}.{module}"


def _pair_up(
    file: Path, headers: Iterable[_Header], config: ModelConfig
) -> dict[tuple[int, str], tuple[_Header, _Header]]:
    """A's and B's header by (layer, module); raises where a key matches no module, is alone or doubled."""
    sides: dict[tuple[int, str], dict[str, _Header]] = {}
    names: dict[str, str] = {}  # adapter name -> a key that has it
    unmatched: list[str] = []
    for header in headers:
        match = _KEY.fullmatch(header.key)
        module, layer = (match["module"], int(match["layer"])) if match else ("", -1)
        if match is None or _BLOCKS.get(module) != match["block"] or layer >= config.num_hidden_layers:
            unmatched.append(header.key)
            continue
        names.setdefault(match["name"] or "", header.key)
        side = sides.setdefault((layer, module), {})
        if match["side"] in side:
            raise AdapterError(
                f"keys '{side[match['side']].key}' and '{header.key}' name the same weight; keep one "
                "adapter a file",
                file=file,
            )
        side[match["side"]] = header
    if unmatched:
        more = f" (and {len(unmatched) - 1} more such keys)" if len(unmatched) > 1 else ""
        raise AdapterError(f"key '{unmatched[0]}': {_why_unmatched(unmatched[0], config)}{more}", file=file)
    if len(names) > 1:
        first, second = list(names.values())[:2]
        raise AdapterError(
            f"keys '{first}' and '{second}' belong to two adapters; keep one adapter a file", file=file
        )
    if not sides:
        raise AdapterError("holds no LoRA tensors; save the adapter again", file=file)
    for side in sides.values():
        if len(side) == 1:
            [(found, header)] = side.items()
            missing = "B" if found == "A" else "A"
            raise AdapterError(
                f"key '{header.key}' has no lora_{missing} beside it; save the adapter again", file=file
            )
    return {place: (side["A"], side["B"]) for place, side in sides.items()}


def _why_unmatched(key: str, config: ModelConfig) -> str:
    for module in ("lm_head", "embed_tokens"):
        if module in key.split("."):
            what = "LoRA on" if ".lora_" in key else "retrained weights of"
            return f"{what} {module} is not supported; train without them"
    for part, reason in (
        (".lora_magnitude_vector", "DoRA is not supported; train with use_dora=False"),
        (".modules_to_save.", "modules_to_save is not supported; train with modules_to_save=None"),
        (".lora_B.bias", "lora_bias is not supported; train with lora_bias=False"),
    ):
        if part in key:
            return reason
    if key.endswith(".bias"):
        return "biases are not supported; train with bias='none'"
    layer = re.search(r"\.layers\.([1-9][0-9]*)\.", key)
    if layer and (len(layer[1]) > 6 or int(layer[1]) >= config.num_hidden_layers):
        return (
            f"the base model has {config.num_hidden_layers} layers only; load the adapter on the base it was "
            "trained on"
        )
    return (
        "matches no module of the base model; expected "
        "'[base_model.model.]model.layers.N.{self_attn,mlp}.MODULE.lora_{A,B}[.name].weight', MODULE one of "
        + ", ".join(MODULES)
    )


def _check_against_config(
    file: Path,
    pairs: Mapping[tuple[int, str], tuple[_Header, _Header]],
    lora: PeftLoraConfig,
    config: ModelConfig,
) -> None:
    """The config targets just the modules that have tensors, and nothing that cannot be served."""
    _check_targets(lora)
    for layer in range(config.num_hidden_layers):
        for module in MODULES:
            path = _module_path(layer, module)
            field = lora.refused_by(path)
            if (layer, module) in pairs and field is not None:
                raise AdapterError(
                    f"key '{pairs[layer, module][0].key}': {lora.path.name} leaves {path} out (field "
                    f"'{field}'); correct the field, or save config and weights together",
                    file=file,
                )
            if (layer, module) not in pairs and field is None:
                raise AdapterError(
                    f"no key for {path}, which {lora.path.name} targets (field 'target_modules'); "
                    f"the adapter may be incomplete or of another base model ({_base(lora)})",
                    file=file,
                )


def _check_targets(lora: PeftLoraConfig) -> None:
    for path in ("lm_head", "model.embed_tokens"):
        if lora.refused_by(path) is None:
            raise AdapterError(
                f"field 'target_modules': LoRA on {path} is not supported; train without it", file=lora.path
            )


def _check_shape(
    file: Path, header: _Header, want: tuple[int | None, int | None], lora: PeftLoraConfig
) -> None:
    """The tensor is a matrix of the base model's size; None stands for the rank."""
    if len(header.shape) != 2:
        raise AdapterError(
            f"key '{header.key}': shape {list(header.shape)} is not a matrix; an FSDP or ZeRO-3 run "
            "must gather its shards before it saves",
            file=file,
        )
    if any(n is not None and n != found for n, found in zip(want, header.shape, strict=True)):
        shown = ", ".join("r" if n is None else str(n) for n in want)
        raise AdapterError(
            f"key '{header.key}': shape {list(header.shape)} does not fit this base model, which "
            f"needs [{shown}]; load the adapter on the base it was trained on ({_base(lora)})",
            file=file,
        )


def _check_dtype_and_rank(
    file: Path, a: _Header, b: _Header, path: str, lora: PeftLoraConfig, max_rank: int
) -> None:
    for header in (a, b):
        if header.dtype not in _DTYPES:
            raise AdapterError(
                f"key '{header.key}': dtype {header.dtype} is not supported; save it in float32, "
                "float16 or bfloat16",
                file=file,
            )
    rank = a.shape[0]
    want_rank, field = lora.rank(path)
    if rank < 1:
        raise AdapterError(f"key '{a.key}': rank 0; save the adapter again with gathered weights", file=file)
    if b.shape[1] != rank:
        raise AdapterError(
            f"key '{b.key}': rank {b.shape[1]}, but '{a.key}' has rank {rank}; save both again", file=file
        )
    if rank != want_rank:
        raise AdapterError(
            f"key '{a.key}': rank {rank}, but {lora.path.name} says {want_rank} (field '{field}'); "
            "correct the field, or save config and weights together",
            file=file,
        )
    if rank > MAX_RANK:
        raise AdapterError(
            f"key '{a.key}': rank {rank} is above {MAX_RANK}, the largest supported", file=file
        )
    if rank > max_rank:
        raise AdapterError(
            f"key '{a.key}': rank {rank} is above max_lora_rank {max_rank}; raise it in EngineConfig",
            file=file,
        )


def _base(lora: PeftLoraConfig) -> str:
    if not lora.base_model:
        return "which it does not name"
    path = Path(lora.base_model)  # on the machine that trained it, where it is absolute
    return f"base_model_name_or_path {path.name if path.is_absolute() else lora.base_model!r}"


def _finite(file: Path, header: _Header, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not all_finite(tensor):
        values = tensor.astype(np.float32)
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise AdapterError(
            f"key '{header.key}': {values[row, column]} at [{row}, {column}]; train or save it again",
            file=file,
        )
    return tensor
