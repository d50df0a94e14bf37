"""The bridge alone, without HTTP: who may touch the engine, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slora_jax.errors import AdapterError, AdapterExistsError, UnknownAdapterError
from slora_jax.outputs import AdapterInfo, StreamEvent
from slora_jax.request import GenerateRequest
from slora_jax.sampling_params import SamplingParams
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.errors import EngineDeadError, ShuttingDownError
from tests.server.fake_engine import FakeEngine

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def endless_engine() -> FakeEngine:
    """One that takes an hour for an ENDLESS request."""
    return FakeEngine(step_seconds=0.005, max_model_len=10**6)


def run(engine: FakeEngine, body: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        bridge = AsyncEngine(engine)
        bridge.start()
        try:
            async with asyncio.timeout(120):
                await body(bridge)
        finally:
            await bridge.shutdown(0)

    asyncio.run(main())


async def collect(bridge: AsyncEngine, prompt: str) -> list[StreamEvent]:
    """All events of a prompt, whose text is its id; left before that, its stream is closed."""
    params = SamplingParams(max_tokens=200)
    with contextlib.closing(await bridge.submit([GenerateRequest(prompt, prompt, None, params)])) as stream:
        return [event async for event in stream]


async def idle(engine: FakeEngine) -> None:
    while engine.has_unfinished():
        await asyncio.sleep(0.005)


def write_adapter(folder: Path, config: str = '{"r": 8}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    return folder


def test_generates_and_keeps_threads_apart(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def body(bridge: AsyncEngine) -> None:
        await bridge.load_adapter("sql", write_adapter(tmp_path))
        events = await collect(bridge, "héllo")
        assert "".join(event.text for event in events) == "base:héllo"
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == "stop"
        await bridge.unload_adapter("sql")

    run(engine, body)
    for method in ("add_requests", "step", "load_adapter", "unload_adapter"):
        assert engine.threads[method] == {"engine"}, method
    assert engine.threads["prepare_adapter"] == {"adapter-loader"}


def test_many_streams_share_steps() -> None:
    engine = FakeEngine(step_seconds=0.001)

    async def body(bridge: AsyncEngine) -> None:
        results = await asyncio.gather(*(collect(bridge, f"prompt {i}") for i in range(50)))
        for i, events in enumerate(results):
            assert "".join(event.text for event in events) == f"base:prompt {i}"

    run(engine, body)
    assert engine.stats().steps < 50 * 15 / 5  # they ran together


def test_events_of_one_step_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = 0

    async def body(bridge: AsyncEngine) -> None:
        nonlocal wakes
        loop = asyncio.get_running_loop()
        plain = loop.call_soon_threadsafe

        def counted(*args: object, **kwargs: object) -> asyncio.Handle:
            nonlocal wakes
            wakes += "_receive_all" in getattr(args[0], "__name__", "")
            return plain(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        stream = await bridge.submit([GenerateRequest(f"r-{i}", "x" * i, None, LONG) for i in range(1, 9)])
        assert len([event async for event in stream]) == 8 * 200

    run(FakeEngine(), body)
    assert wakes == 200


@pytest.mark.parametrize("how", ["cancel the task", "break and close the stream"])
def test_an_abandoned_request_is_aborted(how: str) -> None:
    engine = endless_engine()

    async def body(bridge: AsyncEngine) -> None:
        if how == "cancel the task":
            engine.paused = True
            task = asyncio.create_task(collect(bridge, "x" * 150))
            while not engine.has_unfinished():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = await bridge.submit(
                [GenerateRequest("a", "x", None, ENDLESS), GenerateRequest("b", "y", None, ENDLESS)]
            )
            await anext(stream)
            stream.close()
            stream.close()
            assert [event async for event in stream] == []
        await idle(engine)
        assert engine.stats().pages_kv == 0

    run(engine, body)
    assert engine.stats().requests_aborted >= 1


def test_cancelled_while_the_add_is_in_the_inbox() -> None:
    gate = threading.Event()

    class Blocking(FakeEngine):
        def unload_adapter(self, name: str) -> None:
            assert gate.wait(60)

    engine = Blocking()

    async def body(bridge: AsyncEngine) -> None:
        blocked = asyncio.create_task(bridge.unload_adapter("any"))
        await asyncio.sleep(0.02)
        task = asyncio.create_task(collect(bridge, "x"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await blocked
        await idle(engine)
        assert await collect(bridge, "x")  # its id is free again

    run(engine, body)


def test_a_group_is_added_whole_or_not_at_all() -> None:
    engine = FakeEngine()

    async def body(bridge: AsyncEngine) -> None:
        good = GenerateRequest("a", "x", None, LONG)
        with pytest.raises(UnknownAdapterError):
            await bridge.submit([good, GenerateRequest("b", "x", "nobody", LONG)])
        with pytest.raises(ValueError, match="at most 255"):
            await bridge.submit([good, GenerateRequest("b", "x" * 300, None, LONG)])
        assert not engine.has_unfinished()
        stream = await bridge.submit([good])
        with pytest.raises(ValueError, match="in use"):
            await bridge.submit([good])
        assert len([event async for event in stream]) == 200  # the refusal did not touch the first

    run(engine, body)


def test_decoding_goes_on_while_an_adapter_is_read(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.folders_answer.clear()

    async def body(bridge: AsyncEngine) -> None:
        load = asyncio.create_task(bridge.load_adapter("sql", write_adapter(tmp_path)))
        while "prepare_adapter" not in engine.threads:
            await asyncio.sleep(0.005)
        assert await collect(bridge, "a prompt")
        assert not load.done()
        engine.folders_answer.set()
        assert (await load).name == "sql"
        assert [info.name for info in bridge.known_adapters] == ["sql"]

    run(engine, body)


def test_what_is_published_costs_the_same_however_many_adapters_are_registered(tmp_path: Path) -> None:
    class Counting(FakeEngine):
        listed = 0

        def adapters(self) -> list[AdapterInfo]:
            self.listed += 1
            return super().adapters()

    engine = Counting()

    async def body(bridge: AsyncEngine) -> None:
        folder = write_adapter(tmp_path)
        for name in ("a", "b"):
            await bridge.load_adapter(name, folder)
        assert await collect(bridge, "x")
        await bridge.pin_adapter("b", True)
        await bridge.load_adapter("a", folder, replace=True)
        assert {(i.name, i.generation, i.pinned) for i in bridge.known_adapters} == {
            ("a", 3, False),
            ("b", 2, True),
        }
        await bridge.unload_adapter("a")
        assert bridge.known_adapter("a") is None
        known = bridge.known_adapter("b")
        assert known is not None
        assert known.pinned

    run(engine, body)
    assert engine.listed == 1  # before it started


def test_adapter_errors_reach_the_caller_and_leave_the_engine_well(tmp_path: Path) -> None:
    async def body(bridge: AsyncEngine) -> None:
        with pytest.raises(FileNotFoundError):
            await bridge.load_adapter("a", tmp_path / "none")
        with pytest.raises(AdapterError, match="r is missing"):
            await bridge.load_adapter("a", write_adapter(tmp_path / "bad", "{}"))
        good = write_adapter(tmp_path / "good")
        await bridge.load_adapter("a", good)
        with pytest.raises(AdapterExistsError):
            await bridge.load_adapter("a", good)
        assert (await bridge.load_adapter("a", good, replace=True)).generation == 2
        await bridge.unload_adapter("a")
        with pytest.raises(UnknownAdapterError):
            await bridge.unload_adapter("a")
        assert await collect(bridge, "x")

    run(FakeEngine(), body)


def test_death_tells_everybody_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(step_seconds=0.002, fail_at_step=5)

    async def body(bridge: AsyncEngine) -> None:
        results = await asyncio.gather(*(collect(bridge, f"prompt {i}") for i in range(10)))
        for events in results:
            assert events[-1].finish_reason == "error"
            assert "injected failure" in (events[-1].error or "")
        assert "injected failure" in (bridge.death or "")
        for operation in (
            collect(bridge, "x"),
            bridge.unload_adapter("a"),
            bridge.pin_adapter("a", True),
        ):
            with pytest.raises(EngineDeadError, match="injected failure"):
                await operation

    run(engine, body)
    assert "the engine died" in caplog.text


def test_what_waits_in_the_inbox_fails_when_the_engine_dies() -> None:
    engine = FakeEngine(step_seconds=0.2, fail_at_step=1)

    async def body(bridge: AsyncEngine) -> None:
        stream = await bridge.submit([GenerateRequest("a", "x", None, LONG)])
        with pytest.raises(EngineDeadError):  # posted during the step that fails
            await bridge.submit([GenerateRequest("b", "x", None, LONG)])
        assert [event.finish_reason async for event in stream] == ["error"]

    run(engine, body)


@pytest.mark.parametrize(
    ("params", "drain_seconds", "reason"), [(LONG, 60, "length"), (ENDLESS, 0.05, "abort")]
)
def test_shutdown_drains_then_aborts(params: SamplingParams, drain_seconds: float, reason: str) -> None:
    async def body(bridge: AsyncEngine) -> None:
        stream = await bridge.submit([GenerateRequest("a", "x", None, params)])
        reading = asyncio.create_task(_reasons(stream))
        await bridge.shutdown(drain_seconds)
        assert await reading == [reason]
        with pytest.raises(ShuttingDownError):
            await collect(bridge, "x")
        with pytest.raises(ShuttingDownError):
            await bridge.unload_adapter("a")
        assert bridge.death is None

    run(endless_engine(), body)


async def _reasons(stream: object) -> list[str | None]:
    return [event.finish_reason async for event in stream if event.finish_reason]  # type: ignore[attr-defined]


def test_requests_of_a_loop_that_is_gone_are_aborted() -> None:
    engine = endless_engine()
    bridge = AsyncEngine(engine)
    bridge.start()

    async def leave() -> None:
        stream = await bridge.submit([GenerateRequest("a", "x", None, ENDLESS)])
        await anext(stream)

    async def look() -> None:
        async with asyncio.timeout(60):
            await idle(engine)
        await bridge.shutdown(0)

    asyncio.run(leave())
    asyncio.run(look())
    assert engine.stats().requests_aborted == 1
