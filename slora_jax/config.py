"""What is served (`ModelConfig`) and how (`EngineConfig`); both frozen, both checked when they are made."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slora_jax.checks import Interval, as_adapter_name, as_kind, as_list, as_tenant, check_fields

Dtype = Literal["float32", "bfloat16"]
KernelBackend = Literal["auto", "xla", "mosaic"]
POLICIES = ("fcfs", "cluster", "vtc", "early-abort")  # of EngineConfig.scheduling_policy
LoraMode = Literal["gathered", "padded-bmm", "merge"]
LORA_MODES: tuple[str, ...] = typing.get_args(LoraMode)
LIMITS = ("max_concurrency", "tokens_per_minute", "max_queue")  # of a tenant or adapter
type NamedLimits = Mapping[str, Mapping[str, int | None]]  # by name, then by one of LIMITS; None: no limit
LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]

_UNSUPPORTED = {  # field of an HF config.json -> the only value this project computes correctly today
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "sliding_window": None,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder, in the field names of Hugging Face's `config.json`.

    `rope_scaling` is HF's dictionary (`{"rope_type": "llama3", "factor": 8.0, ...}`) or None.
    `eos_token_ids` may be empty where the model names none (the tokenizer then decides).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        for name, ok, want in (
            ("rms_norm_eps", 0 <= self.rms_norm_eps < 1, "in [0, 1)"),
            ("rope_theta", 0 < self.rope_theta < math.inf, "above 0"),
        ):
            if not ok:
                raise ValueError(f"model config: {name} must be {want}, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model config: num_key_value_heads {self.num_key_value_heads} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim must be even for RoPE, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The shape described by a parsed HF `config.json` (transformers 4 and 5 spellings of RoPE).

        Raises ValueError naming the field where the file asks for something this model does not compute.
        """
        model_type = config.get("model_type", "llama")
        if model_type != "llama":
            raise ValueError(f"model_type '{model_type}' is not supported; supported: 'llama'")
        for field, supported in _UNSUPPORTED.items():
            if config.get(field, supported) != supported:
                raise ValueError(
                    f"config.json: {field}={config[field]!r} is not supported (only {supported!r} is)"
                )
        required = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        )
        missing = [field for field in required if config.get(field) is None]
        if missing:
            raise ValueError(f"config.json: missing {', '.join(missing)}")

        def read(field: str, kind: type, default: Any = None) -> Any:
            value = config.get(field)
            return default if value is None else as_kind(f"config.json: {field}", value, kind)

        def size(field: str, default: int = 0) -> int:
            """A whole number; 0 (which a shape refuses) where there is none, and no default."""
            return int(read(field, int, default)) or default

        heads = size("num_attention_heads")
        rope = _rope(config)
        theta = rope.pop("rope_theta", None) or read("rope_theta", float, 10000.0)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        original = config.get(
            "original_max_position_embeddings"
        )  # Phi-3 and friends put it beside the dictionary
        if original is not None:
            rope.setdefault("original_max_position_embeddings", original)
        eos = config.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(
            vocab_size=size("vocab_size"),
            hidden_size=size("hidden_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", size("hidden_size") // max(heads, 1)),
            intermediate_size=size("intermediate_size"),
            max_position_embeddings=size("max_position_embeddings", 2048),
            rms_norm_eps=read("rms_norm_eps", float, 1e-6),
            rope_theta=as_kind("config.json: rope_theta", theta, float),
            rope_scaling=None if rope_type == "default" else rope,
            tie_word_embeddings=read("tie_word_embeddings", bool, False),
            bos_token_id=read("bos_token_id", int),
            eos_token_ids=tuple(as_kind("config.json: eos_token_id", token, int) for token in eos),
            model_type=model_type,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary that `from_hf` reads back to an equal ModelConfig."""
        out = dataclasses.asdict(self)
        out["eos_token_id"] = list(out.pop("eos_token_ids")) or None
        out["architectures"] = ["LlamaForCausalLM"]
        return out


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary of `rope_scaling`, or transformers 5's `rope_parameters`."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"config.json: rope_scaling must be an object or null, got {found!r}")
    out = dict(found)
    if "factor" in out and not as_kind("config.json: rope_scaling.factor", out["factor"], float) > 0:
        raise ValueError(f"config.json: rope_scaling.factor must be above 0, got {out['factor']}")
    return out


_LARGEST = 1e9  # price, weight, seconds
_INTEGERS = 2**48
_AT_LEAST_1, _AT_LEAST_0 = Interval(1), Interval(0)
_WEIGHT = Interval(1 / _LARGEST, _LARGEST)


def _option[T](default: T, help: str, limits: Interval | None = None) -> T:
    """A dataclass field that carries its own description, which `--help` shows, and a number's limits."""
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits})


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Every field has a default that works; a wrong value raises ValueError with the fix.

    Sizes are in tokens, pages or bytes as their names say; None means chosen from the model and the device.
    """

    dtype: Dtype = _option(
        "bfloat16", "number type of weights, KV cache and adapters; logits and sampling are float32"
    )
    max_batch_size: int = _option(32, "sequences that may run at once", Interval(1, 2**20))
    max_model_len: int | None = _option(
        None,
        "longest sequence, prompt and output together, in tokens; None: the model's own limit",
        Interval(2),  # a token of the prompt and one of the output
    )
    max_step_tokens: int = _option(
        512, "most tokens in one step, decodes and prefill chunks together", _AT_LEAST_1
    )
    prefill_chunk_tokens: int | None = _option(
        None, "longest chunk of one prompt in a step, in tokens; None: what the step has left", _AT_LEAST_1
    )
    prefill_delay_steps: int = _option(
        12,
        "steps that a nearly full batch lets prompts gather to prefill them together; 0: none",
        _AT_LEAST_0,
    )
    page_tokens: int = _option(16, "tokens of KV in one page", _AT_LEAST_1)
    num_pages: int | None = _option(None, "pages in the pool; None: from pool_bytes", Interval(2))
    pool_bytes: int | None = _option(
        None, "bytes of the pool; None: what memory_fraction of the device leaves", _AT_LEAST_1
    )
    memory_fraction: float = _option(
        0.85, "share of an accelerator's memory for weights and pool", Interval(0, 1, above_low=True)
    )
    unified_memory: bool = _option(
        True,
        "KV and adapters share all pages; off (for ablation only): adapters lie in adapter_slots slots, each "
        "as large as max_lora_rank on every module takes",
    )
    adapter_slots: int | None = _option(
        None, "adapters in the pool at most, without unified memory", _AT_LEAST_1
    )
    enable_prefix_caching: bool = _option(
        True, "keep the KV of ended requests while memory allows, for prompts that begin alike"
    )
    pinned_adapters: tuple[str, ...] = _option(
        (), "adapter that stays in the pool once it is there; may be given again"
    )
    max_lora_rank: int = _option(256, "highest rank that an adapter may have", Interval(1, 256))
    lazy_adapters: bool = _option(
        False,
        "check adapters by their adapter_config.json alone at the start; read weights when needed",
    )
    adapter_host_bytes: int | None = _option(
        None,
        "host memory for adapters that can be read again; None: half of the machine's, on a GPU 48G at most",
        _AT_LEAST_1,
    )
    adapter_staging_bytes: int | None = _option(
        None,
        "bytes of adapters on their way into the pool at a time, which other devices than CUDA's hold beside "
        "the pool meanwhile; None: a 64th of the pool, at least 64M",
        _AT_LEAST_1,
    )
    adapter_prefetch: int = _option(
        16,
        "waiting sequences whose adapters are loaded ahead of their turn; 0: the next one's, and no guesses",
        _AT_LEAST_0,
    )
    prefetch_watermark: float = _option(
        0.2, "share of the pool that adapters loaded on a guess must leave free", Interval(0, 1)
    )
    tensor_parallel_size: int = _option(1, "devices that share the model", _AT_LEAST_1)
    kernel_backend: KernelBackend = _option(
        "auto",
        "kernels to run: xla (any device), mosaic (a Hopper GPU, bfloat16), auto (mosaic where it can be)",
    )
    lora_mode: LoraMode = _option(
        "gathered",
        "how adapters are applied: gathered; for ablation only padded-bmm (a copy of its adapter's weights "
        "for every token, padded to the batch's largest rank) or merge (one adapter at a time, in the base's "
        "weights)",
    )
    load_format: LoadFormat = _option(
        "auto", "form of the checkpoint; auto tells from the files, dummy makes random weights"
    )
    seed: int = _option(0, "seed of requests that name none, and of dummy weights", Interval(0, 2**63 - 1))
    max_logprobs: int = _option(
        20, "most alternatives that a request may ask logprobs for", Interval(0, 2**31 - 1)
    )
    record_logits: bool = _option(
        False, "keep every sampled position's logits in the outputs (research; slow)"
    )
    compile_cache_dir: str | None = _option(
        None, "folder of compiled steps; None: $XDG_CACHE_HOME/slora-jax/xla; '' keeps none"
    )
    warmup: bool | None = _option(
        None, "compile the usual shapes before the first request; None: a server on an accelerator does"
    )
    scheduling_policy: str = _option(
        "fcfs",
        "who is taken next: fcfs, or a sum of cluster (adapters in the batch, in the pool or on their way "
        "first), vtc (fair shares for tenants) and early-abort (give up what would miss ttft_target_s): "
        "vtc+cluster",
    )
    priority_s: float = _option(
        10.0,
        "seconds of waiting that one step of a request's priority is worth (lower is earlier)",
        Interval(0, _LARGEST),
    )
    cluster_max_passes: int = _option(
        64,
        "with cluster or merge: how many later sequences may go before one that could run",
        Interval(0, _LARGEST),
    )
    ttft_target_s: float = _option(
        6.0,
        "with early-abort: seconds within which a first token is wanted",
        Interval(0, _LARGEST, above_low=True),
    )
    vtc_input_price: float = _option(1.0, "with vtc: price of a prompt token", Interval(0, _LARGEST))
    vtc_output_price: float = _option(
        2.0, "with vtc: price of an output token", Interval(0, _LARGEST, above_low=True)
    )
    tenant_weights: Mapping[str, float] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={"help": "with vtc: a tenant's share, 1 for those not named; may be given again"},
    )
    tenant_max_concurrency: int | None = _option(
        None, "sequences of one tenant that may run at once", _AT_LEAST_1
    )
    tenant_tokens_per_minute: int | None = _option(
        None,
        "tokens of one tenant a minute: a prompt counts when it comes, outputs as they are made",
        _AT_LEAST_1,
    )
    tenant_max_queue: int | None = _option(
        None,
        "sequences of one tenant that may wait, for the next step or an adapter, too; more are refused",
        _AT_LEAST_1,
    )
    adapter_max_concurrency: int | None = _option(
        None, "sequences of one adapter that may run at once", _AT_LEAST_1
    )
    adapter_tokens_per_minute: int | None = _option(
        None,
        "tokens of one adapter a minute: a prompt counts when it comes, outputs as they are made",
        _AT_LEAST_1,
    )
    adapter_max_queue: int | None = _option(
        None,
        "sequences of one adapter that may wait, for the next step or a load, too; more are refused",
        _AT_LEAST_1,
    )
    tenant_limits: NamedLimits = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={
            "help": "limits of one tenant, each in place of that of all: "
            "acme=max-concurrency:8,tokens-per-minute:60000,max-queue:none (no limit); may be given again"
        },
    )
    adapter_limits: NamedLimits = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={"help": "the same for the adapter of a name, registered or not; may be given again"},
    )

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise ValueError(f"EngineConfig: {error}") from None
        names = as_list("EngineConfig: pinned_adapters", self.pinned_adapters, "a list of adapters' names")
        names = [as_adapter_name("EngineConfig: a name in pinned_adapters", name) for name in names]
        object.__setattr__(self, "pinned_adapters", tuple(names))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "seed":
                _check(value < _INTEGERS, f"{field.name} must be below 2^48, got {value}")
        _check(
            self.unified_memory == (self.adapter_slots is None),
            "adapter_slots says how many adapters the pool holds without unified memory, and is needed then: "
            f"unified_memory is {self.unified_memory}, adapter_slots {self.adapter_slots}",
        )
        _check(
            self.num_pages is None or self.pool_bytes is None,
            f"num_pages {self.num_pages} and pool_bytes {self.pool_bytes} both say how large the pool is: "
            "give one of them",
        )
        self._check_scheduling()
        _check(
            self.max_step_tokens >= self.max_batch_size,
            f"max_step_tokens {self.max_step_tokens} must be at least max_batch_size {self.max_batch_size}: "
            "every running sequence decodes one token a step",
        )

    @property
    def policies(self) -> frozenset[str]:
        """The names in `scheduling_policy`."""
        return frozenset(self.scheduling_policy.split("+"))

    def _check_scheduling(self) -> None:
        _check(
            self.policies <= set(POLICIES) and len(self.policies) == len(self.scheduling_policy.split("+")),
            f"scheduling_policy must be one of {', '.join(POLICIES)}, or several, each once, joined by '+' "
            f"(vtc+cluster), got {self.scheduling_policy!r}",
        )
        _check(
            self.lora_mode != "merge" or "cluster" not in self.policies,
            "lora_mode 'merge' takes sequences by adapter already: leave cluster out of scheduling_policy "
            f"{self.scheduling_policy!r}",
        )
        _check(
            isinstance(self.tenant_weights, Mapping),
            f"tenant_weights must map tenants to weights, got {self.tenant_weights!r}",
        )
        weights = {
            as_tenant("EngineConfig: a tenant's name (tenant_weights)", name): as_kind(
                f"EngineConfig: tenant_weights[{name!r}]", weight, float
            )
            for name, weight in self.tenant_weights.items()
        }
        for name, weight in weights.items():
            _check(weight in _WEIGHT, f"tenant_weights[{name!r}] must be {_WEIGHT}, got {weight}")
        object.__setattr__(self, "tenant_weights", weights)
        for field, as_name in (("tenant_limits", as_tenant), ("adapter_limits", as_adapter_name)):
            object.__setattr__(self, field, _named_limits(field, getattr(self, field), as_name))


def _named_limits(field: str, given: object, as_name: Callable[[str, object], str]) -> NamedLimits:
    """A copy with Python's own numbers; raises ValueError for what is no name or no limit."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{field} must map names to limits, got {given!r}")
    limits: dict[str, dict[str, int | None]] = {}
    for name, own in given.items():
        as_name(f"EngineConfig: a name in {field}", name)
        where, known = f"{field}[{name!r}]", ", ".join(LIMITS)
        _check(
            isinstance(own, Mapping) and bool(own) and set(own) <= set(LIMITS),
            f"{where} must map some of {known} to numbers or None, got {own!r}",
        )
        limits[name] = {}
        for limit, most in own.items():
            number = (
                most if most is None else as_kind(f"EngineConfig: {where}[{limit!r}]", most, int, " or None")
            )
            ok = number is None or 1 <= number < _INTEGERS
            _check(ok, f"{where}[{limit!r}] must be at least 1 and below 2^48, or None, got {most}")
            limits[name][limit] = number
    return limits


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"EngineConfig: {message}")
