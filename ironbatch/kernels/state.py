"""The scheduler's private state: sequences, running set, waiting queue, blocks, batch plan, in one arena.

A sequence is the scheduler's side of a slot and has the slot's index. The arena is one allocation of which kernels get
the address; its header says where each table begins. It dies with the scheduler: what a client could miss stands in
the shared slots, from which `intake.rebuild` makes a new one.

Seniority, the total order (priority class, arrival_ns, slot), decides everything: the waiting queue and the running set
are kept sorted by it, admission takes the head of the one, preemption the tail of the other. So whoever was preempted
returns to its old place, and nobody is ever preempted in favour of a newer one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch.kernels.jit import inline
from ironbatch.kernels.tables import int32_table, word_table
from ironbatch.limits import PRIORITY_CLASSES

CACHE_LINE_BYTES = 64

_HEADER_FIELDS = (
    # geometry and limits, set once
    "num_slots",
    "num_lanes",
    "num_blocks",
    "block_size",
    "block_shift",
    "blocks_per_sequence",
    "running_limit",
    "batch_tokens",
    "tokens_per_step",  # the most tokens that the backend can emit for one sequence in one step
    "eos_token_id",
    # counts
    "running_count",
    "waiting_count",
    "free_count",
    "row_count",
    "forget_count",
    "wake_count",
    "preempted_count",  # of the last plan
    "admitted_count",  # of the last plan
    "plan_tokens",  # of the last plan
    "plan_decodes",  # of them, those of decodes; the rest is prefill
    # byte offsets of the tables
    "sequences",
    "arrival_ns",
    "seeds",
    "running",
    "queue_heads",
    "queue_tails",
    "free_blocks",
    "refcounts",
    "block_tables",
    "rows",
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
RUNNING_LIMIT = _header_word("running_limit")
BATCH_TOKENS = _header_word("batch_tokens")
TOKENS_PER_STEP = _header_word("tokens_per_step")
EOS_TOKEN_ID = _header_word("eos_token_id")
RUNNING_COUNT = _header_word("running_count")
WAITING_COUNT = _header_word("waiting_count")
FREE_COUNT = _header_word("free_count")
ROW_COUNT = _header_word("row_count")
FORGET_COUNT = _header_word("forget_count")
WAKE_COUNT = _header_word("wake_count")
PREEMPTED_COUNT = _header_word("preempted_count")
ADMITTED_COUNT = _header_word("admitted_count")
PLAN_TOKENS = _header_word("plan_tokens")
PLAN_DECODES = _header_word("plan_decodes")

# One cache line a sequence: the whole of it is touched in each step, so it is fetched once (half the time of one array
# per field). All int32.
SEQUENCE = np.dtype(
    [
        ("status", "<i4"),
        ("generation", "<i4"),
        ("lane", "<i4"),
        ("priority_class", "<i4"),
        ("prompt_tokens", "<i4"),
        ("max_new_tokens", "<i4"),
        ("produced_tokens", "<i4"),
        ("computed_tokens", "<i4"),  # positions whose KV is written: 0..context
        ("block_count", "<i4"),
        ("flags", "<i4"),
        ("next", "<i4"),  # links of the waiting queue; -1 ends it
        ("previous", "<i4"),
        ("preemptions", "<i4"),
        ("reserved", "<i4", (3,)),
    ]
)
SEQUENCE_WORDS = SEQUENCE.itemsize // 4
assert SEQUENCE.itemsize == CACHE_LINE_BYTES


def _column(dtype: np.dtype[np.void], name: str) -> int:
    fields = dtype.fields
    assert fields is not None
    return int(fields[name][1]) // 4


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

STATUS_NONE = 0
STATUS_WAITING = 1
STATUS_RUNNING = 2

# One row a sequence of the plan.
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


class State(NamedTuple):
    """Tables of the arena, for kernels. header, arrival_ns and seeds are int64; the rest int32."""

    header: Any
    sequences: Any
    arrival_ns: Any
    seeds: Any
    running: Any
    queue_heads: Any
    queue_tails: Any
    free_blocks: Any
    refcounts: Any
    block_tables: Any
    rows: Any
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
        word_table(address + h[_ARRIVAL], slots),
        word_table(address + h[_SEEDS], slots),
        int32_table(address + h[_RUNNING], limit),
        int32_table(address + h[_HEADS], PRIORITY_CLASSES),
        int32_table(address + h[_TAILS], PRIORITY_CLASSES),
        int32_table(address + h[_FREE], h[NUM_BLOCKS]),
        int32_table(address + h[_REFCOUNTS], h[NUM_BLOCKS]),
        int32_table(address + h[_BLOCK_TABLES], slots * h[BLOCKS_PER_SEQUENCE]),
        int32_table(address + h[_ROWS], limit * ROW_WORDS),
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
_ARRIVAL = _header_word("arrival_ns")
_SEEDS = _header_word("seeds")
_RUNNING = _header_word("running")
_HEADS = _header_word("queue_heads")
_TAILS = _header_word("queue_tails")
_FREE = _header_word("free_blocks")
_REFCOUNTS = _header_word("refcounts")
_BLOCK_TABLES = _header_word("block_tables")
_ROWS = _header_word("rows")
_OUT_COUNTS = _header_word("output_counts")
_OUT_TOKENS = _header_word("output_tokens")
_OUT_FINISH = _header_word("output_finish")
_FORGET = _header_word("forget")
_NEWS = _header_word("lane_news")
_WAKES = _header_word("wakes")
_TOKEN_IDS = _header_word("token_ids")
_POSITIONS = _header_word("positions")
_MAPPING = _header_word("kv_slot_mapping")


class Geometry(NamedTuple):
    """Sizes of an arena. All counts; `block_size` is a power of two."""

    num_slots: int
    num_lanes: int
    num_blocks: int
    block_size: int
    max_request_tokens: int
    running_limit: int
    batch_tokens: int
    tokens_per_step: int = 1
    eos_token_id: int = -1


class StateArena:
    """Allocates the arena and gives Python its tables as numpy views; all memory that a scheduler ever uses."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.blocks_per_sequence = -(-geometry.max_request_tokens // geometry.block_size)
        tables = self._tables()
        sizes = [int(np.dtype(dtype).itemsize * np.prod(shape)) for dtype, shape in tables.values()]
        starts = [_aligned(STATE_HEADER.itemsize)]
        for size in sizes:
            starts.append(starts[-1] + _aligned(size))
        memory = np.empty(starts[-1] + CACHE_LINE_BYTES, np.uint8)
        memory.fill(0)  # np.zeros would leave the pages to the steps that first touch them
        shift = -memory.ctypes.data % CACHE_LINE_BYTES
        self._memory = memory[shift : shift + starts[-1]]
        self.address = int(self._memory.ctypes.data)
        self.header = self._memory[: STATE_HEADER.itemsize].view(STATE_HEADER)[0]
        self.words: NDArray[np.int64] = self._memory[: STATE_HEADER.itemsize].view(np.int64)  # the same, by index
        self.views: dict[str, NDArray[Any]] = {}
        for (name, (dtype, shape)), start, size in zip(tables.items(), starts[:-1], sizes, strict=True):
            self.header[name] = start
            self.views[name] = self._memory[start : start + size].view(dtype).reshape(shape)
        self._initialise()

    def _tables(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        g = self.geometry
        return {
            "sequences": (SEQUENCE, (g.num_slots,)),
            "arrival_ns": ("<i8", (g.num_slots,)),
            "seeds": ("<i8", (g.num_slots,)),
            "running": ("<i4", (g.running_limit,)),
            "queue_heads": ("<i4", (PRIORITY_CLASSES,)),
            "queue_tails": ("<i4", (PRIORITY_CLASSES,)),
            "free_blocks": ("<i4", (g.num_blocks,)),
            "refcounts": ("<i4", (g.num_blocks,)),
            "block_tables": ("<i4", (g.num_slots, self.blocks_per_sequence)),
            "rows": (PLAN_ROW, (g.running_limit,)),
            "output_counts": ("<i4", (g.running_limit,)),
            "output_tokens": ("<i4", (g.running_limit * g.tokens_per_step,)),
            "output_finish": ("<i4", (g.running_limit,)),
            "forget": ("<i4", (2 * g.num_slots,)),
            "lane_news": ("<i4", (g.num_lanes,)),
            "wakes": ("<i4", (g.num_lanes,)),
            "token_ids": ("<i4", (g.batch_tokens,)),
            "positions": ("<i4", (g.batch_tokens,)),
            "kv_slot_mapping": ("<i8", (g.batch_tokens,)),
        }

    def _initialise(self) -> None:
        g = self.geometry
        for name in Geometry._fields:
            if name in STATE_HEADER.names:  # type: ignore[operator]
                self.header[name] = getattr(g, name)
        self.header["block_shift"] = g.block_size.bit_length() - 1
        self.header["blocks_per_sequence"] = self.blocks_per_sequence
        self.header["free_count"] = g.num_blocks
        self.views["queue_heads"][:] = -1
        self.views["queue_tails"][:] = -1
        self.views["free_blocks"][:] = np.arange(g.num_blocks)[::-1]  # the lowest id is handed out first


def _aligned(size: int) -> int:
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
