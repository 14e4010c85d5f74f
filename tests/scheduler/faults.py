"""Faults for a scheduler's private state, as a bug would leave them. A plug-in plants them in a real server too.

Each takes an arena between plan and commit of a step and returns whether the state had what it needs. None lets a
kernel leave its tables or run for ever until the audit at the end of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ironbatch.kernels.arena import StateArena

IN_CACHE = 1 << 30
NOBODY = -1

Fault = Callable[[StateArena], bool]


def _staying(arena: StateArena) -> list[int]:
    """Running sequences that hold blocks and have more than this step before them."""
    records = arena.views["sequences"]
    running = arena.views["running"][: int(arena.header["running_count"])].tolist()
    return [
        sequence
        for sequence in running
        if records[sequence]["block_count"] > 0
        and records[sequence]["produced_tokens"] + 2 < records[sequence]["max_new_tokens"]
    ]


def _cached(arena: StateArena) -> list[int]:
    return [int(block) for block in np.flatnonzero(arena.views["refcounts"] & IN_CACHE)]


def _evictable(arena: StateArena) -> list[int]:
    return [block for block in _cached(arena) if arena.views["refcounts"][block] == IN_CACHE]


def _release(arena: StateArena, block: int) -> None:
    arena.views["refcounts"][block] = 0
    arena.views["free_blocks"][int(arena.header["free_count"])] = block
    arena.header["free_count"] += 1


def leak(arena: StateArena) -> bool:
    """A block that nobody holds is in no list."""
    if arena.header["free_count"] < 1:
        return False
    arena.header["free_count"] -= 1
    return True


def double_free(arena: StateArena) -> bool:
    """Two of the next sequences would get one block."""
    if arena.header["free_count"] < 2:
        return False
    arena.views["free_blocks"][0] = arena.views["free_blocks"][1]
    return True


def freed_while_held(arena: StateArena) -> bool:
    """The last block of one that runs is given to whoever comes."""
    for sequence in _staying(arena):
        block = int(arena.views["block_tables"][sequence, arena.views["sequences"][sequence]["block_count"] - 1])
        if arena.views["refcounts"][block] == 1:
            _release(arena, block)
            return True
    return False


def alias(arena: StateArena) -> bool:
    """Two sequences write one block; reference counts and free list agree with the tables."""
    tables, records = arena.views["block_tables"], arena.views["sequences"]
    last = [(sequence, int(records[sequence]["block_count"]) - 1) for sequence in _staying(arena)]
    own = [(sequence, k) for sequence, k in last if arena.views["refcounts"][tables[sequence, k]] == 1]
    if len(own) < 2:
        return False
    one, other = own[0], own[1]
    given_up = int(tables[one])
    tables[one] = tables[other]
    arena.views["refcounts"][tables[other]] = 2
    _release(arena, given_up)
    return True


def reference_too_many(arena: StateArena) -> bool:
    """The block would never be free again."""
    return _count(arena, 1)


def reference_too_few(arena: StateArena) -> bool:
    """The block would be free while somebody still reads it."""
    return _count(arena, -1)


def _count(arena: StateArena, by: int) -> bool:
    for sequence in _staying(arena):
        block = int(arena.views["block_tables"][sequence, 0])
        if arena.views["refcounts"][block] & ~IN_CACHE > 1:
            arena.views["refcounts"][block] += by
            return True
    return False


def context_without_blocks(arena: StateArena) -> bool:
    """The table has lost its last block: the next token's KV would go nowhere."""
    for sequence in _staying(arena):
        record = arena.views["sequences"][sequence]
        block = int(arena.views["block_tables"][sequence, record["block_count"] - 1])
        if record["block_count"] > 1 and arena.views["refcounts"][block] == 1:
            record["block_count"] -= 1
            _release(arena, block)
            return True
    return False


def wrong_tokens(arena: StateArena) -> bool:
    """The cache says that a block holds the KV of other tokens."""
    return _in_cached(arena, lambda block: arena.views["block_tokens"][block].__setitem__(0, 77_777))


def wrong_hash(arena: StateArena) -> bool:
    """Of the same bucket, so that index and count are right."""
    return _in_cached(arena, lambda block: _flip(arena, block, "hash", 1 << 40))


def wrong_parent(arena: StateArena) -> bool:
    """Its parent is not in the cache."""
    records = arena.views["cached_blocks"]
    for block in _evictable(arena):
        if records[block]["parent_a"] > 0:
            records[block]["parent_a"] += 1_000_000
            return True
    return False


def _flip(arena: StateArena, block: int, name: str, bits: int) -> None:
    arena.views["cached_blocks"][block][name] ^= bits


def _in_cached(arena: StateArena, change: Callable[[int], Any]) -> bool:
    found = _evictable(arena)
    if not found:
        return False
    change(found[0])
    return True


def broken_index(arena: StateArena) -> bool:
    """A bucket has lost its chain: what is in it is never found, and never leaves."""
    buckets = np.flatnonzero(arena.views["index"] != NOBODY)
    if not len(buckets):
        return False
    arena.views["index"][buckets[0]] = NOBODY
    return True


def cached_but_not_said(arena: StateArena) -> bool:
    """The index finds a block that counts as not cached."""

    def forget(block: int) -> None:
        arena.views["refcounts"][block] = 0

    return _in_cached(arena, forget)


def short_eviction_list(arena: StateArena) -> bool:
    """It has lost its oldest block, which will never be evicted."""
    oldest = int(arena.header["oldest"])
    if oldest == NOBODY or arena.header["evictable_count"] < 2:
        return False
    arena.header["oldest"] = arena.views["cached_blocks"][oldest]["newer"]
    return True


def wrong_eviction_count(arena: StateArena) -> bool:
    """One more is promised than can be evicted."""
    arena.header["evictable_count"] += 1
    return True


def parent_evicted_first(arena: StateArena) -> bool:
    """A parent stands before its child in the eviction list, whose links and count are right."""
    records = arena.views["cached_blocks"]
    for child in _evictable(arena):
        parent = int(records[child]["parent_block"])
        if records[child]["parent_a"] <= 0 or arena.views["refcounts"][parent] != IN_CACHE:
            continue
        if int(arena.header["oldest"]) == parent:
            continue
        older, newer = int(records[parent]["older"]), int(records[parent]["newer"])
        records[older]["newer"] = newer
        if newer == NOBODY:
            arena.header["newest"] = older
        else:
            records[newer]["older"] = older
        oldest = int(arena.header["oldest"])
        records[parent]["older"], records[parent]["newer"] = NOBODY, oldest
        records[oldest]["older"] = parent
        arena.header["oldest"] = parent
        return True
    return False


def promised_to_nobody(arena: StateArena) -> bool:
    """Blocks are kept back for forks that do not exist."""
    arena.header["reserved_count"] += 1
    return True


def unsorted_running_set(arena: StateArena) -> bool:
    """The least senior would not be the last."""
    staying = _staying(arena)
    if len(staying) < 2:
        return False
    running = arena.views["running"]
    places = [running.tolist().index(sequence) for sequence in staying[:2]]
    running[places] = running[places[::-1]]
    return True


FAULTS: dict[str, Fault] = {
    "leak": leak,
    "double free": double_free,
    "freed while held": freed_while_held,
    "aliased block": alias,
    "reference too many": reference_too_many,
    "reference too few": reference_too_few,
    "context without blocks": context_without_blocks,
    "cached block's tokens": wrong_tokens,
    "cached block's hash": wrong_hash,
    "cached block's parent": wrong_parent,
    "index chain": broken_index,
    "cached but not said to be": cached_but_not_said,
    "eviction list": short_eviction_list,
    "eviction count": wrong_eviction_count,
    "order of eviction": parent_evicted_first,
    "promised to nobody": promised_to_nobody,
    "running set": unsorted_running_set,
}

VIOLATIONS_OF: dict[str, set[int]] = {
    "leak": {6},
    "double free": {2},
    "freed while held": {3, 5},
    "aliased block": {14},
    "reference too many": {5},
    "reference too few": {5},
    "context without blocks": {7},
    "cached block's tokens": {17},
    "cached block's hash": {17},
    "cached block's parent": {18},
    "index chain": {16},
    "cached but not said to be": {6, 15, 16},
    "eviction list": {6, 15},
    "eviction count": {6, 15},
    "order of eviction": {18},
    "promised to nobody": {20},
    "running set": {8},
}
"""The keys of VIOLATIONS that each may be found as: which of several comes first is the audit's affair."""
