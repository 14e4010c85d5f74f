"""`BlockAllocator`: paged KV blocks for Python, over the same helpers that the scheduler's kernels are made of.

It has kernels of its own, which a server does not need and so does not compile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ironbatch.errors import IronbatchError
from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.blocks import blocks_for, grow_blocks, release_blocks
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.records import BLOCKS, SEQUENCE_WORDS
from ironbatch.kernels.state import BLOCK_SHIFT, BLOCK_SIZE, BLOCKS_PER_SEQUENCE, FREE_COUNT, open_state

NO_ROOM = -1
TARGET_IN_USE = -2
NOTHING_TO_COPY = -3


@kernel("int64(intp, int64, int64)")
def blocks_reserve(address, sequence, tokens):
    """Back positions 0 <= p < tokens of `sequence`. Returns the blocks it holds, or NO_ROOM with nothing changed."""
    state = open_state(address)
    wanted = blocks_for(state, tokens)
    held = state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]
    if wanted - held > state.header[FREE_COUNT] or wanted > state.header[BLOCKS_PER_SEQUENCE]:
        return NO_ROOM
    grow_blocks(state, sequence, wanted)
    return max(wanted, held)


@kernel("int64(intp, int64)")
def blocks_release(address, sequence):
    """Drop all blocks of `sequence`; returns how many became free."""
    return release_blocks(open_state(address), sequence)


@kernel("int64(intp, int64, int64, int64)")
def blocks_fork(address, parent, child, tokens):
    """Let `child` share the KV of the first `tokens` positions of `parent`, all of which are written.

    Full blocks are shared. A partial last block would be written by both, so the child gets one of its own, and the
    parent's has to be copied into it: both ids stand at the ends of the two tables. Returns the block to copy into,
    NOTHING_TO_COPY when the last block is full, TARGET_IN_USE when the child holds blocks already (they would leak),
    NO_ROOM when there is none for the copy. On an error nothing has changed.
    """
    state = open_state(address)
    if parent == child or state.sequences[child * SEQUENCE_WORDS + BLOCKS] != 0:
        return TARGET_IN_USE
    full = tokens >> state.header[BLOCK_SHIFT]
    has_partial = (tokens & (state.header[BLOCK_SIZE] - 1)) != 0
    if has_partial and state.header[FREE_COUNT] == 0:
        return NO_ROOM
    source = parent * state.header[BLOCKS_PER_SEQUENCE]
    target = child * state.header[BLOCKS_PER_SEQUENCE]
    for k in range(full):
        block = state.block_tables[source + k]
        state.refcounts[block] += 1
        state.block_tables[target + k] = block
    state.sequences[child * SEQUENCE_WORDS + BLOCKS] = full
    if not has_partial:
        return NOTHING_TO_COPY
    grow_blocks(state, child, full + 1)
    return state.block_tables[target + full]


class OutOfBlocks(IronbatchError):
    """The pool cannot back the positions asked for."""


class BlockAllocator:
    """Blocks of many sequences over one pool, for Python: the same kernels that the scheduler runs.

    Args:
        num_sequences: sequences are named 0 <= sequence < num_sequences.
        num_blocks: size of the pool.
        block_size: positions a block, a power of two.
        max_tokens: the most positions that one sequence may have.
    """

    def __init__(self, num_sequences: int, num_blocks: int, block_size: int, max_tokens: int) -> None:
        geometry = Geometry(
            num_slots=num_sequences,
            num_lanes=1,
            num_blocks=num_blocks,
            block_size=block_size,
            max_request_tokens=max_tokens,
            running_limit=num_sequences,
            batch_tokens=num_sequences,
        )
        self.arena = StateArena(geometry)

    @property
    def free_count(self) -> int:
        """Blocks that no sequence references."""
        return int(self.arena.header["free_count"])

    def table(self, sequence: int) -> NDArray[np.int32]:
        """The block table of `sequence`: int32[blocks held], a view."""
        count = int(self.arena.views["sequences"][sequence]["block_count"])
        view: NDArray[np.int32] = self.arena.views["block_tables"][sequence, :count]
        return view

    def refcount(self, block: int) -> int:
        """How many sequences hold `block`."""
        return int(self.arena.views["refcounts"][block])

    def reserve(self, sequence: int, tokens: int) -> None:
        """Back positions 0 <= p < tokens. Raises OutOfBlocks, with nothing changed."""
        if blocks_reserve(self.arena.address, sequence, tokens) == NO_ROOM:
            raise OutOfBlocks(f"{tokens} tokens do not fit: {self.free_count} of the pool's blocks are free")

    def release(self, sequence: int) -> int:
        """Drop all blocks of `sequence`; returns how many became free."""
        return int(blocks_release(self.arena.address, sequence))

    def fork(self, parent: int, child: int, tokens: int) -> tuple[int, int] | None:
        """Share `tokens` written positions of `parent` with `child`.

        Returns (source, target), the block that the caller must copy before either sequence goes on, or None.

        Raises:
            ValueError: the child holds blocks, or is the parent.
            OutOfBlocks: none is free for the copy of a partial last block.
        """
        target = int(blocks_fork(self.arena.address, parent, child, tokens))
        if target == TARGET_IN_USE:
            raise ValueError(f"sequence {child} is live; release it before it is forked onto")
        if target == NO_ROOM:
            raise OutOfBlocks("no block is free for the copy of the partial last block")
        if target == NOTHING_TO_COPY:
            return None
        return int(self.table(parent)[len(self.table(child)) - 1]), target
