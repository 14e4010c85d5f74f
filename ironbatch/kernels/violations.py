"""What an audit can find."""

from __future__ import annotations

SOUND = 0
NOT_INTACT = 22
VIOLATIONS = {
    1: "the free list holds a block id outside the pool, or more ids than there are",
    2: "the free list holds a block twice",
    3: "a free block has references, or counts as cached",
    4: "a block table holds a block id outside the pool, or more blocks than fit",
    5: "a reference count differs from the number of block tables and owed copies that hold the block",
    6: "a block is neither free nor held nor evictable",
    7: "a running sequence's context is not backed by its blocks",
    8: "the running set is not sorted by seniority, or over its limit",
    9: "a member of the running set is not marked as running, or the other way round",
    10: "the waiting queue is not sorted by seniority",
    11: "the waiting queue's links or its count are wrong",
    12: "a waiting sequence holds blocks or computed tokens",
    13: "a sequence's counts or its lane are out of range",
    14: "a block that will be written stands in another block table too, or in the cache",
    15: "the eviction list's links or its count are wrong, or it holds a block that is held or not cached",
    16: "the cache's index does not hold every cached block exactly once, in its bucket",
    17: "a cached block's hash is not that of its tokens and its parent",
    18: "a cached block's parent is not in the cache, is not held while it is, or would be evicted first",
    19: "a sequence's first blocks are not the chain of cached blocks that they are counted as",
    20: "a group's links are wrong, or more or fewer blocks are promised than its forks need",
    21: "a sequence differs from the slot that it was made from, or has not come as far as that says",
    22: "the arena's sizes, limits or offsets are not those that it was made with",
}
