"""Segments that are a test's own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironbatch.shm import segment as segment_module

SHM = Path("/dev/shm")


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Segments of this test alone have this prefix; none of them is left afterwards."""
    mine = f"test-ironbatch-{secrets.token_hex(4)}-"
    monkeypatch.setattr(segment_module, "NAME_PREFIX", mine)
    yield mine
    left = [path.name for path in SHM.glob(f"{mine}*")]
    for name in left:
        (SHM / name).unlink()
    assert left == []
