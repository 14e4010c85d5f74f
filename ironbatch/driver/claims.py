"""Whose each block of the reference device is."""

from __future__ import annotations

import errno
from collections import Counter
from typing import Final

import numpy as np

from ironbatch.driver.context import Refusal

NOBODY: Final = 0


class Claims:
    """Blocks and their owners, numbers from 1 on. A claim is a run of blocks, the first that fits.

    Args:
        num_blocks: of the device.
    """

    def __init__(self, num_blocks: int) -> None:
        self.owners = np.full(num_blocks, NOBODY, np.int32)
        self.owners_address = int(self.owners.ctypes.data)
        self._held: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self.owners) - self._held.total()

    def held_by(self, owner: int) -> int:
        """How many blocks one has."""
        return self._held[owner]

    def claim(self, owner: int, want: int, *, is_exact: bool) -> tuple[int, int]:
        """Give `want` blocks in a row; if they are not there and need not all be, the longest run.

        Returns:
            The first block, and how many.

        Raises:
            Refusal: ENOSPC.
        """
        starts, lengths = self._free_runs()
        fitting = np.flatnonzero(lengths >= want)
        if len(fitting):
            first, granted = int(starts[fitting[0]]), want
        elif is_exact or not len(lengths):
            longest = int(lengths.max()) if len(lengths) else 0
            raise Refusal(errno.ENOSPC, f"{want} blocks in a row: the longest free run has {longest}", value=want)
        else:
            first, granted = int(starts[lengths.argmax()]), int(lengths.max())
        self.owners[first : first + granted] = owner
        self._held[owner] += granted
        return first, granted

    def release(self, owner: int) -> None:
        """Take back all that one has."""
        self.owners[self.owners == owner] = NOBODY
        del self._held[owner]

    def _free_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Where runs of free blocks begin, and how long they are."""
        is_free = np.zeros(len(self.owners) + 2, np.int8)  # with somebody's block at either end
        is_free[1:-1] = self.owners == NOBODY
        edges = np.flatnonzero(np.diff(is_free))
        return edges[::2], edges[1::2] - edges[::2]
