"""The arena's memory: sized once from a geometry, filled with the empty state, shown to Python as numpy views."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch.kernels.records import (
    CACHE_LINE_BYTES,
    CACHED_BLOCK,
    COPY_WORDS,
    FORK,
    NOBODY,
    PLAN_ROW,
    SEQUENCE,
    WAIT,
)
from ironbatch.kernels.state import STATE_HEADER
from ironbatch.limits import PRIORITY_CLASSES


class Geometry(NamedTuple):
    """Sizes and limits of an arena; what each means stands with its word of the header."""

    num_slots: int
    num_lanes: int
    num_blocks: int
    block_size: int
    max_request_tokens: int
    running_limit: int
    batch_tokens: int
    tokens_per_step: int = 1
    reserves: bool = False
    eos_token_id: int = -1
    prefix_cache: bool = False
    shares_kv: bool = True
    aging_ns: int = 0
    mixes: bool = True
    prefill_row_limit: int = 0
    context_cap: int = 0
    sequence_buckets: tuple[int, ...] = ()
    running_is_device: bool = False
    batch_is_device: bool = False
    hash_seed: int = 0


class StateArena:
    """Allocates the arena and gives Python its tables as numpy views; all memory that a scheduler ever uses."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.blocks_per_sequence = -(-geometry.max_request_tokens // geometry.block_size)
        self.index_buckets = 1 << (geometry.num_blocks - 1).bit_length() if geometry.prefix_cache else 1
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
        self._constants = self._read_constants()

    def _read_constants(self) -> list[int]:
        first_variable, first_offset = (STATE_HEADER.names or ()).index("running_count"), self._offset_words()
        return [*self.words[:first_variable].tolist(), *self.words[first_offset:].tolist()]

    @staticmethod
    def _offset_words() -> int:
        return (STATE_HEADER.names or ()).index("sequences")

    @property
    def is_intact(self) -> bool:
        """Whether sizes, limits and offsets still are what they were made as: every kernel trusts them."""
        return self._read_constants() == self._constants

    def _tables(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        g = self.geometry
        return {
            "sequences": (SEQUENCE, (g.num_slots,)),
            "forks": (FORK, (g.num_slots,)),
            "waits": (WAIT, (g.num_slots,)),
            "arrival_ns": ("<i8", (g.num_slots,)),
            "seeds": ("<i8", (g.num_slots,)),
            "running": ("<i4", (g.running_limit,)),
            "queue_heads": ("<i4", (PRIORITY_CLASSES,)),
            "queue_tails": ("<i4", (PRIORITY_CLASSES,)),
            "queue_hints": ("<i4", (PRIORITY_CLASSES,)),
            "free_blocks": ("<i4", (g.num_blocks,)),
            "refcounts": ("<i4", (g.num_blocks,)),
            "block_tables": ("<i4", (g.num_slots, self.blocks_per_sequence)),
            "cached_blocks": (CACHED_BLOCK, (g.num_blocks * g.prefix_cache,)),
            "block_tokens": ("<i4", (g.num_blocks * g.prefix_cache, g.block_size)),
            "index": ("<i4", (self.index_buckets,)),
            "sequence_buckets": ("<i4", (len(g.sequence_buckets),)),
            "rows": (PLAN_ROW, (g.running_limit,)),
            "copies": ("<i4", (g.running_limit, COPY_WORDS)),
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
        for name in set(Geometry._fields) - {"sequence_buckets"}:
            self.header[name] = getattr(g, name)
        self.header["lookahead"] = g.max_request_tokens if g.reserves else g.tokens_per_step
        self.header["block_shift"] = g.block_size.bit_length() - 1
        self.header["blocks_per_sequence"] = self.blocks_per_sequence
        self.header["bucket_count"] = len(g.sequence_buckets)
        self.header["hash_mask"] = -1
        self.header["index_mask"] = self.index_buckets - 1
        self.header["free_count"] = g.num_blocks
        self.header["next_uid"] = 1
        self.header["running_changed"] = 1  # what stands in the segment is a predecessor's
        self.header["next_aging_ns"] = np.iinfo(np.int64).max
        for name in ("oldest", "newest", "blocked_sequence", "denied_sequence"):
            self.header[name] = NOBODY
        for name in ("queue_heads", "queue_tails", "index"):
            self.views[name][:] = NOBODY
        for name in ("parent", "source_block", "first_fork", "next_fork"):
            self.views["forks"][name] = NOBODY
        self.views["sequence_buckets"][:] = g.sequence_buckets
        self.views["free_blocks"][:] = np.arange(g.num_blocks)[::-1]  # the lowest id is handed out first


def _aligned(size: int) -> int:
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
