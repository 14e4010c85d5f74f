"""Slots against a dict: the life of a slot as its worker sees it, with the test in the scheduler's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch import layout, limits
from ironbatch.kernels.histogram import histogram_bucket
from ironbatch.kernels.lanes import arm_scheduler, lane_drain
from ironbatch.kernels.slots import (
    NEWS_WORDS,
    REQUEST_FIELDS,
    choice_seed,
    slot_cancel,
    slot_claim,
    slot_release,
    slot_submit,
    slots_claim,
    slots_collect,
    slots_settle,
    slots_share_request,
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
    group: tuple[int, ...]  # all slots of its request, in order
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
        found = slot_claim(self.address, self._owner(lane), first)
        free = self._free_from(first)
        assert found == (free[0] if free else -1)
        if free:
            self._is_claimed(lane, free[:1])

    @rule(lane=st.integers(0, LANES - 1), first=st.integers(0, NUM_SLOTS - 1), count=st.integers(1, NUM_SLOTS + 1))
    def claim_group(self, lane: int, first: int, count: int) -> None:
        found = slots_claim(self.address, self._owner(lane), first, count)
        free = self._free_from(first)[:count]
        if len(free) < count:
            assert found == -1
            for slot in free:  # claimed and given back
                self.generations[slot] = self.generations[slot] % LARGEST_GENERATION + 1
            return
        assert found == min(free)
        self._is_claimed(lane, sorted(free))

    def _owner(self, lane: int) -> int:
        return (7 << layout.OWNER_LANE_BITS) | (lane + 1)

    def _free_from(self, first: int) -> list[int]:
        order = [(first + k) % NUM_SLOTS for k in range(NUM_SLOTS)]
        return [slot for slot in order if slot not in self.slots]

    def _is_claimed(self, lane: int, group: list[int]) -> None:
        following = [*group[1:], layout.NO_SLOT]
        for index, (slot, next_slot) in enumerate(zip(group, following, strict=True)):
            self.slots[slot] = Slot(lane, tuple(group))
            self.generations[slot] = self.generations[slot] % LARGEST_GENERATION + 1
            row = self.segment.slots[slot]
            assert (row["choice_index"], row["parent_slot"], row["next_choice"]) == (index, group[0], next_slot)

    @rule(draw=st.data())
    def abandon(self, draw: Any) -> None:
        slot = self._pick(draw, is_submitted=False)
        if slot is not None:
            for choice in self.slots[slot].group:
                slot_release(self.address, choice)
                del self.slots[choice]

    @rule(draw=st.data())
    def submit(self, draw: Any) -> None:
        slot = self._pick(draw, is_submitted=False)
        if slot is not None:
            lane, group = self.slots[slot].lane, self.slots[slot].group
            assert slot_submit(self.address, lane, group[0]) == 0
            self._assert_hinted(group[0])
            for choice in group:
                assert self.segment.slots[choice]["submitted"] == self.generations[choice]
                self.slots[choice].is_submitted = True
                self.active[lane].append(choice)
                self.buffers[lane][1][choice] = 0

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


def test_seeds_of_choices_are_the_requests_and_others_within_the_bound() -> None:
    for seed in (0, 7, 2**63 - 1):
        seeds = [choice_seed(seed, index) for index in range(limits.CHOICES_MAX)]
        assert seeds[0] == seed
        assert all(each in limits.SEED for each in seeds)
        assert len(set(seeds)) == limits.CHOICES_MAX
    assert choice_seed(7, 1) == splitmix64(7, 1) & (2**63 - 1)


def splitmix64(seed: int, position: int) -> int:
    """As `emission.mix`, in Python's own numbers."""
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(st.integers(1, 5), st.integers(0, 31), st.integers(1, 60), st.booleans(), st.integers(0, limits.SEED.high))
@settings(max_examples=30)
def test_choices_have_all_of_their_parents_request_but_its_seed(
    count: int,
    start: int,
    prompt_tokens: int,
    has_token_ids: bool,  # noqa: FBT001
    seed: int,
) -> None:
    with small_engine() as engine:
        segment = engine.segment
        segment.tokens[:] = -5
        parent = slots_claim(segment.address, 1, start, count)
        request = {name: k for k, name in enumerate(REQUEST_FIELDS, 100)}
        request |= {"seed": seed, "prompt_tokens": prompt_tokens, "temperature": 0.25, "salt_b": -(2**63)}
        request |= {"flags": layout.FLAG_IGNORE_EOS | (layout.FLAG_TOKEN_IDS if has_token_ids else 0)}
        for name, value in request.items():
            segment.slots[parent][name] = value
        segment.tokens[parent, :prompt_tokens] = range(prompt_tokens)
        before = segment.slots.copy()
        slots_share_request(segment.address, parent)
        slot = int(segment.slots[parent]["next_choice"])
        choices = []
        while slot != layout.NO_SLOT:
            choices.append(slot)
            for name, value in request.items():
                assert segment.slots[slot][name] == (choice_seed(seed, len(choices)) if name == "seed" else value)
            prompt = list(range(prompt_tokens)) if has_token_ids else [-5] * prompt_tokens
            assert segment.tokens[slot].tolist() == prompt + [-5] * (segment.tokens.shape[1] - prompt_tokens)
            slot = int(segment.slots[slot]["next_choice"])
        assert len(choices) == count - 1
        for name in set(layout.SLOT.names or ()) - set(REQUEST_FIELDS):
            assert segment.slots[name].tolist() == before[name].tolist(), name
        others = [k for k in range(len(before)) if k not in choices]
        assert segment.slots[others].tolist() == before[others].tolist()


def test_too_many_choices_leave_every_slot_as_free_as_it_was() -> None:
    with small_engine(max_running_seqs=4, max_queued_requests=0) as engine:
        address, slots = engine.segment.address, engine.segment.slots
        assert slot_claim(address, 9, 2) == 2
        assert slots_claim(address, 1, 3, 4) == -1
        assert slots["owner"].tolist() == [0, 0, 9, 0]
        assert slots_claim(address, 1, 3, 3) == 0
        assert slots["next_choice"].tolist() == [1, 3, layout.NO_SLOT, layout.NO_SLOT]
        assert slots["owner"].tolist() == [1, 1, 9, 1]


def test_no_choice_is_put_beyond_the_usable_slots() -> None:
    with small_engine(max_running_seqs=6, max_queued_requests=0) as engine:
        address, slots = engine.segment.address, engine.segment.slots
        engine.segment.header["usable_slots"] = 3
        assert slots_claim(address, 1, 5, 2) >= 0
        assert slots_claim(address, 1, 5, 2) == -1
        assert slots_claim(address, 1, 5, 1) >= 0
        assert slots["owner"].tolist() == [1, 1, 1, 0, 0, 0]
        engine.segment.header["usable_slots"] = 0  # no scheduler has said yet
        assert slots_claim(address, 1, 0, 3) == 3


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
