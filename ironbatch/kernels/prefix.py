"""Prefix caching, from a sequence's side: match what is there, share it, register what was computed."""

from __future__ import annotations

from ironbatch.kernels.blocks import release_block
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.prefix_index import (
    ROOT_SIGN,
    block_hash,
    evictable_remove,
    find_block,
    forget_oldest,
    index_insert,
    root_hash,
)
from ironbatch.kernels.records import (
    BLOCKS,
    CACHED_BLOCKS,
    CACHED_WORDS,
    COMPUTED,
    HASH,
    IN_CACHE,
    NOBODY,
    PRODUCED,
    PROMPT,
    SEQ_FLAGS,
    SEQUENCE_WORDS,
    UID,
    USES_CACHE,
)
from ironbatch.kernels.shared import SALT_A, SALT_B, SLOT_WORDS, TOKEN_ROW_TOKENS
from ironbatch.kernels.state import BLOCK_SHIFT, BLOCKS_PER_SEQUENCE, EVICTABLE_COUNT, FREE_COUNT


@subroutine
def match_prefix(state, shared, sequence):
    """Look for the sequence's first blocks in the cache. Returns how many were found; nothing is held by that.

    Their ids stand at the beginning of its block table, of which it holds none yet. The last position of a context is
    never matched, since a step must compute something to emit a token.
    """
    fields = sequence * SEQUENCE_WORDS
    if state.sequences[fields + SEQ_FLAGS] & USES_CACHE == 0:
        return 0
    shift = state.header[BLOCK_SHIFT]
    most = (state.sequences[fields + PROMPT] + state.sequences[fields + PRODUCED] - 1) >> shift
    tokens = sequence * shared.header[TOKEN_ROW_TOKENS]
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    parent_a = shared.slots[sequence * SLOT_WORDS + SALT_A] | ROOT_SIGN
    parent_b = shared.slots[sequence * SLOT_WORDS + SALT_B]
    chained = root_hash(state, parent_a, parent_b)
    for k in range(most):
        start = tokens + (k << shift)
        chained = block_hash(state, chained, shared.tokens, start)
        block = find_block(state, chained, parent_a, parent_b, shared.tokens, start)
        if block == NOBODY:
            return k
        state.block_tables[table + k] = block
        parent_a = state.cached_blocks[block * CACHED_WORDS + UID]
        parent_b = 0
    return most


@inline
def count_evictable(state, sequence, matched):
    """How many of the matched blocks nobody holds: to share them takes as many out of what is available."""
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    count = 0
    for k in range(matched):
        if state.refcounts[state.block_tables[table + k]] == IN_CACHE:
            count += 1
    return count


@inline
def share_cached(state, block):
    """Add a reference to a cached block."""
    if state.refcounts[block] == IN_CACHE:
        evictable_remove(state, block)
    state.refcounts[block] += 1


@inline
def adopt_prefix(state, sequence, matched):
    """Hold the matched blocks; their positions count as computed."""
    fields = sequence * SEQUENCE_WORDS
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    for k in range(matched):
        share_cached(state, state.block_tables[table + k])
    state.sequences[fields + BLOCKS] = matched
    state.sequences[fields + CACHED_BLOCKS] = matched
    state.sequences[fields + COMPUTED] = matched << state.header[BLOCK_SHIFT]


@subroutine
def register_prefix(state, shared, sequence):
    """Register all full blocks of computed positions that are not yet in the cache.

    Where the cache has the same content in another block, somebody computed it at the same time: the sequence shares
    that one from now on and gives up its own, so that whoever holds a block holds its parent.
    """
    fields = sequence * SEQUENCE_WORDS
    shift = state.header[BLOCK_SHIFT]
    full = state.sequences[fields + COMPUTED] >> shift
    first = state.sequences[fields + CACHED_BLOCKS]
    if state.sequences[fields + SEQ_FLAGS] & USES_CACHE == 0 or full <= first:
        return
    tokens = sequence * shared.header[TOKEN_ROW_TOKENS]
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    parent_a = shared.slots[sequence * SLOT_WORDS + SALT_A] | ROOT_SIGN
    parent_b = shared.slots[sequence * SLOT_WORDS + SALT_B]
    chained = root_hash(state, parent_a, parent_b)
    parent_block = NOBODY
    if first > 0:
        parent_block = state.block_tables[table + first - 1]
        parent_a = state.cached_blocks[parent_block * CACHED_WORDS + UID]
        parent_b = 0
        chained = state.cached_blocks[parent_block * CACHED_WORDS + HASH]
    for k in range(first, full):
        start = tokens + (k << shift)
        chained = block_hash(state, chained, shared.tokens, start)
        block = state.block_tables[table + k]
        known = find_block(state, chained, parent_a, parent_b, shared.tokens, start)
        if known == NOBODY:
            index_insert(state, block, chained, parent_a, parent_b, parent_block, shared.tokens, start)
        elif known != block:
            share_cached(state, known)
            release_block(state, block)
            state.block_tables[table + k] = known
            block = known
        parent_block = block
        parent_a = state.cached_blocks[block * CACHED_WORDS + UID]
        parent_b = 0
    state.sequences[fields + CACHED_BLOCKS] = full


@subroutine
def empty_cache(state):
    """The KV of all blocks is lost; nobody holds any."""
    while state.header[EVICTABLE_COUNT] > 0:
        state.free_blocks[state.header[FREE_COUNT]] = forget_oldest(state)
        state.header[FREE_COUNT] += 1
