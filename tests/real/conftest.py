"""One model server for all tests that don't kill it, and Ironbatch in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.server import Server, running
from tests.real.model import ModelServer, OwnAnswer, model_server
from tests.real.prompts import sure_prompts

SURE_PROMPTS = 12


@pytest.fixture(scope="session")
def model() -> Iterator[ModelServer]:
    """A model server of 8 slots."""
    with model_server() as found:
        yield found


@pytest.fixture(scope="session")
def own_answers(model: ModelServer) -> dict[str, OwnAnswer]:
    """By prompt, what the model server says itself."""
    return sure_prompts(model, SURE_PROMPTS)


@pytest.fixture(scope="session")
def server(model: ModelServer) -> Iterator[Server]:
    """Ironbatch, which finds out model and slots by itself."""
    with running("serve", backend="real", backend_url=model.url) as found:
        yield found
