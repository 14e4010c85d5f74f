"""One open file of the reference device: its fences, its status page, its newest error."""

from __future__ import annotations

from typing import Any, Final

from ironbatch.driver import abi
from ironbatch.driver.spec import FENCES_KEPT
from ironbatch.kernels.device import write_status

_LARGEST_VALUE: Final = 2**63 - 1


class Refusal(OSError):
    """Why a call is refused, or how a batch has failed: what GET_ERROR then tells.

    Args:
        code: the errno.
        message: ASCII; what is beyond 95 characters is cut off.
        record: the index in its batch of the record at fault; -1: none is.
        item: of the id in the record; -1: none is.
        value: that was at fault.
    """

    def __init__(self, code: int, message: str, *, record: int = -1, item: int = -1, value: int = 0) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.record = record
        self.item = item
        self.value = value


class Context:
    """What a device knows of one open file.

    A batch is in flight from its submission until its fence is signalled; fences are signalled in their order.

    Args:
        number: 0 <= number < contexts; the place of its status page and its ring.
        status_address: of its status page.
        reset_count: of the device, now.
        writable: whether it may change anything.
    """

    def __init__(self, number: int, status_address: int, *, reset_count: int, writable: bool) -> None:
        self.number = number
        self.writable = writable
        self.submitted = 0
        self.signaled = 0
        self.error: dict[str, Any] = {"record": abi.NO_INDEX, "item": abi.NO_INDEX}  # the fields of GET_ERROR
        self._statuses: dict[int, int] = {}  # of batches that have failed
        self._failed = 0  # the newest of them
        self._repeated = 0  # a fence that is going to be signalled twice
        self._status_address = status_address
        self._first_reset_count = self._reset_count = reset_count
        self._write_page(0)

    @property
    def owner(self) -> int:
        """Its mark on the blocks that it has claimed."""
        return self.number + 1

    @property
    def in_flight(self) -> int:
        """How many batches are."""
        return self.submitted - self.signaled

    @property
    def was_reset(self) -> bool:
        """Whether the device was, since this context has it open."""
        return self._reset_count != self._first_reset_count

    def status_of(self, fence: int) -> int:
        """Of a batch that is over: 0 or a negative errno. What is too long ago has the status 0."""
        return self._statuses.get(fence, 0)

    def remember(self, fence: int, refusal: Refusal) -> None:
        """Keep an error for GET_ERROR. `fence` is 0 for a call's."""
        self.error = {
            "fence": fence,
            "code": -refusal.code,
            "record": abi.NO_INDEX if refusal.record < 0 else refusal.record,
            "item": abi.NO_INDEX if refusal.item < 0 else refusal.item,
            "reset_count": self._reset_count,
            "value": min(refusal.value, _LARGEST_VALUE),
            "message": refusal.message.encode("ascii", "replace")[: abi.GET_ERROR.field_bytes("message") - 1],
        }

    def fail(self, fence: int, refusal: Refusal) -> None:
        """A batch has failed. It is not over before `signal`."""
        self.remember(fence, refusal)
        self._statuses[fence] = -refusal.code
        self._failed = fence
        if len(self._statuses) > FENCES_KEPT:
            del self._statuses[min(self._statuses)]

    def signal(self, fence: int, *, is_repeated: bool = False) -> bool:
        """All batches up to this one are over. Returns whether that is news.

        `is_repeated` is a fault: after the next fence this one is signalled once more, so that the page goes back.
        """
        if fence <= self.signaled:
            return False
        self.signaled = fence
        self._write_page(fence)
        if self._repeated:
            self._write_page(self._repeated)
        self._repeated = fence if is_repeated else 0
        return True

    def reset(self, reset_count: int, refusal: Refusal) -> None:
        """The device was reset: what was in flight has failed, and is over."""
        self._reset_count = reset_count
        self._repeated = 0
        for fence in range(self.signaled + 1, self.submitted + 1):
            self.fail(fence, refusal)
        self.signaled = self.submitted
        self._write_page(self.signaled)

    def _write_page(self, signaled: int) -> None:
        write_status(self._status_address, signaled, self._failed, self._reset_count)
