"""The engine: many adapters on one base model, one page pool, one batch.

    engine = Engine.from_pretrained("model.gguf", adapters={"pirate": "adapters/pirate"})
    engine.generate(["Ahoy?", "Hello?"], adapter_ids=["pirate", None])

One thread owns an engine; only `prepare_adapter`, `under_way` and the tokenizer may be called from others.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp

from slora_jax import interrupts
from slora_jax.compile_cache import enable_compile_cache
from slora_jax.completion import OutputCollector
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.intake import Prompt, RequestIntake, RequestLimits
from slora_jax.lora.host_cache import HostCache, host_budget
from slora_jax.lora.loader import AdapterLoader, PreparedAdapter
from slora_jax.lora.reader import AdapterReader
from slora_jax.lora.registry import AdapterRegistry, OnRefused, check_given, without_refused
from slora_jax.lora.store import AdapterStore
from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.memory.page_pool import PagePool
from slora_jax.memory.prefix_cache import PrefixCache
from slora_jax.memory.reclaim import Reclaimer
from slora_jax.memory.sizing import PoolSize, log_pool, size_pool
from slora_jax.models.rope import Rope
from slora_jax.outbox import Outbox
from slora_jax.outputs import AdapterInfo, EngineStats, RequestOutput, StreamEvent
from slora_jax.preflight import check_adapter, check_before_loading, check_pinned_names
from slora_jax.request import DEFAULT_TENANT, Call, GenerateRequest, Request
from slora_jax.request_table import RequestTable
from slora_jax.runner import ModelRunner
from slora_jax.sampling_params import SamplingParams
from slora_jax.scheduling.scheduler import Scheduler, SchedulerLimits
from slora_jax.scheduling.waiting import WaitingQueue
from slora_jax.sharding.mesh import make_mesh
from slora_jax.step_loop import StepLoop
from slora_jax.text import Tokenizer, load_tokenizer
from slora_jax.weights import Progress, ResolvedModel, load_checkpoint, load_model_config, resolve_model

logger = logging.getLogger(__name__)

_STAGING_BYTES = 64 << 20  # at least, where nobody chose


class Engine:
    """Serves one base model and any number of LoRA adapters. Make one with `from_pretrained`.

    It makes the parts and says who gets which events; what happens in a step is `StepLoop`'s.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: dict[str, jax.Array],
        config: EngineConfig,
        mesh: jax.sharding.Mesh,
        *,
        tokenizer: Tokenizer | None = None,
        model_name: str = "model",
    ) -> None:
        self.model_config, self.config = model_config, config
        self.tokenizer, self.model_name = tokenizer, model_name
        self.num_refused = 0  # adapters that the start left out
        self._layout = PageLayout.for_model(model_config, config.page_tokens, config.tensor_parallel_size)
        size: PoolSize = size_pool(model_config, config, self._layout, mesh)
        log_pool(size, model_config, config, self._layout)
        self.max_model_len = size.max_model_len
        self._pool = PagePool(size.num_pages, size.adapter_pages)
        self._reclaim = Reclaimer(self._pool)
        self._prefixes = PrefixCache(
            self._reclaim,
            config.page_tokens,
            enabled=config.enable_prefix_caching,
            max_prompt_tokens=Rope.from_config(model_config).length_independent_up_to,
        )
        self._runner = ModelRunner(
            model_config, config, mesh, self._layout, size.num_pages, size.max_model_len, params
        )
        host_bytes = host_budget(config.adapter_host_bytes, self._runner.pinned_host_limit)
        self._adapters = AdapterStore(
            self._reclaim, HostCache(host_bytes), on_freed=self._prefixes.drop, slot_pages=size.slot_pages
        )
        self._reader = AdapterReader(
            model_config,
            self._layout,
            jnp.dtype(config.dtype),
            config.max_lora_rank,
            self._runner.host_copy,
        )
        self._loader = self._new_loader(size.num_pages)
        self._scheduler = self._new_scheduler()
        self._outbox = Outbox()
        self._requests = RequestTable(self._adapters, self._scheduler, self._outbox)
        self._registry = AdapterRegistry(
            self._adapters,
            self._reader,
            usable_pages=self._pool.usable_for("adapter"),
            requests=self._requests,
        )
        self._intake = self._new_intake(size)
        self._loop = StepLoop(
            config,
            self._runner,
            self._scheduler,
            self._loader,
            self._reclaim,
            self._requests,
            self._outbox,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        before_weights: Callable[[Tokenizer | None, RequestLimits], None] | None = None,
        on_refused: OnRefused | None = None,
    ) -> Engine:
        """Load a model (HF folder, GGUF file, Orbax checkpoint or Hub id) and its adapters.

        `adapters` maps names to PEFT folders. `tokenizer` is a folder or GGUF file where the model's own is
        not wanted. `progress(phase, done, total)` is called while weights load and steps compile.
        `before_weights(tokenizer, limits)` is called before they are read, which may take minutes; `limits`
        are at least those of the engine, and what it raises is raised here. Raises CheckpointError,
        AdapterError or ValueError saying which file, field or limit is wrong. With `on_refused(name, error)`
        an adapter that is refused is left out, and that is told why; what it raises is raised here.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {type(config).__name__}")
        given = {} if adapters is None else adapters
        if not isinstance(given, Mapping):
            raise ValueError(f"adapters must map names to PEFT folders, got {type(given).__name__}")
        check_pinned_names(config, given)
        adapters = without_refused(given, check_given, on_refused)
        enable_compile_cache(config.compile_cache_dir)
        resolved = resolve_model(model, config.load_format)
        model_config = load_model_config(resolved)
        mesh = make_mesh(config.tensor_parallel_size)
        layout = PageLayout.for_model(model_config, config.page_tokens, config.tensor_parallel_size)
        limits = check_before_loading(model_config, config, layout, mesh)
        adapters = without_refused(
            adapters, lambda _, path: check_adapter(model_config, config, path), on_refused
        )
        own_tokenizer = _own_tokenizer(resolved) if tokenizer is None else load_tokenizer(tokenizer)
        if before_weights is not None:
            before_weights(own_tokenizer, limits)
        params = load_checkpoint(
            resolved, model_config, mesh, jnp.dtype(config.dtype), progress=progress, seed=config.seed
        )
        engine = cls(
            model_config,
            params,
            config,
            mesh,
            tokenizer=own_tokenizer,
            model_name=resolved.name,
        )
        tell = functools.partial(progress or (lambda *_: None), "loading adapters")
        engine._registry.begin_with(adapters, lazy=config.lazy_adapters, told=tell, on_refused=on_refused)
        engine.num_refused = len(given) - len(engine._adapters)
        for name in config.pinned_adapters:
            engine.pin_adapter(name)
        if config.warmup:
            engine.warmup(progress)
        return engine

    # -- requests --

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        adapter_ids: str | Seq[str | None] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (strings or lists of token ids), each with its adapter (None: the base), in their
        order.

        One adapter id or SamplingParams serves all prompts; lists must be as long as `prompts`. `tenant`,
        `priority` and `deadline_s` (see `add_request`) are those of all prompts. They are queued at once,
        even beyond the limit of a queue: whoever calls this waits for them. Raises ValueError or
        UnknownAdapterError before anything runs where one of the requests cannot be served, and
        LimitExceededError where they exceed the tokens a minute of their tenant or an adapter.
        """
        requests = self._intake.many(
            prompts, adapter_ids, sampling_params, tenant=tenant, priority=priority, deadline_s=deadline_s
        )
        collector = OutputCollector(requests)
        for event in self._run(requests):
            collector.add(event)
        return collector.outputs()

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        adapter_ids: str | Seq[str | None] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Iterator[StreamEvent]:
        """Like `generate`, yielding events as tokens arrive; closing the iterator aborts what still runs."""
        return self._run(
            self._intake.many(
                prompts, adapter_ids, sampling_params, tenant=tenant, priority=priority, deadline_s=deadline_s
            )
        )

    def add_request(
        self,
        prompt: Prompt,
        adapter_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> str:
        """Queue one request; its events come from `step`. Returns its id.

        `tenant` is who pays: fair shares and limits are by tenant. A lower `priority` goes earlier, as if it
        had come `EngineConfig.priority_s` earlier for each step. A request that has not finished `deadline_s`
        seconds from now ends with finish_reason "abort" and an `error` that says so. Raises ValueError
        (prompt, parameters or sizes that cannot be served, with the limit), UnknownAdapterError, or
        LimitExceededError (a limit of its tenant or adapter; `retry_after_s` says when to come back).
        """
        own_id = self._intake.new_id() if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        self.add_requests([GenerateRequest(own_id, prompt, adapter_id, params, tenant, priority, deadline_s)])
        return own_id

    def add_requests(self, asked: Seq[GenerateRequest]) -> None:
        """Queue all of these requests, or none: raises like `add_request` for the first that cannot be
        served, and LimitExceededError where they exceed a limit together. Early-abort gives up all of
        them, or none once one has begun: nothing is computed in vain.
        """
        requests = [self._intake.one(one) for one in asked]
        Call.of(requests)
        self._queue(requests)

    @interrupts.held()
    def abort(self, request_id: str) -> list[StreamEvent]:
        """End a request now and free what it holds; its last events ("abort") behind those that no `step` has
        handed out yet; those alone of a request that has ended. A `stream` that is open gets them itself.
        """
        with self._loop.working():
            request = self._requests.get(request_id)
            if request is not None:
                self._requests.end(request, "abort")
        return [] if self._outbox.is_streamed(request_id) else self._outbox.remove(request_id)

    def step(self) -> list[StreamEvent]:
        """Launch the next step, then hand out what the one before it sampled, but for requests of a `stream`
        that is open.

        The host runs one step ahead: the device never waits for Python, and a token is seen one step later.
        """
        with interrupts.held():
            self._outbox.sort()
            self._loop.step()
            self._outbox.sort()
        events, self._outbox.ready = self._outbox.ready, []  # no Ctrl-C between here and the return
        return events

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those that have not ended, by id; to look at, not to change."""
        return self._requests

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._loop.has_in_flight) or self._outbox.has_any_for_step()

    # -- adapters --

    def prepare_adapter(self, path: str | os.PathLike[str]) -> PreparedAdapter:
        """Read, validate and pack a PEFT folder: the slow half of `load_adapter`. Safe in any thread."""
        return self._reader.prepare(path)

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] | PreparedAdapter, *, replace: bool = False
    ) -> AdapterInfo:
        """Read and check an adapter and register it under a name; it takes pages when a request needs it.

        With `replace`, requests under way finish on the adapter they started with. Its copy in host memory
        may be dropped for others' (`adapter_host_bytes`) and is then read from the folder again, which must
        not change meanwhile. Raises AdapterError with the reason, AdapterExistsError, or ValueError for one
        that no pool of this size could hold.
        """
        return self._registry.load(name, path, replace=replace)

    def register_adapter(
        self, name: str, path: str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterInfo:
        """Like `load_adapter`, but only the folder's adapter_config.json is read and checked now: cheap
        enough for tens of thousands.

        Its weights are read when a request first needs them. Where they are then refused, requests for it end
        with an "error" that says why.
        """
        return self._registry.register(name, path, replace=replace)

    def pin_adapter(self, name: str) -> AdapterInfo:
        """Keep an adapter's pages in the pool from its next use on, until it is unpinned or unloaded.

        What is loaded under the name later stays pinned. Raises UnknownAdapterError, or ValueError where
        requests under way would not fit beside what is pinned.
        """
        return self._registry.pin(name)

    def unpin_adapter(self, name: str) -> AdapterInfo:
        """Let an adapter's pages go to others when nobody uses it. Raises UnknownAdapterError."""
        return self._registry.unpin(name)

    def unload_adapter(self, name: str) -> None:
        """Forget a name at once; memory is freed when the requests that use it have ended."""
        self._registry.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """Every adapter that is registered or still draining."""
        return self._registry.infos()

    # -- state --

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        loop, outcomes = self._loop, self._requests.outcomes
        return EngineStats(
            num_running=len(running),
            num_waiting=len(waiting),
            pages_total=self._pool.num_usable,
            pages_kv=self._pool.count("kv") - self._prefixes.idle_pages,
            pages_cached=self._prefixes.idle_pages,
            pages_adapter=self._pool.count("adapter"),
            pages_free=self._pool.num_free,
            adapters_registered=len(self._adapters),
            adapters_resident=self._adapters.num_resident,
            adapters_pinned=self._adapters.num_pinned,
            pages_pinned=self._adapters.pinned_pages(),
            adapter_loads=self._loader.loads,
            adapter_evictions=self._reclaim.evictions["adapter"],
            prefix_lookups=self._prefixes.lookups,
            prefix_query_tokens=self._prefixes.query_tokens,
            prefix_hit_tokens=self._prefixes.hit_tokens,
            prefix_evictions=self._reclaim.evictions["prefix"],
            running_adapters=tuple({s.adapter.name for s in running if s.adapter is not None}),
            waiting_adapters=tuple(waiting.adapter_names),
            steps=loop.num_steps,
            prompt_tokens=loop.prompt_tokens,
            prefilled_tokens=loop.prefilled_tokens,
            output_tokens=loop.output_tokens,
            preemptions=self._scheduler.preemptions,
            requests_finished=outcomes["finished"],
            requests_aborted=outcomes["aborted"],
            requests_failed=outcomes["failed"],
            last_step_seconds=loop.last_step_seconds,
            last_step_tokens=loop.last_step_tokens,
            loading=self._loader.stats(),
            adapters_refused=self.num_refused,
        )

    @property
    def num_steps(self) -> int:
        """Steps launched since the start."""
        return self._loop.num_steps

    @property
    def num_compilations(self) -> int:
        """Shapes of steps compiled, or found compiled on disk, since the start."""
        return self._runner.compilations

    @property
    def last_step_tokens(self) -> int:
        """Tokens that the step launched last computes, of prompts and outputs together."""
        return self._loop.last_step_tokens

    def under_way(self) -> str:
        """What the engine is at, for the log of one that hangs: its last step, requests, adapters in
        transfer. Safe in any thread, also while `step` runs.
        """
        return self._loop.under_way()

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile the shapes of usual steps now; the others compile when first met.

        Those with LoRA are compiled for the modules that the registered adapters target, for all modules
        where none is registered.
        """
        targets = self._registry.target_modules() or set(MODULES)
        self._runner.warmup((i for i, group in enumerate(GROUPS) if targets & set(group)), progress)

    @interrupts.held()
    def reset_prefix_cache(self) -> None:
        """Free every cached page that no running sequence holds."""
        self._prefixes.clear()

    def check_integrity(self) -> None:
        """Prove that pages, slots, uses of adapters and requests add up: AssertionError if not."""
        self._scheduler.check_integrity()
        self._requests.check_integrity()

    # -- inside --

    def _new_loader(self, num_pages: int) -> AdapterLoader:
        pool_bytes = num_pages * self._layout.page_bytes(jnp.dtype(self.config.dtype).itemsize)
        return AdapterLoader(
            self._adapters,
            self._runner,
            self._reader.prepare,
            staging_bytes=self.config.adapter_staging_bytes or max(_STAGING_BYTES, pool_bytes // 64),
            measured=functools.partial(self._reclaim.costs.measured, "adapter"),
        )

    def _new_scheduler(self) -> Scheduler:
        limits = SchedulerLimits.of(
            self.config,
            max_mixed_prompt_tokens=self._runner.buckets.mixed_prefill_tokens,
            max_prefill_seqs=self._runner.buckets.max_prefill_seqs,
        )
        clock = time.monotonic
        waiting = WaitingQueue(self.config, clock)
        return Scheduler(limits, self._reclaim, self._adapters, self._loader, self._prefixes, waiting, clock)

    def _new_intake(self, size: PoolSize) -> RequestIntake:
        vocab_size = self.model_config.vocab_size
        eos = {*self.model_config.eos_token_ids}
        eos |= set() if self.tokenizer is None else {*self.tokenizer.eos_token_ids}
        return RequestIntake(
            RequestLimits.of(self.model_config, self.config, size),
            self._adapters,
            self.tokenizer,
            frozenset(t for t in eos if 0 <= t < vocab_size),  # others cannot be sampled
            self.config.seed,
            is_taken=self._requests.is_taken,
        )

    def _run(self, requests: list[Request]) -> Iterator[StreamEvent]:
        """Step until these requests have ended, yielding their events; others' wait for who asked for them.

        Between two events the caller may step the engine or stream others: what that brings of these is kept.
        """
        mine = {r.request_id for r in requests}
        self._loop.take_over()
        try:
            with interrupts.held():
                self._queue(requests, queue_limits=False)
                self._outbox.open(mine)
            while True:
                with interrupts.held():
                    if not self._outbox.sort(mine) and all(r.finished for r in requests):
                        break
                    self._loop.step()
                    self._outbox.sort(mine)
                    events, self._outbox.ready = self._outbox.ready, []
                yield from events
        finally:
            try:
                self._loop.leave(requests)
            except KeyboardInterrupt:
                self._loop.leave(requests)  # that one came before it had begun
                raise

    @interrupts.held()
    def _queue(self, requests: Seq[Request], *, queue_limits: bool = True) -> None:
        """All of them, or none and an error."""
        with self._loop.working():
            self._intake.check_can_queue(requests)
            self._requests.add(requests, queue_limits=queue_limits)


def _own_tokenizer(resolved: ResolvedModel) -> Tokenizer | None:
    """The model's tokenizer; None, and a warning, where its folder has none (prompts are then token ids)."""
    path = resolved.path if resolved.path.suffix == ".gguf" else resolved.folder
    if path.is_file() or (path / "tokenizer.json").is_file() or any(path.glob("*.gguf")):
        return load_tokenizer(path)
    logger.warning(
        "%s has no tokenizer.json: prompts must be lists of token ids, and outputs have no text", path
    )
    return None
