"""Where KV blocks are: block ids as addresses, in host memory or in a device's mapping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["KVMemory"]


class KVMemory:
    """The blocks that one holder has, named by the engine's ids 0 <= block < num_blocks.

    Block `b` is at `kv_off + (first + b) x block_bytes` of `memory`. What is behind `memory` is the owner's matter: a
    plain array, a mapped device node, a window on a card's HBM (docs/driver.md, "Wiring a card's own memory").

    Args:
        memory: uint8[bytes], contiguous.
        kv_off: bytes before the device's block 0.
        first: the device's id of the engine's block 0.
        num_blocks: how many there are.
        block_bytes: the size of one.
    """

    def __init__(
        self, memory: NDArray[np.uint8], *, kv_off: int = 0, first: int = 0, num_blocks: int, block_bytes: int
    ) -> None:
        start = kv_off + first * block_bytes
        if start < 0 or start + num_blocks * block_bytes > memory.nbytes:
            raise ValueError(
                f"{num_blocks} blocks of {block_bytes} bytes from byte {start} on do not lie in {memory.nbytes} bytes"
            )
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.first = first
        self.start_offset = start
        self._blocks = memory[start : start + num_blocks * block_bytes].reshape(num_blocks, block_bytes)
        self.start_address = int(self._blocks.ctypes.data)

    @classmethod
    def host(cls, num_blocks: int, block_bytes: int) -> KVMemory:
        """Blocks in ordinary memory, all zeros."""
        return cls(np.zeros(num_blocks * block_bytes, np.uint8), num_blocks=num_blocks, block_bytes=block_bytes)

    def offset(self, block: int) -> int:
        """Bytes from the beginning of `memory` to a block."""
        self._check(block)
        return self.start_offset + block * self.block_bytes

    def address(self, block: int) -> int:
        """A block's address in this process."""
        self._check(block)
        return self.start_address + block * self.block_bytes

    def device_id(self, block: int) -> int:
        """What the device calls it in a record."""
        self._check(block)
        return self.first + block

    def block(self, block: int) -> NDArray[np.uint8]:
        """Its bytes, uint8[block_bytes], not a copy."""
        self._check(block)
        view: NDArray[np.uint8] = self._blocks[block]
        return view

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), one after the other: for memory that no device writes."""
        for source, target in pairs:
            self.block(target)[:] = self.block(source)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Fill whole blocks with zeros: likewise."""
        for block in blocks:
            self.block(block)[:] = 0

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not one of 0..{self.num_blocks - 1}")
