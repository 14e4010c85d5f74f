"""Which cached block has which content, and which one is evicted next.

A cached block is full and known by a key: its tokens, and its parent, which is the block before it in its sequence. A
parent is named by its uid, a number that is counted up and never used again, so that a key says all that its KV depends
on. The first block of a sequence has the request's cache salt for a parent. Two words hold either: (uid, 0), uid > 0;
or (salt with its sign bit set, other half of the salt).

The index finds candidates by a 64-bit hash, chained from parent to child and seeded anew in each process; whether one
is a hit is decided by comparing the key itself. A collision costs time and nothing else. (As vLLM's automatic prefix
caching, whose keys are hashes alone; and as SGLang's radix tree, whose edges are compared.)

Blocks without a reference are linked in the order of their release, oldest first. A sequence releases its blocks from
the last to the first, and whoever holds a block holds its parent, so a child is always older than its parent.
"""

from __future__ import annotations

import numpy as np

from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.records import (
    BUCKET_NEXT,
    CACHED_WORDS,
    HASH,
    IN_CACHE,
    NEWER,
    NOBODY,
    OLDER,
    PARENT_A,
    PARENT_B,
    PARENT_BLOCK,
    UID,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    EVICTABLE_COUNT,
    HASH_MASK,
    HASH_SEED,
    HELPS,
    INDEX_MASK,
    NEWEST,
    NEXT_UID,
    OLDEST,
)
from ironbatch.kernels.tables import prefetch_for_write

ROOT_SIGN = -(1 << 63)  # set in the first word of a salt, so that it is never a uid

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)


@inline
def absorb(h, word):
    """The hash `h` with 64 more bits in it: xor, multiply, fold (the round of Rust's fxhash, with a fold)."""
    h = (h ^ word) * _MIX
    return h ^ (h >> np.uint64(32))


@inline
def root_hash(state, salt_a, salt_b):
    """What the chain of a sequence's hashes begins with."""
    h = absorb(np.uint64(state.header[HASH_SEED]) + _GOLDEN, np.uint64(salt_a))
    return np.int64(absorb(h, np.uint64(salt_b)))


@inline
def block_hash(state, parent_hash, tokens, start):
    """The hash of the block whose tokens are tokens[start : start + block size]."""
    h = np.uint64(parent_hash)
    size = state.header[BLOCK_SIZE]
    if size == 1:
        h = absorb(h, np.uint64(tokens[start]) & _LOW)
    for k in range(start, start + (size & ~1), 2):
        h = absorb(h, (np.uint64(tokens[k]) & _LOW) | (np.uint64(tokens[k + 1]) << np.uint64(32)))
    return np.int64(h) & state.header[HASH_MASK]


@inline
def has_tokens(state, block, tokens, start):
    """Whether a cached block's tokens are tokens[start : start + block size]."""
    size = state.header[BLOCK_SIZE]
    first = block << state.header[BLOCK_SHIFT]
    difference = 0
    for k in range(size):  # no early end: most candidates are hits, and so the loop is four instructions wide
        difference |= state.block_tokens[first + k] ^ tokens[start + k]
    return difference == 0


@inline
def find_block(state, wanted_hash, parent_a, parent_b, tokens, start):
    """The cached block with this key, or NOBODY."""
    block = state.index[wanted_hash & state.header[INDEX_MASK]]
    while block != NOBODY:
        row = block * CACHED_WORDS
        if (
            state.cached_blocks[row + HASH] == wanted_hash
            and state.cached_blocks[row + PARENT_A] == parent_a
            and state.cached_blocks[row + PARENT_B] == parent_b
            and has_tokens(state, block, tokens, start)
        ):
            return block
        block = state.cached_blocks[row + BUCKET_NEXT]
    return NOBODY


@inline
def index_insert(state, block, own_hash, parent_a, parent_b, parent_block, tokens, start):
    """Register a held block, whose content is known to be new."""
    row = block * CACHED_WORDS
    bucket = own_hash & state.header[INDEX_MASK]
    state.cached_blocks[row + HASH] = own_hash
    state.cached_blocks[row + UID] = state.header[NEXT_UID]
    state.cached_blocks[row + PARENT_A] = parent_a
    state.cached_blocks[row + PARENT_B] = parent_b
    state.cached_blocks[row + PARENT_BLOCK] = parent_block
    state.cached_blocks[row + BUCKET_NEXT] = state.index[bucket]
    state.index[bucket] = block
    first = block << state.header[BLOCK_SHIFT]
    for k in range(state.header[BLOCK_SIZE]):
        state.block_tokens[first + k] = tokens[start + k]
    state.refcounts[block] |= IN_CACHE
    state.header[NEXT_UID] += 1
    state.header[HELPS] += 1


@subroutine
def index_remove(state, block):
    """Forget what a block without references holds."""
    row = block * CACHED_WORDS
    bucket = state.cached_blocks[row + HASH] & state.header[INDEX_MASK]
    after = state.cached_blocks[row + BUCKET_NEXT]
    if state.index[bucket] == block:
        state.index[bucket] = after
    else:
        before = np.int64(state.index[bucket])
        while state.cached_blocks[before * CACHED_WORDS + BUCKET_NEXT] != block:
            before = state.cached_blocks[before * CACHED_WORDS + BUCKET_NEXT]
        state.cached_blocks[before * CACHED_WORDS + BUCKET_NEXT] = after
    state.cached_blocks[row + UID] = 0
    state.refcounts[block] = 0


@inline
def evictable_append(state, block):
    """A cached block has lost its last reference: it is the newest to be evicted."""
    newest = state.header[NEWEST]
    state.cached_blocks[block * CACHED_WORDS + OLDER] = newest
    state.cached_blocks[block * CACHED_WORDS + NEWER] = NOBODY
    if newest == NOBODY:
        state.header[OLDEST] = block
    else:
        state.cached_blocks[newest * CACHED_WORDS + NEWER] = block
    state.header[NEWEST] = block
    state.header[EVICTABLE_COUNT] += 1


@inline
def evictable_remove(state, block):
    """Take a block out of the eviction list, wherever it stands."""
    older = state.cached_blocks[block * CACHED_WORDS + OLDER]
    newer = state.cached_blocks[block * CACHED_WORDS + NEWER]
    if older == NOBODY:
        state.header[OLDEST] = newer
    else:
        state.cached_blocks[older * CACHED_WORDS + NEWER] = newer
    if newer == NOBODY:
        state.header[NEWEST] = older
    else:
        state.cached_blocks[newer * CACHED_WORDS + OLDER] = older
    state.header[EVICTABLE_COUNT] -= 1


@inline
def prefetch_oldest(state):
    """Call for the lines that the next eviction is to write: they come in bursts, and nothing else has touched them."""
    block = state.header[OLDEST]
    if block == NOBODY:
        return
    row = block * CACHED_WORDS
    prefetch_for_write(state.index, state.cached_blocks[row + HASH] & state.header[INDEX_MASK])
    prefetch_for_write(state.refcounts, block)
    prefetch_for_write(state.cached_blocks, state.cached_blocks[row + NEWER] * CACHED_WORDS)


@subroutine
def forget_oldest(state):
    """Take the block that was released longest ago out of the cache; the caller has seen that there is one."""
    block = state.header[OLDEST]
    evictable_remove(state, block)
    index_remove(state, block)
    prefetch_oldest(state)
    return block
