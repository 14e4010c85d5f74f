"""The processes that the driver's tests start."""

from __future__ import annotations

from collections.abc import Iterator

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
