"""The processes that the driver's tests start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.node_factory import NodeFactory


@pytest.fixture(scope="module")
def _factory() -> Iterator[NodeFactory]:
    factory = NodeFactory()
    yield factory
    factory.close()


@pytest.fixture
def factory(_factory: NodeFactory) -> Iterator[NodeFactory]:
    """Starts nodes; what a test has started ends with it."""
    yield _factory
    _factory.end_all()


@pytest.fixture
def public_path(factory: NodeFactory) -> Iterator[Path]:
    """Where other users may look for a node; pytest's own folders are for one user only."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder) / "device0"
        factory.end_all()
