"""Paged KV blocks: ids, reference counts, the free list (PagedAttention, Kwon et al., SOSP 2023).

A block is `block_size` token positions of KV memory. A sequence's block table maps position p to block p // block_size.
Blocks may be shared after a fork; a block with more than one reference is never written. `kernels/allocator.py` has the
same for Python.
"""

from __future__ import annotations

from ironbatch.kernels.jit import inline
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS,
    BLOCKS_PER_SEQUENCE,
    FREE_COUNT,
    SEQUENCE_WORDS,
)


@inline
def blocks_for(state, tokens):
    """Blocks that hold `tokens` positions."""
    return (tokens + state.header[BLOCK_SIZE] - 1) >> state.header[BLOCK_SHIFT]


@inline
def grow_blocks(state, sequence, wanted):
    """Give `sequence` blocks until it holds `wanted`; the caller has seen that enough are free."""
    row = sequence * SEQUENCE_WORDS
    held = state.sequences[row + BLOCKS]
    free = state.header[FREE_COUNT]
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    for k in range(held, wanted):
        free -= 1
        block = state.free_blocks[free]
        state.refcounts[block] = 1
        state.block_tables[table + k] = block
    state.header[FREE_COUNT] = free
    state.sequences[row + BLOCKS] = max(wanted, held)


@inline
def release_blocks(state, sequence):
    """Drop all references that `sequence` holds; returns how many blocks became free."""
    row = sequence * SEQUENCE_WORDS
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    free = state.header[FREE_COUNT]
    before = free
    for k in range(state.sequences[row + BLOCKS] - 1, -1, -1):
        block = state.block_tables[table + k]
        state.refcounts[block] -= 1
        if state.refcounts[block] == 0:
            state.free_blocks[free] = block
            free += 1
    state.header[FREE_COUNT] = free
    state.sequences[row + BLOCKS] = 0
    return free - before
