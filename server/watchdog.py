"""Notices an engine that has work and completes no step: a device that hangs, a folder that never answers."""

from __future__ import annotations

import asyncio
import logging

from slora_jax.server.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # at most between two looks


async def watch(engine: AsyncEngine, limit: float) -> None:
    """Log, once a stall, what an engine is at that completes no step for `limit` seconds; never returns."""
    stalled_for = 0.0
    while True:
        await asyncio.sleep(min(_LOOK_SECONDS, limit / 4))
        seconds = engine.stalled_seconds
        if seconds > limit and not stalled_for:
            logger.error("no step has completed for %.1f s: %s", seconds, engine.under_way())
        elif stalled_for and seconds <= limit:
            logger.warning("the engine moves again, after more than %.1f s", stalled_for)
        stalled_for = seconds if seconds > limit else 0.0
