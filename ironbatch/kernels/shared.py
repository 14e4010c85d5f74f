"""The segment as a kernel sees it: tables over one base address.

A kernel is called with the segment's address alone, since each array argument costs its caller 80 ns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ironbatch import layout
from ironbatch.kernels.jit import inline
from ironbatch.kernels.tables import int32_table, word_table

HEADER_WORDS = layout.HEADER.itemsize // layout.WORD_BYTES
LANE_WORDS = layout.LANE.itemsize // layout.WORD_BYTES
ENTRY_WORDS = layout.LANE_ENTRY.itemsize // layout.WORD_BYTES
SLOT_WORDS = layout.SLOT.itemsize // layout.WORD_BYTES
METRICS_WORDS = layout.METRICS.itemsize // layout.WORD_BYTES

NUM_SLOTS = layout.word(layout.HEADER, "num_slots")
NUM_LANES = layout.word(layout.HEADER, "num_lanes")
LANE_ENTRIES = layout.word(layout.HEADER, "lane_entries")
TOKEN_ROW_TOKENS = layout.word(layout.HEADER, "token_row_tokens")
MAX_REQUEST_TOKENS = layout.word(layout.HEADER, "max_request_tokens")
LANES_OFFSET = layout.word(layout.HEADER, "lanes_offset")
ENTRIES_OFFSET = layout.word(layout.HEADER, "entries_offset")
SLOTS_OFFSET = layout.word(layout.HEADER, "slots_offset")
TOKENS_OFFSET = layout.word(layout.HEADER, "tokens_offset")
RUNNING_OFFSET = layout.word(layout.HEADER, "running_offset")
METRICS_OFFSET = layout.word(layout.HEADER, "metrics_offset")
EPOCH = layout.word(layout.HEADER, "epoch")
HEARTBEAT_NS = layout.word(layout.HEADER, "heartbeat_ns")
STEP_STARTED_NS = layout.word(layout.HEADER, "step_started_ns")
IN_DEVICE_CALL = layout.word(layout.HEADER, "in_device_call")
USABLE_SLOTS = layout.word(layout.HEADER, "usable_slots")
LISTED_EPOCH = layout.word(layout.HEADER, "listed_epoch")
LISTED_COUNT = layout.word(layout.HEADER, "listed_count")
IN_QUARANTINE = layout.word(layout.HEADER, "in_quarantine")
SCHEDULER_SLEEPING = layout.word(layout.HEADER, "scheduler_sleeping")

TAIL = layout.word(layout.LANE, "tail")
HEAD = layout.word(layout.LANE, "head")
WORKER_SLEEPING = layout.word(layout.LANE, "worker_sleeping")
LANE_GENERATION = layout.word(layout.LANE, "generation")
DEAD_GENERATION = layout.word(layout.LANE, "dead_generation")
REAPED_GENERATION = layout.word(layout.LANE, "reaped_generation")

OWNER = layout.word(layout.SLOT, "owner")
GENERATION = layout.word(layout.SLOT, "generation")
SUBMITTED = layout.word(layout.SLOT, "submitted")
CANCELLED = layout.word(layout.SLOT, "cancelled")
ARRIVAL_NS = layout.word(layout.SLOT, "arrival_ns")
SEED = layout.word(layout.SLOT, "seed")
PROMPT_TOKENS = layout.word(layout.SLOT, "prompt_tokens")
MAX_NEW_TOKENS = layout.word(layout.SLOT, "max_new_tokens")
PRIORITY = layout.word(layout.SLOT, "priority")
FLAGS = layout.word(layout.SLOT, "flags")
CHOICE_INDEX = layout.word(layout.SLOT, "choice_index")
PARENT_SLOT = layout.word(layout.SLOT, "parent_slot")
NEXT_CHOICE = layout.word(layout.SLOT, "next_choice")
SALT_A = layout.word(layout.SLOT, "salt_a")
SALT_B = layout.word(layout.SLOT, "salt_b")
PUBLISHED = layout.word(layout.SLOT, "published")
ERROR_CODE = layout.word(layout.SLOT, "error_code")
SLOT_PREEMPTIONS = layout.word(layout.SLOT, "preemptions")
SUSPICION = layout.word(layout.SLOT, "suspicion")
ADMITTED_GENERATION = layout.word(layout.SLOT, "admitted_generation")
CACHED_TOKENS = layout.word(layout.SLOT, "cached_tokens")
WAITED_NS = layout.word(layout.SLOT, "waited_step_ns")  # and the other reasons behind it

TTFT_US = layout.word(layout.METRICS, "ttft_us")
INTER_TOKEN_US = layout.word(layout.METRICS, "inter_token_us")
TOKENS_DELIVERED = layout.word(layout.METRICS, "tokens_delivered")
CHUNKS_DELIVERED = layout.word(layout.METRICS, "chunks_delivered")


class Shared(NamedTuple):
    """Tables of one segment: int64 but for `tokens` and `running`, int32. A row is found by `index * ROW_WORDS`."""

    header: Any
    lanes: Any
    entries: Any
    slots: Any
    tokens: Any
    running: Any
    metrics: Any


@inline
def open_shared(address):
    """All tables of the segment at `address`."""
    header = word_table(address, HEADER_WORDS)
    num_slots = header[NUM_SLOTS]
    num_lanes = header[NUM_LANES]
    return Shared(
        header,
        word_table(address + header[LANES_OFFSET], num_lanes * LANE_WORDS),
        word_table(address + header[ENTRIES_OFFSET], num_lanes * header[LANE_ENTRIES] * ENTRY_WORDS),
        word_table(address + header[SLOTS_OFFSET], num_slots * SLOT_WORDS),
        int32_table(address + header[TOKENS_OFFSET], num_slots * header[TOKEN_ROW_TOKENS]),
        int32_table(address + header[RUNNING_OFFSET], num_slots),
        word_table(address + header[METRICS_OFFSET], (1 + num_lanes) * METRICS_WORDS),
    )


@inline
def published_word(generation, reason, produced):
    """The one word by which the scheduler publishes a slot's progress."""
    return (generation << layout.PUBLISHED_GENERATION_SHIFT) | (reason << layout.PUBLISHED_REASON_SHIFT) | produced


@inline
def published_generation(published):
    """Which generation of the slot a published word speaks of."""
    return published >> layout.PUBLISHED_GENERATION_SHIFT


@inline
def published_reason(published):
    """Finish reason in a published word; 0 while the sequence is live."""
    return (published >> layout.PUBLISHED_REASON_SHIFT) & 0xFF


@inline
def published_produced(published):
    """Tokens produced so far."""
    return published & layout.PUBLISHED_PRODUCED_MASK


@inline
def lane_of_owner(owner):
    """The lane in an owner word."""
    return (owner & layout.OWNER_LANE_MASK) - 1


owner_word = inline(layout.owner_word)
