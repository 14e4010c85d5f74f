"""The book of lanes, with a real scheduler to reap those whose holders have died."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch import layout
from ironbatch.kernels.lanes import arm_scheduler
from ironbatch.kernels.slots import slot_claim
from ironbatch.shm.engine import Engine
from ironbatch.shm.wakeup import Doorbell
from ironbatch.web.lanes import LaneBook, LaneHolder
from tests.support import FakeWorker, SmallEngine, small_config, small_engine


@dataclass(eq=False)
class Process:
    """A worker as gunicorn keeps it: its pid is only a number once it was forked."""

    pid: int | str = "[booting]"


def a_book(small: SmallEngine) -> tuple[LaneBook, Doorbell]:
    bell = Doorbell.create()
    return LaneBook(Engine(small.segment, bell, small.bells)), bell


def test_lanes_are_given_out_one_by_one_and_then_none() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        living: dict[int, Process] = {}
        for lane in range(small.config.num_lanes):
            process = Process()
            assert book.assign(process, living) == LaneHolder(lane, 1)
            process.pid = 100 + lane
            living[100 + lane] = process
        assert book.assign(Process(), living) is None
        assert book.assign(Process(), living) is None, "and asking has changed nothing"
        assert small.segment.lanes["generation"].tolist() == [1] * small.config.num_lanes
        bell.close()


def test_a_lane_comes_back_only_after_the_scheduler_has_reaped_it() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        holders = [Process(pid) for pid in range(small.config.num_lanes)]
        living = {int(holder.pid): holder for holder in holders}
        assigned = [book.assign(holder, living) for holder in holders]
        assert None not in assigned
        lost = FakeWorker(small.segment, 2)
        lost.submit(3, 9)
        small.step()
        book.release(living.pop(2))
        assert book.assign(Process(), living) is None, "dead, and its slot is still held"
        small.step()
        assert book.assign(Process(), living) == LaneHolder(2, 2)
        assert not small.segment.slots["owner"].any()
        bell.close()


def test_a_death_that_nobody_noticed_is_found_at_the_next_fork() -> None:
    """The hook `child_exit` is skipped when a kill of gunicorn's own finds the process gone."""
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        first = Process()
        book.assign(first, {})
        first.pid = 7
        assert book.assign(Process(8), {8: None}) == LaneHolder(1, 1)
        assert small.segment.lanes[0]["dead_generation"] == 1
        small.step()
        assert book.assign(Process(9), {8: None, 9: None}) == LaneHolder(0, 2)
        bell.close()


def test_a_worker_that_lives_keeps_its_lane() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        first = Process(7)
        book.assign(first, {7: first})
        second = Process(8)
        book.assign(second, {7: first, 8: second})
        small.step()
        assert small.segment.lanes["dead_generation"].tolist() == [0] * small.config.num_lanes
        bell.close()


def test_a_death_rings_a_scheduler_that_sleeps_once() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        process = Process(7)
        book.assign(process, {7: process})
        assert arm_scheduler(small.segment.address) == 1
        book.release(process)
        assert bell.wait(0)
        small.step()
        assert arm_scheduler(small.segment.address) == 1
        book.release(process)
        assert not bell.wait(0), "a second notice of the same death says nothing"
        assert small.segment.lanes[0]["dead_generation"] == 1
        bell.close()


def test_a_second_notice_does_not_hide_the_death_of_the_next_holder() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        first, second = Process(7), Process(8)
        book.assign(first, {7: first})
        book.release(first)
        small.step()
        assert book.assign(second, {8: second}) == LaneHolder(0, 2)
        book.release(second)
        book.release(first)
        small.step()
        assert small.segment.lanes[0]["reaped_generation"] == 2
        bell.close()


def test_a_worker_without_a_lane_dies_without_a_trace() -> None:
    with small_engine(workers=1) as small:
        book, bell = a_book(small)
        book.release(Process(5))
        assert small.segment.lanes["dead_generation"].tolist() == [0] * small.config.num_lanes
        bell.close()


class LaneBookMachine(RuleBasedStateMachine):
    """Workers that are forked, die noticed or unnoticed, and a scheduler that reaps when it comes to it."""

    @initialize()
    def start(self) -> None:
        self.context = small_engine(max_queued_requests=56, total_kv_blocks=64)
        self.small = self.context.__enter__()
        self.book, self.bell = a_book(self.small)
        self.next_pid = 1
        self.living: dict[int, Process] = {}
        self.held: dict[Process, LaneHolder] = {}  # by the living and by those whose death was not noticed
        self.dead: set[LaneHolder] = set()  # marked, not reaped
        self.generations = [0] * self.small.config.num_lanes

    @property
    def free(self) -> list[int]:
        taken = {holder.lane for holder in (*self.held.values(), *self.dead)}
        return [lane for lane in range(self.small.config.num_lanes) if lane not in taken]

    @rule(submits=st.integers(0, 2))
    def fork(self, submits: int) -> None:
        for process in [found for found in self.held if found.pid not in self.living]:
            self.dead.add(self.held.pop(process))  # noticed now
        free = self.free
        process = Process()
        holder = self.book.assign(process, self.living)
        process.pid = self.next_pid
        self.next_pid += 1
        self.living[process.pid] = process
        if not free:
            assert holder is None
            return
        assert holder is not None
        assert holder.lane in free
        self.generations[holder.lane] += 1
        assert holder.generation == self.generations[holder.lane]
        owners = self.small.segment.slots["owner"] & layout.OWNER_LANE_MASK
        assert holder.lane + 1 not in owners.tolist(), "a slot still names the last holder of this lane"
        self.held[process] = holder
        worker = FakeWorker(self.small.segment, *holder)
        for _ in range(submits):
            worker.try_submit(2, 6)
        slot_claim(self.small.segment.address, worker.owner, 0)  # and dies before it has submitted this one

    @precondition(lambda self: self.living)
    @rule(data=st.data(), is_noticed=st.booleans())
    def die(self, data: st.DataObject, *, is_noticed: bool) -> None:
        process = self.living.pop(data.draw(st.sampled_from(sorted(self.living))))
        if is_noticed:
            self.book.release(process)
            if process in self.held:
                self.dead.add(self.held.pop(process))

    @rule()
    def step(self) -> None:
        self.small.step()
        self.dead.clear()

    @invariant()
    def no_lane_has_two_holders(self) -> None:
        if not hasattr(self, "held"):
            return
        lanes = [holder.lane for holder in (*self.held.values(), *self.dead)]
        assert len(lanes) == len(set(lanes))
        assert self.small.segment.lanes["generation"].tolist() == self.generations
        for holder in self.held.values():
            record = self.small.segment.lanes[holder.lane]
            assert record["dead_generation"] < holder.generation
            assert record["reaped_generation"] == holder.generation - 1

    def teardown(self) -> None:
        if not hasattr(self, "small"):
            return
        for process in list(self.held):
            self.book.release(process)
        self.small.run()
        self.small.assert_nothing_held()
        self.bell.close()
        self.context.__exit__(None, None, None)


TestLaneBook = LaneBookMachine.TestCase
TestLaneBook.settings = settings(max_examples=40, stateful_step_count=30)


def test_lanes_suffice_for_a_reload_and_two_that_are_not_reaped_yet() -> None:
    config = small_config(workers=3)
    assert config.num_lanes == 2 * 3 + 2
