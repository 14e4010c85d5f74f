"""Finding the backend that `--backend` names."""

from __future__ import annotations

from importlib.metadata import entry_points

from ironbatch.backends.base import Backend
from ironbatch.backends.mock import MockBackend
from ironbatch.config import Config
from ironbatch.errors import StartError

ENTRY_POINT_GROUP = "ironbatch.backends"


def create_backend(config: Config) -> Backend:
    """Make the configured backend, which is not started yet.

    Raises:
        StartError: a plug-in of that name can't be loaded or made.
    """
    if config.backend == "mock":
        return MockBackend(config)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=config.backend):
        try:
            backend = entry.load()(config)
        except (Exception, SystemExit) as problem:  # a script may be named by mistake
            reason = " ".join(f"{type(problem).__name__}: {problem}".split())  # one line, whatever it says
            raise StartError(f"backend {config.backend} ({entry.value}): {reason}") from problem
        if not isinstance(backend, Backend):
            raise StartError(f"backend {config.backend} ({entry.value}) is not an ironbatch.backends.base.Backend")
        return backend
    raise StartError(f"no backend is named {config.backend}")
