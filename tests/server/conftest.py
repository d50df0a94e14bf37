"""One live server over a fake engine for the tests that do not harm it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import LiveServer, serve


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with serve(FakeEngine(tokenizer=ByteTokenizer())) as live:
        yield live


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    return folder
