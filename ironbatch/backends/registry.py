"""Finding the backend that `--backend` names."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from ironbatch.backends.base import Backend, BackendFactory
from ironbatch.backends.mock import MockBackend
from ironbatch.config import BACKENDS, SOFTWARE_DEVICE, Config
from ironbatch.errors import StartError

ENTRY_POINT_GROUP = "ironbatch.backends"


def prepare_backend(config: Config) -> None:
    """Compile what the configured backend is made of, before the fork of the process that creates it."""
    if config.backend in OWN:
        OWN[config.backend](config)


def create_backend(config: Config) -> Backend:
    """Make the configured backend, which is not started yet.

    Raises:
        StartError: a plug-in of that name can't be loaded or made, or a device can't be had.
    """
    if config.backend in OWN:
        return OWN[config.backend](config)(config)
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


def _mock_class(config: Config) -> BackendFactory:
    if not config.mock_kv:
        return MockBackend
    from ironbatch.backends.mock_kv import MockKVBackend  # noqa: PLC0415  kernels that nobody else needs

    return MockKVBackend


def _device_class(config: Config) -> BackendFactory:
    from ironbatch.backends.device import DeviceBackend  # noqa: PLC0415  likewise

    if config.device == SOFTWARE_DEVICE:
        import ironbatch.driver.software  # noqa: F401, PLC0415  likewise
    return DeviceBackend


def _real_class(config: Config) -> BackendFactory:
    from ironbatch.backends.real import RealBackend  # noqa: PLC0415  nobody else needs a client

    return RealBackend


OWN: Final[dict[str, Callable[[Config], BackendFactory]]] = {
    "mock": _mock_class,
    "device": _device_class,
    "real": _real_class,
}
assert tuple(OWN) == BACKENDS
