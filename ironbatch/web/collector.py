"""One web worker's half of the protocol: it claims slots for requests and brings their tokens to the streams."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from ironbatch import layout
from ironbatch.clock import Clock
from ironbatch.errors import SlotsFull
from ironbatch.kernels.slots import NEWS_WORDS, slot_cancel, slot_claim, slot_submit, slots_collect, slots_settle
from ironbatch.shm.engine import Engine
from ironbatch.web.request import GenerateRequest
from ironbatch.web.stream import Exit, TokenStream

_log = logging.getLogger("ironbatch.web")

METRICS_ROW_OF_FIRST_LANE = 1

REQUEST_FIELDS = [
    "arrival_ns",
    "seed",
    "prompt_tokens",
    "max_new_tokens",
    "priority",
    "flags",
    "choice_index",
    "parent_slot",
    "deadline_ns",
    "temperature",
    "top_p",
    "top_k",
]
"""What a worker writes between claim and submit, in one assignment: numpy takes one field after another dearly."""


class TokenCollector:
    """Holds one lane. Everything runs on the worker's event loop; nothing waits.

    Args:
        engine: the segment and the doorbells.
        lane, generation: which lane this worker holds, and its how manieth holder it is.
        clock: where "now" comes from.
    """

    def __init__(self, engine: Engine, lane: int, generation: int, clock: Clock) -> None:
        num_slots = int(engine.segment.header["num_slots"])
        self.counters = engine.segment.metrics[METRICS_ROW_OF_FIRST_LANE + lane]
        self._engine = engine
        self._segment = engine.segment
        self._requests = engine.segment.slots[REQUEST_FIELDS]  # a view of these fields alone
        self._address = engine.segment.address
        self._lane = lane
        self._generation = generation
        self._owner = int(layout.owner_word(lane, generation))
        self._clock = clock
        self._bell = engine.lane_bells[lane]
        self._next_slot = lane * num_slots // len(engine.lane_bells)  # so that workers seldom try the same one
        self._active = np.zeros(num_slots, np.int32)
        self._active_count = 0
        self._seen = np.zeros(num_slots, np.int64)
        self._last_ns = np.zeros(num_slots, np.int64)
        self._news = np.zeros(num_slots * NEWS_WORDS, np.int64)
        self._news_rows = self._news.reshape(num_slots, NEWS_WORDS)
        self._streams: list[TokenStream | None] = [None] * num_slots

    def start(self, loop: asyncio.AbstractEventLoop, pid: int) -> None:
        """Listen to the lane's doorbell, and say that this worker serves."""
        loop.add_reader(self._bell.descriptor, self.collect)
        self.collect()
        record = self._segment.lanes[self._lane]
        record["worker_pid"] = pid
        record["serving_generation"] = self._generation

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop listening; this worker exits."""
        loop.remove_reader(self._bell.descriptor)

    def submit(self, request: GenerateRequest, way_out: Exit) -> TokenStream:
        """Hand a request to the scheduler.

        Raises:
            SlotsFull: max_running_seqs + max_queued_requests are in the engine already.
        """
        num_slots = len(self._streams)
        slot = int(slot_claim(self._address, self._owner, self._next_slot))
        if slot < 0:
            raise SlotsFull(
                f"all {num_slots} places of the engine (--max-running-seqs + --max-queued-requests) are taken;"
                " send it again later"
            )
        self._next_slot = slot + 1 if slot + 1 < num_slots else 0
        output_ids = None
        if request.details:
            output_ids = self._segment.tokens[slot, request.prompt_tokens :][: request.max_new_tokens]
        stream = TokenStream(slot, way_out, output_ids)
        self._write_request(slot, request, way_out.arrival_ns)
        self._streams[slot] = stream
        self._seen[slot] = 0
        self._active[self._active_count] = slot
        self._active_count += 1
        self._ring_if(slot_submit(self._address, self._lane, slot))
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """The client has gone. The slot comes back when the scheduler has published its end."""
        stream.abandon()
        if self._streams[stream.slot] is stream:
            self._ring_if(slot_cancel(self._address, self._lane, stream.slot))

    def collect(self) -> None:
        """Bring every stream what the scheduler has published since the last look: at most one write each."""
        self._bell.silence()
        count = int(slots_collect(self._address, self._lane, self._active, self._active_count, self._seen, self._news))
        if count == 0:
            return
        for slot, _, produced, reason, error_code in self._news_rows[:count].tolist():
            stream = self._streams[slot]
            assert stream is not None
            try:
                stream.advance(produced, reason, error_code)
            except Exception as problem:  # one stream's fault must not hold up the others
                _log.exception("stream of slot %d failed", slot)
                stream.fail(problem)
            if reason != layout.FINISH_NONE:
                self._streams[slot] = None
        self._active_count = int(
            slots_settle(
                self._address,
                self._lane,
                self._active,
                self._active_count,
                self._seen,
                self._news,
                count,
                self._last_ns,
                self._clock.now_ns(),
            )
        )

    def _write_request(self, slot: int, request: GenerateRequest, arrival_ns: int) -> None:
        self._requests[slot] = (
            arrival_ns,
            request.seed,
            request.prompt_tokens,
            request.max_new_tokens,
            request.priority,
            request.flags,
            0,  # it is the first and only choice,
            slot,  # and so its own parent
            0,  # no deadline
            request.temperature,
            request.top_p,
            request.top_k,
        )
        if request.token_ids is not None:
            self._segment.tokens[slot, : request.prompt_tokens] = request.token_ids

    def _ring_if(self, answer: int) -> None:
        assert answer >= 0, "a lane has four entries a slot, of which at most three can be outstanding"
        if answer > 0:
            self._engine.scheduler_bell.ring()
