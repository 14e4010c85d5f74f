"""Paged KV blocks: ids, reference counts, the free list (PagedAttention, Kwon et al., SOSP 2023).

A block is `block_size` token positions of KV memory. A sequence's block table maps position p to block p // block_size.
A block may stand in several tables; then it is never written. Without references it is free, or, if its content is
cached, evictable: still found, until nothing is free and its turn comes. `allocator.py` has the same for Python.
"""

from __future__ import annotations

from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.prefix_index import evictable_append, forget_oldest
from ironbatch.kernels.records import (
    BLOCKS,
    CACHED_BLOCKS,
    IN_CACHE,
    SEQUENCE_WORDS,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    EVICTABLE_COUNT,
    EVICTED_COUNT,
    FREE_COUNT,
    HELPS,
    RESERVED_COUNT,
)


@inline
def blocks_for(state, tokens):
    """Blocks that hold `tokens` positions."""
    return (tokens + state.header[BLOCK_SIZE] - 1) >> state.header[BLOCK_SHIFT]


@inline
def available_blocks(state):
    """How many blocks can be handed out now."""
    return state.header[FREE_COUNT] + state.header[EVICTABLE_COUNT] - state.header[RESERVED_COUNT]


@subroutine
def take_block(state):
    """A block with one reference: a free one, else the oldest evictable; the caller has seen that there is one."""
    free = state.header[FREE_COUNT] - 1
    if free >= 0:
        state.header[FREE_COUNT] = free
        block = state.free_blocks[free]
    else:
        block = forget_oldest(state)
        state.header[EVICTED_COUNT] += 1
    state.refcounts[block] = 1
    return block


@inline
def grow_blocks(state, sequence, wanted):
    """Give `sequence` blocks until it holds `wanted`; the caller has seen that enough are available."""
    row = sequence * SEQUENCE_WORDS
    held = state.sequences[row + BLOCKS]
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    for k in range(held, wanted):
        state.block_tables[table + k] = take_block(state)
    state.sequences[row + BLOCKS] = max(wanted, held)


@inline
def release_block(state, block):
    """Drop one reference; the block becomes free or evictable with its last one."""
    references = state.refcounts[block] - 1
    state.refcounts[block] = references
    state.header[HELPS] += 1
    if references == 0:
        state.free_blocks[state.header[FREE_COUNT]] = block
        state.header[FREE_COUNT] += 1
    elif references == IN_CACHE:
        evictable_append(state, block)


@inline
def release_blocks(state, sequence):
    """Drop all references of `sequence`'s table, the last block first; returns how many blocks became available."""
    row = sequence * SEQUENCE_WORDS
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    before = available_blocks(state)
    for k in range(state.sequences[row + BLOCKS] - 1, -1, -1):
        release_block(state, state.block_tables[table + k])
    state.sequences[row + BLOCKS] = 0
    state.sequences[row + CACHED_BLOCKS] = 0
    return available_blocks(state) - before
