"""One web worker's half of the protocol: it claims slots for requests and brings their tokens to the streams."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from ironbatch import layout
from ironbatch.clock import Clock
from ironbatch.errors import RequestRejected, SlotsFull
from ironbatch.kernels.slots import (
    NEWS_WORDS,
    REQUEST_FIELDS,
    slot_cancel,
    slot_submit,
    slots_claim,
    slots_collect,
    slots_settle,
    slots_share_request,
)
from ironbatch.shm.engine import Engine
from ironbatch.text.tokenizer import Tokenizer
from ironbatch.web.choice import Choice, DetailedChoice, GivenUpChoice
from ironbatch.web.lines import STATS_FIELDS, choice_tag
from ironbatch.web.request import GenerateRequest
from ironbatch.web.stream import Exit, TokenStream
from ironbatch.web.text_choice import DetailedTextChoice, TextChoice
from ironbatch.web.texts import Texts

_log = logging.getLogger("ironbatch.web")

METRICS_ROW_OF_FIRST_LANE = 1
_GIVEN_UP = GivenUpChoice(layout.NO_SLOT)


class TokenCollector:
    """Holds one lane. Everything runs on the worker's event loop; nothing waits.

    Args:
        engine: the segment and the doorbells.
        lane, generation: which lane this worker holds, and its how manieth holder it is.
        clock: where "now" comes from.
        tokenizer: for the text of requests with a text; None where none is needed.
    """

    def __init__(
        self, engine: Engine, lane: int, generation: int, clock: Clock, tokenizer: Tokenizer | None = None
    ) -> None:
        num_slots = int(engine.segment.header["num_slots"])
        self.counters = engine.segment.metrics[METRICS_ROW_OF_FIRST_LANE + lane]
        self.texts = Texts(engine.segment, tokenizer)
        self._engine = engine
        self._segment = engine.segment
        # Views of some fields alone: numpy takes one after another dearly, and all of them in one assignment.
        self._requests = engine.segment.slots[list(REQUEST_FIELDS)]
        self._stats = engine.segment.slots[list(STATS_FIELDS)]
        self._next_choices = engine.segment.slots["next_choice"]
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
        self._choices: list[Choice | None] = [None] * num_slots
        self._streams: list[TokenStream | None] = [None] * num_slots  # whose choice it is

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
        """Hand a request to the scheduler: a slot for each of its choices, or none.

        Raises:
            SlotsFull: max_running_seqs + max_queued_requests are in the engine already, or nearly so.
        """
        parent = int(slots_claim(self._address, self._owner, self._next_slot, request.choices))
        if parent < 0:
            raise self._full(request.choices)
        self._write_request(parent, request, way_out.arrival_ns)
        slots = [parent]
        if request.choices > 1:
            slots_share_request(self._address, parent)
            while (slot := int(self._next_choices[slots[-1]])) != layout.NO_SLOT:
                slots.append(slot)
        self.texts.write_prompt(slots, request)
        self._next_slot = slots[-1] + 1 if slots[-1] + 1 < len(self._streams) else 0
        stream = TokenStream(way_out, [self._choice(slot, index, request) for index, slot in enumerate(slots)])
        for choice in stream.choices:
            self._choices[choice.slot] = choice
            self._streams[choice.slot] = stream
            self._seen[choice.slot] = 0
            self._active[self._active_count] = choice.slot
            self._active_count += 1
        self._ring_if(slot_submit(self._address, self._lane, parent))
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """The client has gone. Each slot comes back when the scheduler has published its end."""
        stream.abandon()
        for choice in stream.choices:
            if self._choices[choice.slot] is choice:
                self._ring_if(slot_cancel(self._address, self._lane, choice.slot))

    def end(self, stream: TokenStream, problem: RequestRejected) -> bool:
        """End a request before its time: its client gets the tokens that there are, then the problem.

        Each slot comes back as after a `cancel`. Returns False if there was nothing to end: all of its sequences are
        over, and at most its socket is behind.
        """
        running = [choice for choice in stream.choices if self._choices[choice.slot] is choice]
        for choice in running:
            choice.fail(problem)
            self._choices[choice.slot] = _GIVEN_UP
            self._ring_if(slot_cancel(self._address, self._lane, choice.slot))
        self._write(stream)
        return bool(running)

    def end_all(self, problem: RequestRejected) -> int:
        """`end` every request of this worker. Returns how many there were."""
        self.collect()
        streams = {id(stream): stream for stream in self._streams if stream is not None}
        return sum(self.end(stream, problem) for stream in streams.values())

    def was_admitted(self, stream: TokenStream) -> bool:
        """Whether the scheduler has ever admitted a request; one that it has preempted since was."""
        slots = self._segment.slots[[choice.slot for choice in stream.choices]]
        return bool((slots["admitted_generation"] == slots["generation"]).any())

    def say_drained(self) -> None:
        """Let whoever stops the engine know that this worker has no request left."""
        self._segment.lanes[self._lane]["drained_generation"] = self._generation

    def collect(self) -> None:
        """Bring every stream what the scheduler has published since the last look: at most one write each."""
        self._bell.silence()
        count = int(slots_collect(self._address, self._lane, self._active, self._active_count, self._seen, self._news))
        if count == 0:
            return
        told: list[TokenStream] = []
        last = None
        for slot, _, produced, reason, error_code in self._news_rows[:count].tolist():
            choice, stream = self._choices[slot], self._streams[slot]
            assert choice is not None
            assert stream is not None
            choice.advance(produced, reason, error_code)
            if stream is not last:  # the choices of a request were submitted together, so their news are neighbours
                told.append(stream)
                last = stream
            if reason != layout.FINISH_NONE:
                self._choices[slot] = self._streams[slot] = None
                if choice.note and not stream.was_cancelled:
                    _log.warning("a sequence has failed: %s", choice.note, extra={"request_id": stream.request_id})
        for stream in told:
            self._write(stream)
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

    def _write(self, stream: TokenStream) -> None:
        try:
            stream.write()
        except Exception as problem:  # one stream's fault must not hold up the others
            about = {"request_id": stream.request_id}
            _log.exception("stream of slot %d failed", stream.choices[0].slot, extra=about)
            stream.fail(problem)

    def _full(self, choices: int) -> SlotsFull:
        usable = int(self._segment.header["usable_slots"]) or len(self._streams)
        places = f"{usable} places"
        running = "--max-running-seqs" if usable == len(self._streams) else "what the backend takes at once"
        flags = f"({running} + --max-queued-requests)"
        if choices == 1:
            return SlotsFull(f"all {places} of the engine {flags} are taken; send it again later")
        return SlotsFull(
            f"n is {choices}, and fewer of the engine's {places} {flags} are free;"
            " send it again later, or with a lower n"
        )

    def _choice(self, slot: int, index: int, request: GenerateRequest) -> Choice:
        tag = choice_tag(index, request.choices)
        texts = self.texts.source(slot, request)
        if not request.details:
            return Choice(slot, tag) if texts is None else TextChoice(slot, tag, texts)
        output_ids = self._segment.tokens[slot, request.prompt_tokens :][: request.max_new_tokens]
        if texts is None:
            return DetailedChoice(slot, tag, output_ids, self._stats[slot])
        return DetailedTextChoice(slot, tag, output_ids, self._stats[slot], texts)

    def _write_request(self, slot: int, request: GenerateRequest, arrival_ns: int) -> None:
        self._requests[slot] = (
            arrival_ns,
            request.seed,
            request.prompt_tokens,
            request.max_new_tokens,
            request.priority,
            request.flags,
            0,  # no deadline
            request.temperature,
            request.top_p,
            request.top_k,
            *request.salt,
        )
        if request.token_ids is not None:
            self._segment.tokens[slot, : request.prompt_tokens] = request.token_ids

    def _ring_if(self, answer: int) -> None:
        assert answer >= 0, "a lane has four entries a slot, of which at most three can be outstanding"
        if answer > 0:
            self._engine.scheduler_bell.ring()
