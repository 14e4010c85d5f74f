"""Every dtype that processes share, declared once.

One shared-memory segment holds a header and seven tables: lanes, lane entries, slots, tokens, texts, the running and
metrics.
Configuration changes counts and offsets, never a dtype, so that a flag never costs a compilation.

Rules that make the layout reviewable:

* every field is eight bytes wide and naturally aligned, so that any of them can be an atomic word;
* fields are grouped by writer, and each group fills whole 64-byte cache lines, so that no two processes ever
  write the same line; the writer is named in the comment above its group;
* kernels find a field by `word(dtype, name)`, an index in 8-byte words; nothing else knows an offset.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ironbatch import limits

CACHE_LINE_BYTES = 64
WORD_BYTES = 8

MAGIC = 0x3148435441424E49  # "INBATCH1", little-endian
LAYOUT_VERSION = 5
FIRST_LOCKED_LAYOUT = 4
"""Since this one a segment's creator holds a lock on its file (shm/stale.py); of an older one nobody can tell whether
it lives."""

LANE_ENTRIES_PER_SLOT = 4
"""A slot generation pushes at most a submission and a cancel, and the scheduler drains a whole lane in each step.
So at most 3 entries of one slot can be outstanding, and with 4 a push cannot fail."""

TOKEN_BYTES = 4

HISTOGRAM_SUB_BUCKET_BITS = 5
HISTOGRAM_BUCKETS = (32 - HISTOGRAM_SUB_BUCKET_BITS + 1) << HISTOGRAM_SUB_BUCKET_BITS
"""Log-linear buckets of microseconds: exact below 32 us, then 32 buckets an octave (3 % wide) up to 2**32 us."""

Field = tuple[str, Any] | tuple[str, Any, tuple[int, ...]]


def _table(*groups: tuple[Field, ...]) -> np.dtype[np.void]:
    """A dtype whose groups of fields each start on a cache line of their own."""
    names: list[str] = []
    formats: list[Any] = []
    offsets: list[int] = []
    offset = 0
    for group in groups:
        for name, *shape in group:
            field = np.dtype((shape[0], shape[1])) if len(shape) > 1 else np.dtype(shape[0])
            assert field.itemsize % WORD_BYTES == 0, f"{name} is not made of 8-byte words"
            names.append(name)
            formats.append(field)
            offsets.append(offset)
            offset += field.itemsize
        offset = -(-offset // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


def word(dtype: np.dtype[np.void], name: str) -> int:
    """Index of a field in its row, counted in 8-byte words."""
    fields = dtype.fields
    assert fields is not None
    return int(fields[name][1]) // WORD_BYTES


HEADER = _table(
    # The segment's creator, before any other process can attach.
    (
        ("magic", "<i8"),
        ("layout_version", "<i8"),
        ("segment_bytes", "<i8"),
        ("num_slots", "<i8"),
        ("num_lanes", "<i8"),
        ("lane_entries", "<i8"),
        ("max_model_len", "<i8"),
        ("token_row_tokens", "<i8"),
        ("lanes_offset", "<i8"),
        ("entries_offset", "<i8"),
        ("slots_offset", "<i8"),
        ("tokens_offset", "<i8"),
        ("metrics_offset", "<i8"),
        ("max_request_tokens", "<i8"),
        ("created_ns", "<i8"),
        ("running_offset", "<i8"),
        ("texts_offset", "<i8"),
        ("text_row_bytes", "<i8"),  # 0: the engine's backend has no text, and there are no such rows
    ),
    # The supervisor. Whoever stops the system writes the two of draining: the supervisor, or the gunicorn that has
    # started it.
    (
        ("epoch", "<i8"),  # counts the schedulers
        ("draining", "<i8"),
        ("streams_end_ns", "<i8"),  # while draining: when streams that still run are ended with an error
        ("device_hung", "<i8"),  # a scheduler that was killed does not die
    ),
    # The scheduler: what /health reads, and what its successor asks if it dies.
    (
        ("heartbeat_ns", "<i8"),
        ("scheduler_ready", "<i8"),
        ("step_started_ns", "<i8"),
        ("in_device_call", "<i8"),  # one of CALL_...
        ("longest_step_ns", "<i8"),
        ("scheduler_pid", "<i8"),
        ("longest_request_tokens", "<i8"),  # with the device's limits; `max_request_tokens` is without
        ("most_choices", "<i8"),  # sequences that can be admitted at once
        ("usable_slots", "<i8"),  # of `num_slots`: so many run at once with this backend, and may be queued; 0: all
        ("listed_epoch", "<i8"),  # of the scheduler that has written the table of the running
        ("listed_count", "<i8"),  # its entries
        ("in_quarantine", "<i8"),  # one sequence runs alone, as a suspect
        ("backend_problem", "<i8"),  # one of BACKEND_...: why what the backend asks does not answer
    ),
    # The scheduler sets it before it sleeps; whoever rings its doorbell exchanges it for 0.
    (("scheduler_sleeping", "<i8"),),
)

LANE = _table(
    # The web worker that holds the lane (producer).
    (("tail", "<i8"),),
    # The scheduler (consumer).
    (("head", "<i8"), ("reaped_generation", "<i8")),
    # The worker sets it before it looks for the last time; the scheduler exchanges it for 0 when it rings.
    (("worker_sleeping", "<i8"),),
    # The parent of the web workers (gunicorn's arbiter): who holds the lane, and which holders have died.
    (("generation", "<i8"), ("dead_generation", "<i8")),
    # The web worker: written once its event loop runs; the last one while the engine drains, when no request is left.
    (("worker_pid", "<i8"), ("serving_generation", "<i8"), ("drained_generation", "<i8")),
)

LANE_ENTRY = np.dtype({"names": ["slot", "generation"], "formats": ["<i8", "<i8"], "itemsize": 16})

SLOT = _table(
    # Claimed by a worker's compare-and-swap on 0; given back by the owner, or by the scheduler when that has died.
    # Everything else in this group and the next is written by the owner between claim and submit; `cancelled` later.
    (
        ("owner", "<i8"),
        ("generation", "<i8"),
        ("submitted", "<i8"),
        ("cancelled", "<i8"),
        ("arrival_ns", "<i8"),
        ("seed", "<i8"),
        ("prompt_tokens", "<i8"),
        ("max_new_tokens", "<i8"),
    ),
    (
        ("priority", "<i8"),
        ("flags", "<i8"),
        ("choice_index", "<i8"),
        ("parent_slot", "<i8"),
        ("deadline_ns", "<i8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("top_k", "<i8"),
    ),
    # Choices of one request are linked: choice 0 is the parent, has the lowest slot, and is submitted last.
    (
        ("next_choice", "<i8"),  # the slot of the next one, or NO_SLOT
        ("salt_a", "<i8"),  # the cache salt as 16 bytes of a digest; both 0 without one
        ("salt_b", "<i8"),
    ),
    # The scheduler. `published` is one word, stored once per step: generation << 32 | finish reason << 24 | produced.
    (
        ("published", "<i8"),
        ("error_code", "<i8"),
        ("preemptions", "<i8"),
        ("suspicion", "<i8"),  # deaths of schedulers that were computing it; see below
    ),
    # The scheduler: how the request fared, complete when its end is published.
    (
        ("admitted_generation", "<i8"),  # whose generation has been admitted; the other words are that one's
        ("cached_tokens", "<i8"),  # of its prompt, found in the prefix cache at its first admission
        ("waited_step_ns", "<i8"),
        ("waited_slots_ns", "<i8"),
        ("waited_tokens_ns", "<i8"),
        ("waited_blocks_ns", "<i8"),
        ("waited_device_ns", "<i8"),
    ),
)

# What the scheduler waits for (HEADER.in_device_call).
CALL_NONE = 0
CALL_STEP = 1  # from a plan with rows to the end of its commit
CALL_OPENING = 2  # its backend is lost, and is opened anew, which may take any time

# Why a backend that asks somebody else has nobody to ask (HEADER.backend_problem), with what /health says of it.
BACKEND_WELL = 0
BACKEND_AWAY = 1
BACKEND_BUSY = 2
BACKEND_MISSET = 3
BACKEND_PROBLEMS = {
    BACKEND_AWAY: "the model server cannot be reached, or still loads its model; it is asked again and again",
    BACKEND_BUSY: "the model server answers that it is overloaded; it is asked again and again",
    BACKEND_MISSET: "the model server does not answer as one should; the server's log says how",
}

NO_SLOT = -1

METRICS = _table(
    # One row a writer: row 0 is the scheduler's, row 1 + i belongs to whoever holds lane i. Counters only grow.
    (
        ("tokens_generated", "<i8"),
        ("steps", "<i8"),
        ("prefill_tokens", "<i8"),
        ("decode_tokens", "<i8"),
        ("preemptions", "<i8"),
        ("sequences_aborted", "<i8"),
        ("sequences_failed", "<i8"),
        ("scheduler_starts", "<i8"),
    ),
    # Gauges of the scheduler.
    (
        ("running", "<i8"),
        ("waiting", "<i8"),
        ("kv_blocks_free", "<i8"),
        ("kv_blocks_total", "<i8"),
        ("requests_lost", "<i8"),  # a counter: submitted by a worker that died before their end
        ("kv_blocks_cached", "<i8"),  # those of kv_blocks_free whose content can still be found
    ),
    # Counters of the scheduler.
    (
        ("prefix_query_tokens", "<i8"),
        ("prefix_hit_tokens", "<i8"),
        ("prefix_evicted_blocks", "<i8"),
        ("copied_blocks", "<i8"),
        ("audits", "<i8"),
        ("audit_failures", "<i8"),
        ("pieces_without_id", "<i8"),  # of tokens_generated: a piece of text of which nobody said which token it is
    ),
    # Counters of the scheduler: how long sequences have waited, by reason, in the order of WAIT_REASONS.
    (
        ("waited_step_us", "<i8"),
        ("waited_slots_us", "<i8"),
        ("waited_tokens_us", "<i8"),
        ("waited_blocks_us", "<i8"),
        ("waited_device_us", "<i8"),
    ),
    # Counters of a web worker.
    (
        ("requests_received", "<i8"),
        ("requests_completed", "<i8"),
        ("requests_cancelled", "<i8"),
        ("requests_failed", "<i8"),
        ("requests_rejected", "<i8"),  # the client's fault
        ("requests_unavailable", "<i8"),  # the moment's: queue full, engine not up
        ("tokens_delivered", "<i8"),
        ("chunks_delivered", "<i8"),
        ("requests_timed_out", "<i8"),  # of those failed: by their own time-out, or the queue's
    ),
    (("ttft_us", "<i8", (HISTOGRAM_BUCKETS,)),),
    (("inter_token_us", "<i8", (HISTOGRAM_BUCKETS,)),),
)

# Why a sequence waits: the index of its counters, in this order.
WAIT_STEP = 0  # it came while a step was under way
WAIT_SLOTS = 1
WAIT_TOKENS = 2
WAIT_BLOCKS = 3
WAIT_DEVICE = 4
WAIT_REASONS = ("step", "slots", "tokens", "blocks", "device")

# Request flags (SLOT.flags).
FLAG_TOKEN_IDS = 1  # the prompt's token ids stand in the token row; otherwise only their count is known
FLAG_IGNORE_EOS = 2
FLAG_TEXT = 4  # the prompt's text stands in the text row

NO_TOKEN_ID = -2
"""In a token row: a token whose id is not known, only its text. (-1 is what no end-of-sequence token is.)"""

# Finish reasons (bits 24..31 of SLOT.published).
FINISH_NONE = 0
FINISH_LENGTH = 1
FINISH_STOP = 2
FINISH_CANCELLED = 3
FINISH_ERROR = 4
FINISH_WITHOUT_TOKEN = 0x80
"""A flag on FINISH_LENGTH and FINISH_STOP: the backend ended the sequence in a step that gave it no token. Without it
the last token's line would be the last one or not, depending on whether its worker was in time to see it alone."""

OUTPUT_CODE_SHIFT = 8
"""What a backend hands to the commit is FINISH_ERROR | error code << this; without a code it is ERROR_REQUEST."""

# Error codes (SLOT.error_code), with the sentence a client reads.
ERROR_NONE = 0
ERROR_BACKEND = 1
ERROR_LOST = 2
ERROR_REQUEST = 3
ERROR_INVALID = 4
ERROR_NO_BLOCKS = 5
ERROR_POISON = 6
ERROR_UNAVAILABLE = 7
ERROR_MESSAGES = {
    ERROR_BACKEND: "the backend failed while it computed this request; the server's log says why",
    ERROR_LOST: "the engine restarted, and this backend cannot continue a sequence that it has begun; send it again",
    ERROR_REQUEST: "the backend refused this request; the server's log says why",
    ERROR_INVALID: "the request reached the scheduler with values outside the engine's limits",
    ERROR_NO_BLOCKS: "the request ran alone and outgrew the KV pool; the server's log says more",
    ERROR_POISON: "the scheduler died again and again while it computed this request, at last twice with it alone",
    ERROR_UNAVAILABLE: "the model server is away, for longer than a request may wait; send it again later",
}

# The published word.
PUBLISHED_GENERATION_SHIFT = 32
PUBLISHED_REASON_SHIFT = 24
PUBLISHED_PRODUCED_MASK = (1 << PUBLISHED_REASON_SHIFT) - 1
GENERATION_MASK = (1 << 31) - 1  # generations stay positive in a signed word

# The suspicion word: epoch of the last death counted << 32 | produced tokens then << 8 | deaths while it ran alone << 4
# | deaths while it ran with others. One word, so that a death is counted once, whoever dies while it is being counted.
SUSPICION_EPOCH_SHIFT = 32
SUSPICION_PRODUCED_SHIFT = 8
SUSPICION_ALONE_SHIFT = 4
SUSPICION_DEATHS_MASK = 15

# The owner word: lane generation << 16 | lane + 1; 0 means free.
OWNER_LANE_BITS = 16
OWNER_LANE_MASK = (1 << OWNER_LANE_BITS) - 1


def owner_word(lane: int, generation: int) -> int:
    """The owner word of whoever holds `lane` in its `generation`."""
    return (generation << OWNER_LANE_BITS) | (lane + 1)


class Offsets(NamedTuple):
    """Where each table of a segment begins, and its length, in bytes."""

    lanes: int
    entries: int
    slots: int
    tokens: int
    texts: int
    running: int
    metrics: int
    total: int


def lane_entries(num_slots: int) -> int:
    """Entries of one lane: the smallest power of two that holds `LANE_ENTRIES_PER_SLOT` for every slot."""
    return 1 << (LANE_ENTRIES_PER_SLOT * num_slots - 1).bit_length()


def token_row_tokens(max_model_len: int) -> int:
    """Length of one slot's token row in tokens: an odd number of cache lines.

    A power-of-two stride maps all rows to the same cache sets, and publishes 1.6-2.7 x slower; an odd one to all sets.
    """
    cache_lines = -(-max_model_len * TOKEN_BYTES // CACHE_LINE_BYTES) | 1
    return cache_lines * CACHE_LINE_BYTES // TOKEN_BYTES


TEXT_BYTES_PER_TOKEN = limits.TEXT_BYTES
"""Of a text row, prompt and output together: an English token has 4 to 5 bytes, and each piece one or two more."""

TEXT_NOTE_BYTES = 512
TEXT_HEAD = np.dtype(
    {
        "names": ["prompt_bytes", "note_bytes", "usage_prompt_tokens", "usage_completion_tokens"],
        "formats": ["<i8", "<i8", "<i8", "<i8"],
        "itemsize": CACHE_LINE_BYTES,
    }
)
"""The beginning of a text row, which the worker writes before the submit: the prompt's length, and for the scheduler,
which writes them before the end is published, the length of the note (0) and the usage (-1: not told)."""


def text_row_bytes(max_model_len: int) -> int:
    """Length of one slot's text row: its head, prompt and pieces, and the note; an odd number of cache lines."""
    size = TEXT_HEAD.itemsize + max_model_len * TEXT_BYTES_PER_TOKEN + limits.TEXT_SLACK_BYTES + TEXT_NOTE_BYTES
    return (-(-size // CACHE_LINE_BYTES) | 1) * CACHE_LINE_BYTES


def running_bytes(num_slots: int) -> int:
    """Length of the table of the running in bytes: an int32 for each slot, in whole cache lines."""
    return -(-num_slots * 4 // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def offsets(*, num_slots: int, num_lanes: int, max_model_len: int, has_text: bool = False) -> Offsets:
    """Place the tables one behind the other; all sizes are multiples of a cache line."""
    lanes = HEADER.itemsize
    entries = lanes + num_lanes * LANE.itemsize
    slots = entries + num_lanes * lane_entries(num_slots) * LANE_ENTRY.itemsize
    tokens = slots + num_slots * SLOT.itemsize
    texts = tokens + num_slots * token_row_tokens(max_model_len) * TOKEN_BYTES
    running = texts + (num_slots * text_row_bytes(max_model_len) if has_text else 0)
    metrics = running + running_bytes(num_slots)
    total = metrics + (1 + num_lanes) * METRICS.itemsize
    return Offsets(lanes, entries, slots, tokens, texts, running, metrics, total)


def segment_bytes(*, num_slots: int, num_lanes: int, max_model_len: int, has_text: bool = False) -> int:
    """Size of the whole segment in bytes."""
    return offsets(num_slots=num_slots, num_lanes=num_lanes, max_model_len=max_model_len, has_text=has_text).total


for _dtype, _bytes in ((HEADER, 448), (LANE, 320), (LANE_ENTRY, 16), (SLOT, 320), (METRICS, 384 + 2 * 8 * 896)):
    assert _dtype.itemsize == _bytes, f"layout changed: {_dtype.names} has {_dtype.itemsize} bytes, not {_bytes}"
