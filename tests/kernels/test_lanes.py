"""Lanes against a deque, and who is to ring whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ironbatch import layout
from ironbatch.kernels.lanes import (
    arm_scheduler,
    disarm_scheduler,
    lane_drain,
    lane_push,
    mark_lane_dead,
    ring_needed,
)
from ironbatch.shm.segment import Segment
from tests import oracle
from tests.support import SmallEngine, machine_settings, small_config, small_engine

LARGEST = 2**62


class LaneMachine(RuleBasedStateMachine):
    """Two lanes of one segment, so that one which writes into the other's entries is found out."""

    @initialize(start=st.sampled_from([0, 1, 7, 2**31 - 3, 2**32 - 5, LARGEST]))
    def start(self, start: int) -> None:
        self.segment = Segment.create(small_config(max_running_seqs=1, max_queued_requests=1), 0)
        self.capacity = int(self.segment.header["lane_entries"])
        self.lanes = [oracle.Lane(self.capacity) for _ in range(2)]
        self.segment.lanes["head"] = start  # as after so many entries
        self.segment.lanes["tail"] = start
        self.out = np.zeros(2 * self.capacity, np.int64)

    @rule(lane=st.integers(0, 1), slot=st.integers(0, LARGEST), generation=st.integers(0, LARGEST))
    def push(self, lane: int, slot: int, generation: int) -> None:
        expected = 0 if self.lanes[lane].push(slot, generation) else -1
        assert lane_push(self.segment.address, lane, slot, generation) == expected

    @rule(lane=st.integers(0, 1), limit=st.integers(0, 10))
    def drain(self, lane: int, limit: int) -> None:
        expected = self.lanes[lane].drain(min(limit, self.capacity))
        count = lane_drain(self.segment.address, lane, self.out, limit)
        assert list(map(tuple, self.out.reshape(-1, 2)[:count].tolist())) == expected

    @invariant()
    def lengths_agree(self) -> None:
        rows = self.segment.lanes
        assert (rows["tail"] - rows["head"]).tolist() == [*(len(lane.entries) for lane in self.lanes), 0, 0]

    @rule()
    def scheduler_sleeps_only_if_all_are_empty(self) -> None:
        empty = not any(lane.entries for lane in self.lanes)
        assert arm_scheduler(self.segment.address) == empty
        assert disarm_scheduler(self.segment.address) == empty

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            self.segment.close()


LaneMachine.TestCase.settings = machine_settings(max_examples=60, stateful_step_count=50)
TestLane = LaneMachine.TestCase


def test_full_lane_refuses_and_keeps_what_it_has() -> None:
    with small_engine() as engine:
        capacity = int(engine.segment.header["lane_entries"])
        address = engine.segment.address
        assert [lane_push(address, 1, k, 1) for k in range(capacity)] == [0] * capacity
        assert lane_push(address, 1, 99, 99) == -1
        out = np.zeros(2 * capacity, np.int64)
        assert lane_drain(address, 1, out, capacity) == capacity
        assert out.reshape(-1, 2).tolist() == [[k, 1] for k in range(capacity)]


def test_lane_holds_more_than_all_slots_can_push() -> None:
    for slots in (1, 2, 3, 32, 768, 1000):
        entries = layout.lane_entries(slots)
        assert entries & (entries - 1) == 0
        assert layout.LANE_ENTRIES_PER_SLOT * slots <= entries < 2 * layout.LANE_ENTRIES_PER_SLOT * slots


def push(engine: SmallEngine) -> int:
    return int(lane_push(engine.segment.address, 0, 0, 1))


def die(engine: SmallEngine) -> int:
    return int(mark_lane_dead(engine.segment.address, 2, 1))


def ask(engine: SmallEngine) -> int:
    return int(ring_needed(engine.segment.address))


@pytest.mark.parametrize("action", [push, die, ask])
def test_only_the_first_to_have_news_for_a_sleeper_rings(action: object) -> None:
    with small_engine() as engine:
        assert action(engine) == 0  # it is awake
        engine.scheduler.step()
        assert arm_scheduler(engine.segment.address) == 1
        assert [action(engine) for _ in range(3)] == [1, 0, 0]
        assert disarm_scheduler(engine.segment.address) == 0  # somebody has rung


def test_disarming_tells_that_nobody_has_rung() -> None:
    with small_engine() as engine:
        assert arm_scheduler(engine.segment.address) == 1
        assert disarm_scheduler(engine.segment.address) == 1
        assert push(engine) == 0  # nobody is called who is awake


@pytest.mark.parametrize("action", [push, die])
def test_scheduler_does_not_fall_asleep_over_work(action: object) -> None:
    with small_engine() as engine:
        action(engine)
        assert arm_scheduler(engine.segment.address) == 0
        assert engine.segment.header["scheduler_sleeping"] == 0
        engine.scheduler.step()  # it takes in the hint, or reaps the lane
        assert arm_scheduler(engine.segment.address) == 1
