"""Finding the backend that `--backend` names."""

from __future__ import annotations

from importlib.metadata import entry_points

from ironbatch.backends.base import Backend
from ironbatch.backends.mock import MockBackend
from ironbatch.config import Config
from ironbatch.errors import StartError

ENTRY_POINT_GROUP = "ironbatch.backends"


def prepare_backend(config: Config) -> None:
    """Compile what the configured backend is made of, before the fork of the process that creates it."""
    if config.backend == "mock":
        _mock_class(config)


def create_backend(config: Config) -> Backend:
    """Make the configured backend, which is not started yet.

    Raises:
        StartError: a plug-in of that name can't be loaded or made.
    """
    if config.backend == "mock":
        return _mock_class(config)(config)
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


def _mock_class(config: Config) -> type[MockBackend]:
    if not config.mock_kv:
        return MockBackend
    from ironbatch.backends.mock_kv import MockKVBackend  # noqa: PLC0415  kernels that nobody else needs

    return MockKVBackend
