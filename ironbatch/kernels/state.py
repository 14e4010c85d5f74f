"""The scheduler's private state: sequences, running set, waiting queue, blocks, batch plan, in one arena.

A sequence is the scheduler's side of a slot and has the slot's index. The arena is one allocation of which kernels get
the address; its header says where each table begins. It dies with the scheduler: what a client could miss stands in
the shared slots, from which `recovery.rebuild` makes a new one.

Seniority, the total order (priority class, arrival_ns, slot), decides everything: the waiting queue and the running set
are kept sorted by it, admission takes the head of the one, preemption the tail of the other. So whoever was preempted
returns to its old place, and nobody is ever preempted in favour of a newer one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ironbatch.kernels.jit import inline
from ironbatch.kernels.records import (
    CACHED_WORDS,
    COPY_WORDS,
    FORK_WORDS,
    ROW_WORDS,
    SEQUENCE_WORDS,
    WAIT_WORDS,
)
from ironbatch.kernels.tables import int32_table, word_table
from ironbatch.limits import PRIORITY_CLASSES

_HEADER_FIELDS = (
    # geometry and limits, set once
    "num_slots",
    "num_lanes",
    "num_blocks",
    "block_size",
    "block_shift",
    "blocks_per_sequence",
    "max_request_tokens",
    "running_limit",
    "batch_tokens",
    "tokens_per_step",  # the most tokens that the backend can emit for one sequence in one step
    "lookahead",  # tokens beyond its context for which a running sequence has blocks, up to its own longest
    "reserves",  # 1: that is all of them, and nobody is displaced
    "eos_token_id",
    "prefix_cache",  # 1: on
    "shares_kv",  # 1: the backend keeps KV in blocks, so that sequences can share them
    "aging_ns",  # 0: nobody ages
    "mixes",  # 1: decodes and chunks in one plan
    "prefill_row_limit",  # chunks of one plan; 0: no limit
    "context_cap",  # padded rows x longest context; 0: no limit
    "bucket_count",  # of `sequence_buckets`
    "running_is_device",  # 1: `running_limit` is the device's
    "batch_is_device",  # 1: `batch_tokens` is the device's
    "hash_seed",
    "index_mask",  # of the cache's index: its buckets less one
    # counts
    "running_count",
    "waiting_count",
    "free_count",
    "evictable_count",
    "reserved_count",
    "row_count",
    "copy_count",
    "forget_count",
    "wake_count",
    "preempted_count",  # of the last plan: by growth
    "displaced_count",  # of the last plan: by a higher class
    "admitted_count",  # of the last plan
    "running_changed",  # 1: the running set is not as it stands in the segment
    "outgrown_count",  # sequences that ran alone and found no block; the step logs them
    "plan_tokens",  # of the last plan
    "plan_decodes",  # of them, those of decodes; the rest is prefill
    "pending_forks",  # running forks that wait for their parent's prefill
    "owed_copies",  # forks whose source block is still to be copied
    "evicted_count",  # since the last time that metrics were written
    # the prefix cache
    "hash_mask",  # of all block hashes; a test that sets 0 makes them all collide
    "next_uid",
    "oldest",  # ends of the eviction list
    "newest",
    # what the plan remembers
    "chunks_next",  # of a device that does not mix: the next plan's turn
    "helps",  # counts whatever may help a request that lacks something: releases, registrations
    "blocked_sequence",  # the head that lacked blocks, and the count of then
    "blocked_helps",
    "denied_sequence",  # the head for which no way could be made, and the count of then
    "denied_helps",
    "next_aging_ns",  # when the next waiting sequence rises a class
    # how long the queue has waited, by reason
    "wait_reason",
    "wait_clock_ns",
    "wait_step_ns",
    "wait_slots_ns",
    "wait_tokens_ns",
    "wait_blocks_ns",
    "wait_device_ns",
    # byte offsets of the tables
    "sequences",
    "forks",
    "waits",
    "arrival_ns",
    "seeds",
    "running",
    "queue_heads",
    "queue_tails",
    "queue_hints",
    "free_blocks",
    "refcounts",
    "block_tables",
    "cached_blocks",
    "block_tokens",
    "index",
    "sequence_buckets",
    "rows",
    "copies",
    "output_counts",
    "output_tokens",
    "output_finish",
    "forget",
    "lane_news",
    "wakes",
    "token_ids",
    "positions",
    "kv_slot_mapping",
)
STATE_HEADER = np.dtype([(name, "<i8") for name in _HEADER_FIELDS])
HEADER_WORDS = len(_HEADER_FIELDS)


def _header_word(name: str) -> int:
    return _HEADER_FIELDS.index(name)


NUM_SLOTS = _header_word("num_slots")
NUM_LANES = _header_word("num_lanes")
NUM_BLOCKS = _header_word("num_blocks")
BLOCK_SIZE = _header_word("block_size")
BLOCK_SHIFT = _header_word("block_shift")
BLOCKS_PER_SEQUENCE = _header_word("blocks_per_sequence")
MAX_REQUEST_TOKENS = _header_word("max_request_tokens")
RUNNING_LIMIT = _header_word("running_limit")
BATCH_TOKENS = _header_word("batch_tokens")
TOKENS_PER_STEP = _header_word("tokens_per_step")
LOOKAHEAD = _header_word("lookahead")
RESERVES = _header_word("reserves")
EOS_TOKEN_ID = _header_word("eos_token_id")
PREFIX_CACHE = _header_word("prefix_cache")
SHARES_KV = _header_word("shares_kv")
AGING_NS = _header_word("aging_ns")
MIXES = _header_word("mixes")
PREFILL_ROW_LIMIT = _header_word("prefill_row_limit")
CONTEXT_CAP = _header_word("context_cap")
BUCKET_COUNT = _header_word("bucket_count")
RUNNING_IS_DEVICE = _header_word("running_is_device")
BATCH_IS_DEVICE = _header_word("batch_is_device")
HASH_SEED = _header_word("hash_seed")
HASH_MASK = _header_word("hash_mask")
INDEX_MASK = _header_word("index_mask")

RUNNING_COUNT = _header_word("running_count")
WAITING_COUNT = _header_word("waiting_count")
FREE_COUNT = _header_word("free_count")
EVICTABLE_COUNT = _header_word("evictable_count")
RESERVED_COUNT = _header_word("reserved_count")
ROW_COUNT = _header_word("row_count")
COPY_COUNT = _header_word("copy_count")
FORGET_COUNT = _header_word("forget_count")
WAKE_COUNT = _header_word("wake_count")
PREEMPTED_COUNT = _header_word("preempted_count")
DISPLACED_COUNT = _header_word("displaced_count")
ADMITTED_COUNT = _header_word("admitted_count")
RUNNING_CHANGED = _header_word("running_changed")
OUTGROWN_COUNT = _header_word("outgrown_count")
PLAN_TOKENS = _header_word("plan_tokens")
PLAN_DECODES = _header_word("plan_decodes")
PENDING_FORKS = _header_word("pending_forks")
OWED_COPIES = _header_word("owed_copies")
EVICTED_COUNT = _header_word("evicted_count")

NEXT_UID = _header_word("next_uid")
OLDEST = _header_word("oldest")
NEWEST = _header_word("newest")

CHUNKS_NEXT = _header_word("chunks_next")
HELPS = _header_word("helps")
BLOCKED_SEQUENCE = _header_word("blocked_sequence")
BLOCKED_HELPS = _header_word("blocked_helps")
DENIED_SEQUENCE = _header_word("denied_sequence")
DENIED_HELPS = _header_word("denied_helps")
NEXT_AGING_NS = _header_word("next_aging_ns")

WAIT_REASON = _header_word("wait_reason")
WAIT_CLOCK_NS = _header_word("wait_clock_ns")
WAIT_NS = _header_word("wait_step_ns")  # and the other reasons behind it, in the order of layout.WAIT_REASONS


class State(NamedTuple):
    """Tables of the arena, for kernels: header, waits, arrival_ns, seeds, cached_blocks are int64; the rest int32."""

    header: Any
    sequences: Any
    forks: Any
    waits: Any
    arrival_ns: Any
    seeds: Any
    running: Any
    queue_heads: Any
    queue_tails: Any
    queue_hints: Any
    free_blocks: Any
    refcounts: Any
    block_tables: Any
    cached_blocks: Any
    block_tokens: Any
    index: Any
    sequence_buckets: Any
    rows: Any
    copies: Any
    output_counts: Any
    output_tokens: Any
    output_finish: Any
    forget: Any
    lane_news: Any
    wakes: Any


@inline
def open_state(address):
    """All tables of the arena at `address` that scheduling needs."""
    h = word_table(address, HEADER_WORDS)
    slots = h[NUM_SLOTS]
    limit = h[RUNNING_LIMIT]
    return State(
        h,
        int32_table(address + h[_SEQUENCES], slots * SEQUENCE_WORDS),
        int32_table(address + h[_FORKS], slots * FORK_WORDS),
        word_table(address + h[_WAITS], slots * WAIT_WORDS),
        word_table(address + h[_ARRIVAL], slots),
        word_table(address + h[_SEEDS], slots),
        int32_table(address + h[_RUNNING], limit),
        int32_table(address + h[_HEADS], PRIORITY_CLASSES),
        int32_table(address + h[_TAILS], PRIORITY_CLASSES),
        int32_table(address + h[_HINTS], PRIORITY_CLASSES),
        int32_table(address + h[_FREE], h[NUM_BLOCKS]),
        int32_table(address + h[_REFCOUNTS], h[NUM_BLOCKS]),
        int32_table(address + h[_BLOCK_TABLES], slots * h[BLOCKS_PER_SEQUENCE]),
        word_table(address + h[_CACHED], h[NUM_BLOCKS] * CACHED_WORDS if h[PREFIX_CACHE] else 0),
        int32_table(address + h[_BLOCK_TOKENS], h[NUM_BLOCKS] * h[BLOCK_SIZE] if h[PREFIX_CACHE] else 0),
        int32_table(address + h[_INDEX], h[INDEX_MASK] + 1),
        int32_table(address + h[_BUCKETS], h[BUCKET_COUNT]),
        int32_table(address + h[_ROWS], limit * ROW_WORDS),
        int32_table(address + h[_COPIES], limit * COPY_WORDS),
        int32_table(address + h[_OUT_COUNTS], limit),
        int32_table(address + h[_OUT_TOKENS], limit * h[TOKENS_PER_STEP]),
        int32_table(address + h[_OUT_FINISH], limit),
        int32_table(address + h[_FORGET], 2 * slots),
        int32_table(address + h[_NEWS], h[NUM_LANES]),
        int32_table(address + h[_WAKES], h[NUM_LANES]),
    )


class PlanTokens(NamedTuple):
    """The per-token tables of a plan: token_ids and positions are int32, kv_slot_mapping int64."""

    token_ids: Any
    positions: Any
    kv_slot_mapping: Any


@inline
def open_plan_tokens(address):
    """The tables that only backends which compute attention need."""
    h = word_table(address, HEADER_WORDS)
    tokens = h[BATCH_TOKENS]
    return PlanTokens(
        int32_table(address + h[_TOKEN_IDS], tokens),
        int32_table(address + h[_POSITIONS], tokens),
        word_table(address + h[_MAPPING], tokens),
    )


_SEQUENCES = _header_word("sequences")
_FORKS = _header_word("forks")
_WAITS = _header_word("waits")
_ARRIVAL = _header_word("arrival_ns")
_SEEDS = _header_word("seeds")
_RUNNING = _header_word("running")
_HEADS = _header_word("queue_heads")
_TAILS = _header_word("queue_tails")
_HINTS = _header_word("queue_hints")
_FREE = _header_word("free_blocks")
_REFCOUNTS = _header_word("refcounts")
_BLOCK_TABLES = _header_word("block_tables")
_CACHED = _header_word("cached_blocks")
_BLOCK_TOKENS = _header_word("block_tokens")
_INDEX = _header_word("index")
_BUCKETS = _header_word("sequence_buckets")
_ROWS = _header_word("rows")
_COPIES = _header_word("copies")
_OUT_COUNTS = _header_word("output_counts")
_OUT_TOKENS = _header_word("output_tokens")
_OUT_FINISH = _header_word("output_finish")
_FORGET = _header_word("forget")
_NEWS = _header_word("lane_news")
_WAKES = _header_word("wakes")
_TOKEN_IDS = _header_word("token_ids")
_POSITIONS = _header_word("positions")
_MAPPING = _header_word("kv_slot_mapping")
