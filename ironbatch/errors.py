"""Every error type Ironbatch raises on purpose, sorted by whose fault it is.

- `ConfigError`, `StartError`: the operator's; met at start, never under load.
- `RequestRejected` and its kinds: the client's, or the moment's; each becomes one HTTP answer.
- `BackendLost`, `RequestError`: a backend's; the scheduler handles both and lives on.
- `DeviceError` and its kinds: a device's, or its node's; the device backend turns each into one of those above.

A bug is none of these: it asserts and stops.
"""

from collections.abc import Iterable
from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
"""Of every error but a ConfigError."""

EXIT_USAGE: Final = 2
"""Of a ConfigError, a bad command line included."""

EXIT_SIGNAL_BASE: Final = 128
"""Plus the signal's number, as a shell has it."""

RETRY_AFTER_S = 1
"""What a 503 advises. Slots turn over in seconds, and a scheduler restart takes less than one."""


class IronbatchError(Exception):
    """Base of all errors that Ironbatch raises on purpose."""


class ConfigError(IronbatchError):
    """The configuration can't be used. `problems` holds all that is wrong, one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        assert self.problems, "a ConfigError without a problem tells nobody anything"
        super().__init__("\n".join(self.problems))


class StartError(IronbatchError):
    """The engine can't start on this machine: port taken, no shared memory, an address that can't be bound.

    The message is one line for the operator.
    """


class RequestRejected(IronbatchError):
    """A request that is answered with an error instead of tokens.

    `type` is the machine-readable kind, `param` the request's field at fault (None: the request as a whole),
    `status` the HTTP status, `retry_after_s` the Retry-After header in seconds (None: no header).
    """

    def __init__(
        self,
        error_type: str,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.type = error_type
        self.message = message
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


class SlotsFull(RequestRejected):
    """Every slot is taken: 503 with Retry-After. Full is an answer, not an accident."""

    def __init__(self, message: str, *, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__("queue_full", message, status=503, retry_after_s=retry_after_s)


class EngineUnavailable(RequestRejected):
    """The scheduler isn't up, hangs in its device, or this worker holds no lane: 503 with Retry-After."""

    def __init__(self, message: str, *, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__("engine_unavailable", message, status=503, retry_after_s=retry_after_s)


class BackendLost(IronbatchError):
    """The backend is gone as a whole. The scheduler preempts every sequence and reopens the backend."""


class RequestError(IronbatchError):
    """A backend's verdict on some of its sequences: those end with `message`, all others go on."""

    def __init__(self, sequences: Iterable[int], message: str) -> None:
        super().__init__(message)
        self.sequences = tuple(sequences)
        self.message = message


class DeviceError(IronbatchError):
    """A device, or what was taken for one, can't do what was asked. `code` is the errno, 0 if there is none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceUnavailable(DeviceError):
    """The node can't be opened: it isn't there, or not for this user."""


class NotADevice(DeviceUnavailable):
    """What stands at the path doesn't answer as an Ironbatch device."""


class AbiMismatch(DeviceUnavailable):
    """The device speaks another version of the UAPI."""


class DeviceGone(DeviceError):
    """The device has vanished under an open handle: nothing that was asked of it will ever be done."""


class DeviceReset(DeviceError):
    """The device was reset: what its KV memory held is lost, and so are the batches that it had not finished."""


class DeviceTimeout(DeviceError):
    """A fence was not signalled by its deadline."""


class DeviceRefused(DeviceError):
    """The device has refused a call and done nothing.

    `record` and `item` say which record of the batch, and which of its block ids, was at fault; -1 if none was.
    """

    def __init__(self, message: str, code: int = 0, record: int = -1, item: int = -1) -> None:
        super().__init__(message, code)
        self.record = record
        self.item = item


class DeviceFault(DeviceRefused):
    """A batch that the device had taken has failed; its results are void."""
