"""One step after another: scheduled, launched, and collected when the next one runs.

The host runs one step ahead of the device, which never waits for Python: while a step runs, the next one is
planned and launched, and only then are its tokens waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from slora_jax import interrupts
from slora_jax.completion import accept_token
from slora_jax.config import EngineConfig
from slora_jax.errors import some_of
from slora_jax.lora.loader import AdapterLoader
from slora_jax.memory.reclaim import Reclaimer
from slora_jax.outbox import Outbox
from slora_jax.outputs import StreamEvent
from slora_jax.request import Request
from slora_jax.request_table import RequestTable
from slora_jax.runner import InFlight, ModelRunner
from slora_jax.scheduling.scheduler import Scheduler, StepPlan
from slora_jax.step_times import StepTimes

logger = logging.getLogger(__name__)

_EXIT_WAIT = 5.0  # seconds that an exit waits for a step of another thread
_LOAD_WAIT = 0.01  # seconds that a step waits for an adapter's read where it has nothing else to do


_LOOPS: weakref.WeakSet[StepLoop] = weakref.WeakSet()


class StepLoop:
    """Runs the steps of `requests`, whose events go to `outbox`, and owns the one that is in flight.

    What else works on the queue, pages or requests does it in `working`, lest a stream that Python closes
    meanwhile is left in the middle of that.

    Counters: `num_steps` launched; `prefilled_tokens`, of prompts, recomputed ones included; `output_tokens`
    collected; `prompt_tokens` of prompts whose first token came, cached ones included. `last_step_seconds` is
    how long the host took for the step launched last, which computes `last_step_tokens`.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        scheduler: Scheduler,
        loader: AdapterLoader,
        reclaim: Reclaimer,
        requests: RequestTable,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._runner, self._scheduler, self._loader = runner, scheduler, loader
        self._reclaim, self._requests, self._outbox = reclaim, requests, outbox
        self._in_flight: InFlight | None = None
        self._last_plan = self._planned = StepPlan([], [])  # counted; made, and perhaps not launched yet
        self._times = StepTimes()
        self._at_work, self._owner = False, threading.get_ident()
        self._left: list[Seq[Request]] = []  # of streams that were closed meanwhile
        self.num_steps = self.prompt_tokens = self.prefilled_tokens = self.output_tokens = 0
        self.last_step_seconds, self.last_step_tokens = 0.0, 0
        self._closed = False
        _LOOPS.add(self)

    @property
    def has_in_flight(self) -> bool:
        """Whether a step was launched and not collected."""
        return self._in_flight is not None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Meanwhile no stream is left: those that are closed wait for the next step. In a daemon thread of a
        process that exits nothing begins any more.
        """
        before, self._at_work = self._at_work, True
        if self._closed and not before and threading.current_thread().daemon:
            self._at_work = False
            threading.Event().wait()  # for the end of the process
        try:
            yield
        finally:
            self._at_work = before

    def take_over(self) -> None:
        """The calling thread is the one that runs steps: it alone may leave streams at once."""
        self._owner = threading.get_ident()

    def step(self) -> None:
        """Schedule and launch the next step, then collect what the one before it sampled."""
        started = time.perf_counter()
        self._times.begin()
        self.take_over()
        while self._left:
            self._leave_now(self._left.pop())
        with self.working():
            for overdue in self._scheduler.waiting.overdue(running=len(self._scheduler.running)):
                self._requests.end(overdue.request, "abort", overdue.reason, overdue.retry_after_s)
            try:
                self._planned = plan = self.schedule()
                self._times.part("scheduling")
                launched, compiled = self._launch(plan)
                self._times.part("launch")
                if self._in_flight is not None:
                    self._outbox.ready += self.collect(self._in_flight)
                self._times.part("waiting for the step before")
                runs, follows = launched is not None, self._in_flight is not None
                self._loader.stepped(runs=runs, timed=runs and follows and not compiled)
                # No step is under way now but the one whose plan gave adapters their pages.
                self._loader.transfer()
                self._times.part("beginning copies of adapters")
            except BaseException:  # Ctrl-C above all
                self.rewind()
                raise
            self._in_flight = launched
            last, self._last_plan = self._last_plan, plan
            if launched is not None:
                self._count(last, plan, time.perf_counter() - started, compiled=compiled)

    def schedule(self) -> StepPlan:
        """The next step's plan. Where nothing can run before an adapter is loaded, wait for it, but not for
        long: others may come meanwhile.
        """
        until = time.monotonic() + _LOAD_WAIT
        if self._in_flight is None:
            self._loader.idle()
        while True:
            self._loader.settle()
            self._fail_loads()
            plan = self._scheduler.schedule()
            self._scheduler.guess()
            left = until - time.monotonic()
            idle = self._in_flight is None and not self._outbox.ready and self._requests
            if plan or not idle or left <= 0:
                return plan
            self._loader.transfer()
            if not self._fail_loads() and not self._loader.wait(left):
                return plan

    def collect(self, in_flight: InFlight) -> list[StreamEvent]:
        """Wait for a step and hand its tokens to their sequences; those that have ended are passed over."""
        with interrupts.let_in():
            fetched = in_flight.fetch()
        tokens, events = fetched["tokens"].tolist(), []
        for row, chunk in in_flight.rows:  # hundreds, each step
            sequence = chunk.sequence
            sequence.pending -= 1
            if sequence.finish_reason is not None:
                continue
            event = accept_token(sequence, tokens[row], row, fetched)
            if event.token_ids:
                self.output_tokens += 1
                self._scheduler.waiting.sampled(sequence)
                if len(sequence.tokens) == sequence.prompt_len + 1:
                    self.prompt_tokens += sequence.prompt_len
            if event.finish_reason is not None:
                self._requests.release(sequence)
            events.append(event)
        return events

    @interrupts.held()
    def rewind(self) -> None:
        """After a step that broke off: sampled tokens that were not collected are computed again, to the same
        values, and adapters on their way to the device are sent anew. Cannot mend a pool that the device
        lost; the next step says so.
        """
        self._in_flight = None
        try:
            self._runner.wait()  # the pages that they use will be others'
        finally:
            self._loader.rewind()
            for request in self._requests.values():
                for sequence in request.sequences:
                    sequence.pending = 0
            self._scheduler.preempt_all()

    def leave(self, requests: Seq[Request]) -> None:
        """Whoever asked for these requests goes: end them, and with the last ones the step ahead.

        A stream that nobody has any more is closed by Python, perhaps in the middle of an engine's work (a
        Ctrl-C that is due there must not be raised here, where Python drops it) or in another thread: the
        next step then does it.
        """
        if self._closed:
            return
        if self._at_work or interrupts.are_held() or not self._is_mine():
            self._left.append(requests)
        else:
            self._leave_now(requests)

    @interrupts.held()
    def _leave_now(self, requests: Seq[Request]) -> None:
        with self.working():
            for request in requests:
                if self._requests.get(request.request_id) is request:
                    self._requests.end(request, "abort")
            self._outbox.close({r.request_id for r in requests})
            if not self._requests:
                self._finish_in_flight()

    def close(self) -> None:
        """The process exits, whose streams cannot be left once Python takes modules down: end all requests.

        A thread that runs steps by now is a daemon, which Python stops anywhere: it begins no further step.
        The one that it is in is waited for, _EXIT_WAIT seconds at most; once that is over, so is the device.
        """
        self._closed = True
        if any(thread.ident == self._owner for thread in threading.enumerate()) and not self._is_mine():
            until = time.monotonic() + _EXIT_WAIT
            while self._at_work and time.monotonic() < until:
                time.sleep(0.001)
            if self._at_work:
                logger.warning("the process ends in the middle of an engine's step: %s", self.under_way())
            else:
                self._runner.wait()
            return
        with self.working():
            for request in list(self._requests.values()):
                self._requests.end(request, "abort")
            self._finish_in_flight()

    def _is_mine(self) -> bool:
        """Whether the calling thread is the one that runs steps."""
        return threading.get_ident() == self._owner

    def _finish_in_flight(self) -> None:
        """Of the last step, whose tokens nobody wants: a process must not exit while it runs."""
        if self._in_flight is not None:
            self._outbox.ready += self.collect(self._in_flight)
            self._in_flight = None

    def under_way(self) -> str:
        """The last step planned and its requests, those that have not ended, adapters in transfer. Safe in
        any thread, also while `step` runs.
        """
        plan, packed, requests = self._planned, self._runner.packed, self._requests.ids()
        shape = f" (shape: {packed[1]})" if packed is not None and packed[0] is plan else ""
        stepped = dict.fromkeys(chunk.sequence.request.request_id for chunk in plan)
        compiles = "a step compiles, which may take a minute; " if self._runner.compiling else ""
        return (
            f"{compiles}the last step planned has {len(plan.decodes)} decodes and {len(plan.prefills)} "
            f"chunks of prompts, {plan.num_tokens} tokens{shape}, of requests {some_of(stepped)}; "
            f"{len(requests)} requests have not ended: {some_of(requests)}; "
            f"adapters in transfer: {some_of(self._loader.under_way())}"
        )

    def _fail_loads(self) -> bool:
        """End the requests whose adapters could not be loaded; the next ones try again."""
        failures = self._loader.take_failures()
        for adapter, reason in failures:
            for request in [r for r in self._requests.values() if r.adapter is adapter]:
                self._requests.end(request, "error", reason)
        return bool(failures)

    def _launch(self, plan: StepPlan) -> tuple[InFlight | None, bool]:
        """Launch a plan, unless it is empty; whether its shape was compiled first."""
        if not plan:
            return None, False
        compilations = self._runner.compilations
        launched = self._runner.launch(plan)
        compiled = self._runner.compilations > compilations
        if compiled:
            self._scheduler.waiting.compiled()
        return launched, compiled

    def _count(self, last: StepPlan, plan: StepPlan, seconds: float, *, compiled: bool) -> None:
        """A step was launched, in so many seconds, in which the one of plan `last` was waited for."""
        before, now = (sum(chunk.count for chunk in p.prefills) for p in (last, plan))
        if 2 * before >= last.num_tokens:
            self._reclaim.costs.measured("prefix", before / self._config.page_tokens, seconds)
        self.num_steps += 1
        self.prefilled_tokens += sum(
            min(c.start + c.count, c.sequence.prompt_len) - c.start
            for c in plan
            if c.start < c.sequence.prompt_len
        )
        self.last_step_seconds, self.last_step_tokens = seconds, plan.num_tokens
        self._times.end(
            (before.bit_length(), now.bit_length()),
            compiled=compiled,
            doing=lambda: f"{before} prompt tokens in the step before; {self.under_way()}",
        )


@atexit.register
def _close_all() -> None:
    for loop in list(_LOOPS):
        try:
            loop.close()
        except Exception:  # the other engines' loops are closed, too
            logger.warning("the process ends, and an engine's last step failed", exc_info=True)
