"""Which part of a context's ring is free: each batch has one piece for its records and one for its results."""

from __future__ import annotations

from collections import deque

from ironbatch.errors import DeviceRefused

ALIGN_BYTES = 64
"""A cache line, so that what the device writes shares none with what the host writes."""


class Ring:
    """Pieces of a ring, taken in turn, given back when their batch is over.

    A piece is contiguous: one that would reach over the end begins at 0 again.

    Args:
        size_bytes: of the ring.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pieces: deque[tuple[int, int, int]] = deque()  # fence, start, end; in order of their fences
        self._next = 0

    def reserve(self, size_bytes: int) -> int:
        """The offset of a free piece. It stays free until `hold`.

        Raises:
            DeviceRefused: it is not there, now or ever.
        """
        if size_bytes > self.size_bytes:
            raise DeviceRefused(
                f"a batch needs {size_bytes} bytes of the device's ring, which has {self.size_bytes}; use a device with"
                " a larger ring (--ring-bytes), or smaller batches"
            )
        size = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        for start in (self._next, 0):
            if start + size_bytes <= self.size_bytes and not self._is_held(start, start + size):
                return start
        raise DeviceRefused(
            f"{size_bytes} of {self.size_bytes} bytes of the device's ring are not free while"
            f" {len(self._pieces)} batches are in flight; wait for one of them"
        )

    def hold(self, fence: int, start: int, size_bytes: int) -> None:
        """A piece is a batch's, until its fence."""
        end = start + -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._pieces.append((fence, start, end))
        self._next = end if end < self.size_bytes else 0

    def release(self, signaled: int) -> None:
        """Every batch up to this fence is over."""
        while self._pieces and self._pieces[0][0] <= signaled:
            self._pieces.popleft()

    def clear(self) -> None:
        """No batch is in flight any more."""
        self._pieces.clear()
        self._next = 0

    def _is_held(self, start: int, end: int) -> bool:
        return any(start < held_end and held_start < end for _, held_start, held_end in self._pieces)
