"""What holds for every test: how hypothesis searches, and that a log which it sets up is its own."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from ironbatch import logs

# No deadline: a first call may compile or fault pages in. A failure prints the blob that reproduces it.
settings.register_profile("default", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The commands set up the log of their process, which here is the tests'."""
    yield
    logs.unconfigure()
