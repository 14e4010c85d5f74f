"""Slots against a dict: the life of a slot as its worker sees it, with the test in the scheduler's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch import layout
from ironbatch.kernels.histogram import histogram_bucket
from ironbatch.kernels.lanes import arm_scheduler, lane_drain
from ironbatch.kernels.slots import (
    NEWS_WORDS,
    slot_cancel,
    slot_claim,
    slot_release,
    slot_submit,
    slots_collect,
    slots_settle,
)
from ironbatch.shm.segment import Segment
from tests.support import machine_settings, small_config, small_engine

NUM_SLOTS = 5
LANES = 2
LARGEST_GENERATION = layout.GENERATION_MASK


@dataclass
class Slot:
    """What the model knows of a slot that is not free."""

    lane: int
    is_submitted: bool = False
    produced: int = 0
    seen: int = 0
    reason: int = layout.FINISH_NONE
    is_published: bool = False


class SlotMachine(RuleBasedStateMachine):
    """Two workers and five slots."""

    @initialize()
    def start(self) -> None:
        self.segment = Segment.create(small_config(max_running_seqs=1, max_queued_requests=NUM_SLOTS - 1), 0)
        self.address = self.segment.address
        self.slots: dict[int, Slot] = {}
        self.generations = [0] * NUM_SLOTS
        self.active: list[list[int]] = [[] for _ in range(LANES)]
        self.buffers = [(np.zeros(NUM_SLOTS, np.int32), np.zeros(NUM_SLOTS, np.int64)) for _ in range(LANES)]
        self.news = np.zeros(NUM_SLOTS * NEWS_WORDS, np.int64)
        self.last_ns = np.zeros(NUM_SLOTS, np.int64)

    def _pick(self, draw: Any, **wanted: Any) -> int | None:
        """A slot of the model with these properties, or None."""
        slots = [s for s, slot in self.slots.items() if all(getattr(slot, k) == v for k, v in wanted.items())]
        return draw.draw(st.sampled_from(sorted(slots)), label="slot") if slots else None

    @rule(lane=st.integers(0, LANES - 1), first=st.integers(0, NUM_SLOTS - 1))
    def claim(self, lane: int, first: int) -> None:
        found = slot_claim(self.address, (7 << layout.OWNER_LANE_BITS) | (lane + 1), first)
        order = [(first + k) % NUM_SLOTS for k in range(NUM_SLOTS)]
        free = [slot for slot in order if slot not in self.slots]
        assert found == (free[0] if free else -1)
        if free:
            self.slots[found] = Slot(lane)
            self.generations[found] = self.generations[found] % LARGEST_GENERATION + 1

    @rule(draw=st.data())
    def abandon(self, draw: Any) -> None:
        slot = self._pick(draw, is_submitted=False)
        if slot is not None:
            slot_release(self.address, slot)
            del self.slots[slot]

    @rule(draw=st.data())
    def submit(self, draw: Any) -> None:
        slot = self._pick(draw, is_submitted=False)
        if slot is not None:
            lane = self.slots[slot].lane
            assert slot_submit(self.address, lane, slot) == 0
            self._assert_hinted(slot)
            assert self.segment.slots[slot]["submitted"] == self.generations[slot]
            self.slots[slot].is_submitted = True
            self.active[lane].append(slot)
            self.buffers[lane][1][slot] = 0

    @rule(draw=st.data())
    def cancel(self, draw: Any) -> None:
        slot = self._pick(draw, is_submitted=True)
        if slot is not None:
            assert slot_cancel(self.address, self.slots[slot].lane, slot) == 0
            self._assert_hinted(slot)
            assert self.segment.slots[slot]["cancelled"] == self.generations[slot]

    def _assert_hinted(self, slot: int) -> None:
        out = np.zeros(4, np.int64)
        assert lane_drain(self.address, self.slots[slot].lane, out, 2) == 1
        assert out[:2].tolist() == [slot, self.generations[slot]]

    @rule(draw=st.data(), more=st.integers(0, 3), reason=st.sampled_from([0, 0, 0, 1, 4]))
    def publish(self, draw: Any, more: int, reason: int) -> None:
        """The scheduler's part."""
        slot = self._pick(draw, is_submitted=True, reason=layout.FINISH_NONE)
        if slot is None:
            return
        model = self.slots[slot]
        model.produced += more
        model.reason = reason
        model.is_published = True
        row = self.segment.slots[slot]
        row["error_code"] = 1000 + slot
        row["published"] = (self.generations[slot] << 32) | (reason << 24) | model.produced

    @rule(lane=st.integers(0, LANES - 1))
    def collect_and_settle(self, lane: int) -> None:
        active, seen = self.buffers[lane]
        count = len(self.active[lane])
        active[:count] = self.active[lane]
        self.segment.lanes[lane]["worker_sleeping"] = 0
        news_count = slots_collect(self.address, lane, active, count, seen, self.news)
        assert self.segment.lanes[lane]["worker_sleeping"] == 1
        expected = []
        for slot in self.active[lane]:
            model = self.slots[slot]
            if model.is_published and (model.produced > model.seen or model.reason):
                error = 1000 + slot if model.reason == layout.FINISH_ERROR else 0
                expected.append([slot, model.seen, model.produced, model.reason, error])
        assert self.news.reshape(-1, NEWS_WORDS)[:news_count].tolist() == expected
        kept = slots_settle(self.address, lane, active, count, seen, self.news, news_count, self.last_ns, 1)
        for slot, _, produced, reason, _ in expected:
            self.slots[slot].seen = produced
            if reason:
                del self.slots[slot]
        self.active[lane] = [slot for slot in self.active[lane] if slot in self.slots]
        assert active[:kept].tolist() == self.active[lane]

    @precondition(lambda self: len(self.slots) < NUM_SLOTS)
    @rule(draw=st.data(), generation=st.sampled_from([LARGEST_GENERATION - 1, LARGEST_GENERATION]))
    def age(self, draw: Any, generation: int) -> None:
        """As after two thousand million requests."""
        slot = draw.draw(st.sampled_from(sorted(set(range(NUM_SLOTS)) - set(self.slots))), label="slot")
        row = self.segment.slots[slot]
        row["generation"] = self.generations[slot] = generation
        row["submitted"] = row["cancelled"] = generation
        row["published"] = (generation << 32) | (layout.FINISH_LENGTH << 24)

    @invariant()
    def owners_and_generations_agree(self) -> None:
        owners = (self.segment.slots["owner"] & layout.OWNER_LANE_MASK).tolist()
        assert owners == [self.slots[k].lane + 1 if k in self.slots else 0 for k in range(NUM_SLOTS)]
        assert self.segment.slots["generation"].tolist() == self.generations
        assert all(self.generations[slot] > 0 for slot in self.slots)

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            self.segment.close()


SlotMachine.TestCase.settings = machine_settings(max_examples=60, stateful_step_count=50)
TestSlot = SlotMachine.TestCase


def test_submit_and_cancel_ring_a_sleeping_scheduler_once() -> None:
    with small_engine() as engine:
        address = engine.segment.address
        slots = [slot_claim(address, 1, 0) for _ in range(2)]
        assert arm_scheduler(address) == 1
        assert [slot_submit(address, 0, slot) for slot in slots] == [1, 0]
        engine.scheduler.step()
        assert arm_scheduler(address) == 1
        assert [slot_cancel(address, 0, slot) for slot in slots] == [1, 0]


def test_full_lane_is_an_answer() -> None:
    with small_engine() as engine:
        address = engine.segment.address
        slot = slot_claim(address, 1, 0)
        capacity = int(engine.segment.header["lane_entries"])
        assert [slot_submit(address, 0, slot) for _ in range(capacity)] == [0] * capacity
        assert slot_submit(address, 0, slot) == -1
        assert slot_cancel(address, 0, slot) == -1


def test_word_of_an_earlier_generation_is_no_news() -> None:
    with small_engine() as engine:
        worker = engine.worker()
        first = worker.submit(1, 2)
        engine.run(worker)
        assert first.is_over
        second = worker.submit(1, 2)
        assert second.slot == first.slot
        assert worker.collect() == []  # the slot still shows the end of the first


def test_settling_times_the_first_token_and_the_gaps() -> None:
    with small_engine() as engine:
        worker = engine.worker()
        stream = worker.submit(1, 6, arrival_ns=1_000_000)
        metrics = engine.segment.metrics[1 + worker.lane]

        def steps(count: int) -> None:
            for _ in range(count):
                engine.step()

        steps(1)
        worker.collect(now_ns=4_500_000)
        assert metrics["ttft_us"].nonzero()[0].tolist() == [histogram_bucket(3_500)]
        steps(1)
        worker.collect(now_ns=4_507_000)
        steps(3)
        worker.collect(now_ns=4_567_000)  # three tokens in 60 us are three gaps of 20
        assert metrics["inter_token_us"].sum() == 4
        assert metrics["inter_token_us"][histogram_bucket(7)] == 1
        assert metrics["inter_token_us"][histogram_bucket(20)] == 3
        assert len(stream.token_ids) == 5
        worker.collect(now_ns=9_000_000)  # nothing new, nothing counted
        assert metrics["inter_token_us"].sum() == 4
        assert metrics["ttft_us"].sum() == 1
