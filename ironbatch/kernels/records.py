"""The rows of the scheduler's private tables: one dtype each, and where kernels find a field of it.

A row is found by `index * ..._WORDS`, a field by adding its column. Rows that every step touches are one cache line of
int32, so that all of one is fetched once (half the time of one array per field).
"""

from __future__ import annotations

import numpy as np

from ironbatch import layout

CACHE_LINE_BYTES = 64


def _column(dtype: np.dtype[np.void], name: str) -> int:
    """Index of a field in its row, counted in the row's own words."""
    fields = dtype.fields
    assert fields is not None
    return int(fields[name][1]) // fields[name][0].base.itemsize


# --------------------------------------------------------------------------------------------- a sequence, in each step

SEQUENCE = np.dtype(
    [
        ("status", "<i4"),
        ("generation", "<i4"),
        ("lane", "<i4"),
        ("priority_class", "<i4"),  # the present one; it falls with age
        ("prompt_tokens", "<i4"),
        ("max_new_tokens", "<i4"),
        ("produced_tokens", "<i4"),
        ("computed_tokens", "<i4"),  # positions whose KV is written: 0..context
        ("block_count", "<i4"),
        ("flags", "<i4"),
        ("next", "<i4"),  # links of the waiting queue; -1 ends it
        ("previous", "<i4"),
        ("preemptions", "<i4"),
        ("cached_blocks", "<i4"),  # its first blocks, which stand in the prefix cache
        ("first_class", "<i4"),  # the class that it came with
        ("reserved", "<i4"),
    ]
)
SEQUENCE_WORDS = SEQUENCE.itemsize // 4
assert SEQUENCE.itemsize == CACHE_LINE_BYTES

STATUS = _column(SEQUENCE, "status")
SEQ_GENERATION = _column(SEQUENCE, "generation")
LANE = _column(SEQUENCE, "lane")
PRIORITY_CLASS = _column(SEQUENCE, "priority_class")
PROMPT = _column(SEQUENCE, "prompt_tokens")
MAX_NEW = _column(SEQUENCE, "max_new_tokens")
PRODUCED = _column(SEQUENCE, "produced_tokens")
COMPUTED = _column(SEQUENCE, "computed_tokens")
BLOCKS = _column(SEQUENCE, "block_count")
SEQ_FLAGS = _column(SEQUENCE, "flags")
NEXT = _column(SEQUENCE, "next")
PREVIOUS = _column(SEQUENCE, "previous")
PREEMPTIONS = _column(SEQUENCE, "preemptions")
CACHED_BLOCKS = _column(SEQUENCE, "cached_blocks")
FIRST_CLASS = _column(SEQUENCE, "first_class")

STATUS_NONE = 0
STATUS_WAITING = 1
STATUS_RUNNING = 2

# Flags of a sequence: those of its request (layout.FLAG_...), and these.
REQUEST_FLAGS = layout.FLAG_TOKEN_IDS | layout.FLAG_IGNORE_EOS
USES_CACHE = 1 << 8  # it takes part in the prefix cache
IN_GROUP = 1 << 9  # its fork record is in use

# ----------------------------------------------------------------------------------- a sequence, while it is in a group

FORK = np.dtype(
    [
        ("parent", "<i4"),  # of a fork that waits for its parent's prefill; else NOBODY
        ("source_block", "<i4"),  # to be copied before the fork computes; referenced until it is done; else NOBODY
        ("first_fork", "<i4"),  # of a parent: the first of its forks; else NOBODY
        ("next_fork", "<i4"),  # of a fork: the parent's next
        ("fork_count", "<i4"),  # of a parent
        ("reserved_blocks", "<i4"),  # of a running fork that waits: what `reserved_count` holds for it
        ("reserved", "<i4", (2,)),
    ]
)
FORK_WORDS = FORK.itemsize // 4

NOBODY = -1

FORK_PARENT = _column(FORK, "parent")
SOURCE_BLOCK = _column(FORK, "source_block")
FIRST_FORK = _column(FORK, "first_fork")
NEXT_FORK = _column(FORK, "next_fork")
FORK_COUNT = _column(FORK, "fork_count")
RESERVED_BLOCKS = _column(FORK, "reserved_blocks")

# ------------------------------------------------------------------------------------------- a sequence, while it waits

WAIT = np.dtype([("clocks_ns", "<i8", (len(layout.WAIT_REASONS),)), ("since_ns", "<i8"), ("reserved", "<i8", (2,))])
WAIT_WORDS = WAIT.itemsize // 8
WAIT_CLOCKS = _column(WAIT, "clocks_ns")
WAIT_SINCE = _column(WAIT, "since_ns")
assert WAIT.itemsize == CACHE_LINE_BYTES

# ------------------------------------------------------------------------------------------------ a block, in the cache

CACHED_BLOCK = np.dtype(
    [
        ("hash", "<i8"),
        ("uid", "<i8"),  # never used again; 0: the block is not in the cache
        ("parent_a", "<i8"),  # the uid of the block before it, or the salt; see prefix_index.py
        ("parent_b", "<i8"),
        ("bucket_next", "<i8"),
        ("newer", "<i8"),  # links of the eviction list
        ("older", "<i8"),
        ("parent_block", "<i8"),  # where the parent stands, for the audit
    ]
)
CACHED_WORDS = CACHED_BLOCK.itemsize // 8
assert CACHED_BLOCK.itemsize == CACHE_LINE_BYTES

HASH = _column(CACHED_BLOCK, "hash")
UID = _column(CACHED_BLOCK, "uid")
PARENT_A = _column(CACHED_BLOCK, "parent_a")
PARENT_B = _column(CACHED_BLOCK, "parent_b")
BUCKET_NEXT = _column(CACHED_BLOCK, "bucket_next")
NEWER = _column(CACHED_BLOCK, "newer")
OLDER = _column(CACHED_BLOCK, "older")
PARENT_BLOCK = _column(CACHED_BLOCK, "parent_block")

# A reference count and, above it, whether the block is in the cache: then without references it is evictable, not free.
IN_CACHE = 1 << 30
COUNT_MASK = IN_CACHE - 1

# --------------------------------------------------------------------------------------- one sequence's share of a plan

PLAN_ROW = np.dtype(
    [
        ("sequence", "<i4"),
        ("first_position", "<i4"),  # the chunk computes positions first_position <= p < context_tokens
        ("new_tokens", "<i4"),
        ("context_tokens", "<i4"),
        ("emits", "<i4"),  # 1: the chunk reaches the end of the sequence, which gets its next token; 0: prefill goes on
        ("token_offset", "<i4"),  # the chunk's place in token_ids, positions and kv_slot_mapping
        ("prompt_tokens", "<i4"),
        ("produced_tokens", "<i4"),
    ]
)
ROW_WORDS = PLAN_ROW.itemsize // 4
ROW_SEQUENCE = _column(PLAN_ROW, "sequence")
ROW_FIRST = _column(PLAN_ROW, "first_position")
ROW_NEW = _column(PLAN_ROW, "new_tokens")
ROW_CONTEXT = _column(PLAN_ROW, "context_tokens")
ROW_EMITS = _column(PLAN_ROW, "emits")
ROW_OFFSET = _column(PLAN_ROW, "token_offset")
ROW_PROMPT = _column(PLAN_ROW, "prompt_tokens")
ROW_PRODUCED = _column(PLAN_ROW, "produced_tokens")

# A block to be copied into another before the plan is computed.
COPY = np.dtype([("source", "<i4"), ("target", "<i4")])
COPY_WORDS = COPY.itemsize // 4
