"""Drain and rebuild against what the slots say: whatever mixture of lives a segment holds, each gets what is due."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.base import BatchPlan
from ironbatch.kernels.intake import drain
from ironbatch.kernels.lanes import lane_push
from ironbatch.kernels.recovery import end_one, end_plan, preempt_all
from ironbatch.kernels.slots import slot_claim
from ironbatch.limits import PRIORITY_MAX, PRIORITY_MIN
from tests.support import FakeWorker, ScriptedBackend, SmallEngine, small_engine

LIVE_LANE, DEAD_LANE, LOST_LANE = 0, 1, 2
GENERATION = 5


@dataclass(frozen=True)
class Life:
    """One slot's state when a scheduler starts."""

    lane: int
    progress: str
    is_cancelled: bool
    produced: int
    priority: int
    arrival_ns: int


LIVES = st.builds(
    Life,
    lane=st.sampled_from([LIVE_LANE, LIVE_LANE, LIVE_LANE, DEAD_LANE, LOST_LANE]),
    progress=st.sampled_from(["free", "claimed", "submitted", "live", "live", "finished", "invalid"]),
    is_cancelled=st.booleans(),
    produced=st.integers(0, 4),
    priority=st.integers(PRIORITY_MIN - 3, PRIORITY_MAX + 3),
    arrival_ns=st.integers(0, 4),
)


def write(engine: SmallEngine, slot: int, life: Life) -> None:
    """Put a slot into that state, as worker and scheduler would have left it."""
    if life.progress == "free":
        return
    row = engine.segment.slots[slot]
    assert slot_claim(engine.segment.address, (GENERATION << layout.OWNER_LANE_BITS) | (life.lane + 1), slot) == slot
    generation = int(row["generation"])
    row["prompt_tokens"], row["max_new_tokens"] = (60, 60) if life.progress == "invalid" else (7, 5)
    row["priority"], row["arrival_ns"] = life.priority, life.arrival_ns
    if life.progress == "claimed":
        return
    row["submitted"] = generation
    row["cancelled"] = generation if life.is_cancelled else 0
    reason = layout.FINISH_LENGTH if life.progress == "finished" else layout.FINISH_NONE
    if life.progress in ("live", "finished"):
        row["published"] = (generation << 32) | (reason << 24) | life.produced


def due(life: Life, *, resumable: bool) -> tuple[str, int, int]:
    """What a rebuild has to make of it: what becomes of the slot, and the reason and error that it then shows."""
    if life.progress == "free" or life.lane != LIVE_LANE:
        return "free", 0, 0
    if life.progress in ("claimed", "finished"):
        return "left", 0, 0
    produced = life.produced if life.progress == "live" else 0
    if life.is_cancelled:
        return "ended", layout.FINISH_CANCELLED, 0
    if produced and not resumable:
        return "ended", layout.FINISH_ERROR, layout.ERROR_LOST
    if life.progress == "invalid":
        return "ended", layout.FINISH_ERROR, layout.ERROR_INVALID
    return "queued", 0, 0


@given(lives=st.lists(LIVES, min_size=1, max_size=12), resumable=st.booleans())
@settings(max_examples=150)
def test_rebuild_gives_each_slot_its_due(lives: list[Life], *, resumable: bool) -> None:
    with small_engine(ScriptedBackend, max_queued_requests=4) as engine:
        engine.segment.lanes["generation"] = GENERATION
        engine.segment.lanes[DEAD_LANE]["dead_generation"] = GENERATION
        engine.segment.lanes[LOST_LANE]["generation"] = GENERATION + 1  # the lane has a new holder
        for slot, life in enumerate(lives):
            write(engine, slot, life)
        queued = sorted(
            (min(max(life.priority, PRIORITY_MIN), PRIORITY_MAX), life.arrival_ns, slot)
            for slot, life in enumerate(lives)
            if due(life, resumable=resumable)[0] == "queued"
        )
        ScriptedBackend.resumable = resumable
        try:
            assert engine.start_scheduler() == len(queued)
        finally:
            ScriptedBackend.resumable = True
        engine.check()
        assert engine.waiting() == [slot for _, _, slot in queued]
        for slot, life in enumerate(lives):
            fate, reason, error = due(life, resumable=resumable)
            row = engine.segment.slots[slot]
            assert (row["owner"] == 0) == (fate == "free")
            if fate == "ended":
                produced = life.produced if life.progress == "live" else 0
                assert row["published"] == (int(row["generation"]) << 32) | (reason << 24) | produced
                assert row["error_code"] == error
            elif fate == "queued":
                record = engine.scheduler.arena.views["sequences"][slot]
                produced = life.produced if life.progress == "live" else 0
                assert (record["prompt_tokens"], record["produced_tokens"]) == (7, produced)
                assert (record["computed_tokens"], record["block_count"]) == (0, 0)


def submit_many(worker: FakeWorker, count: int) -> list[int]:
    return [worker.submit(3, 4, arrival_ns=k).slot for k in range(count)]


def test_drain_takes_in_all_lanes_and_beats_the_heart() -> None:
    with small_engine(ScriptedBackend) as engine:
        first, second = engine.worker(0), engine.worker(3)
        slots = submit_many(first, 3) + submit_many(second, 3)
        addresses = (engine.scheduler.arena.address, engine.segment.address)
        assert drain(*addresses, 77) == 6
        assert engine.segment.header["heartbeat_ns"] == 77
        assert engine.waiting() == sorted(slots, key=lambda slot: (engine.segment.slots[slot]["arrival_ns"], slot))
        assert (engine.segment.lanes["head"] == engine.segment.lanes["tail"]).all()
        assert drain(*addresses, 78) == 6  # nothing new


def test_hint_that_is_held_already_changes_nothing() -> None:
    with small_engine(ScriptedBackend) as engine:
        worker = engine.worker()
        stream = worker.submit(3, 4)
        engine.step()
        produced = engine.sequence(stream)["produced_tokens"]
        lane_push(engine.segment.address, 0, stream.slot, stream.generation)  # as a rebuild's lane still holds it
        engine.step()
        assert engine.sequence(stream)["produced_tokens"] == produced + 1
        engine.run(worker)
        lane_push(engine.segment.address, 0, stream.slot, stream.generation)  # it has ended and its slot is free
        assert engine.step() == 0
        assert stream.token_ids == [1] * 4
        engine.assert_nothing_held()


def test_hint_of_a_finished_sequence_that_is_not_collected_changes_nothing() -> None:
    with small_engine(ScriptedBackend) as engine:
        worker = engine.worker()
        stream = worker.submit(3, 2)
        engine.step()
        engine.step()
        worker.cancel(stream)  # too late
        assert engine.step() == 0
        worker.collect()
        assert (stream.reason, stream.token_ids) == (layout.FINISH_LENGTH, [1, 1])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_frees_the_blocks_in_the_very_next_step(steps: int) -> None:
    """Before it is drained, while it runs its first step, and later; and while it waits,."""
    with small_engine(ScriptedBackend, max_running_seqs=1) as engine:
        worker = engine.worker()
        running, waiting = worker.submit(3, 9, arrival_ns=1), worker.submit(3, 9, arrival_ns=2)
        for _ in range(steps):
            engine.step()
        worker.cancel(running)
        worker.cancel(waiting)
        assert engine.step() == 0
        worker.collect()
        assert (running.reason, running.token_ids) == (layout.FINISH_CANCELLED, [1] * steps)
        assert (waiting.reason, waiting.token_ids) == (layout.FINISH_CANCELLED, [])
        assert engine.segment.metrics[0]["sequences_aborted"] == 2
        engine.assert_nothing_held()


def test_values_outside_the_limits_end_with_an_error_and_harm_nobody() -> None:
    with small_engine(ScriptedBackend) as engine:
        worker = engine.worker()
        limit = engine.config.max_request_tokens
        bad = [worker.submit(*sizes) for sizes in ((0, 1), (1, 0), (-5, 3), (limit, 1), (2**40, 2**40))]
        good = worker.submit(limit - 1, 1)
        engine.run(worker)
        assert {(stream.reason, stream.error_code) for stream in bad} == {(layout.FINISH_ERROR, layout.ERROR_INVALID)}
        assert good.reason == layout.FINISH_LENGTH
        assert engine.segment.metrics[0]["sequences_failed"] == len(bad)


@pytest.mark.parametrize("steps", [0, 2])
def test_dead_worker_loses_its_own_and_nobody_elses(steps: int) -> None:
    with small_engine(max_running_seqs=3) as engine:
        dying, living = engine.worker(0), engine.worker(1)
        for k in range(5):
            dying.submit(3, 9, arrival_ns=10 * k)
        streams = [living.submit(3, 9, arrival_ns=10 * k + 5, seed=k) for k in range(3)]
        unsubmitted = slot_claim(engine.segment.address, dying.owner, 0)
        other_generation = slot_claim(engine.segment.address, dying.owner + (1 << layout.OWNER_LANE_BITS), 0)
        for _ in range(steps):
            engine.step()
        dying.die()
        engine.step()
        owners = engine.segment.slots["owner"]
        assert not (owners == dying.owner).any()
        assert owners[unsubmitted] == 0
        assert owners[other_generation] != 0
        assert engine.segment.lanes[0]["reaped_generation"] == dying.generation
        engine.run(living)
        assert all(stream.token_ids == stream.expected_token_ids(9) for stream in streams)
        assert engine.gauge("free_count") == engine.config.total_kv_blocks


@pytest.mark.parametrize("n", [1, 3])
def test_who_had_cancelled_before_the_workers_death_is_not_lost_as_well(n: int) -> None:
    """The worker has counted it already, whether or not the scheduler has seen it before."""
    with small_engine() as engine:
        worker = engine.worker()
        seen, unseen, _ = (worker.submit_group(4, 9, n) for _ in range(3))
        engine.step()
        for stream in seen:
            worker.cancel(stream)
        engine.step()
        for stream in unseen:
            worker.cancel(stream)
        worker.die()
        engine.run()
        metrics = engine.segment.metrics[0]
        assert metrics["requests_lost"] == 1
        assert metrics["sequences_aborted"] == 3 * n
        engine.assert_nothing_held()


@pytest.mark.parametrize("ended", [0, 1, 2])
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("has_restarted", [False, True])
def test_request_is_lost_once_though_one_of_its_choices_has_ended(
    ended: int, *, is_taken: bool, has_restarted: bool
) -> None:
    """The choices' links lead through the slot of that one, which is free, or somebody else's by now."""
    with small_engine(ScriptedBackend) as engine:
        dying, living = engine.worker(0), engine.worker(1)
        group = dying.submit_group(3, 9, 3)
        sequence = group[ended].slot

        def script(plan: BatchPlan) -> None:
            plan.output.finish_reasons[: len(plan)][plan.rows["sequence"] == sequence] = layout.FINISH_STOP

        engine.step()
        engine.backend.script = script  # type: ignore[attr-defined]
        while not group[ended].is_over:
            engine.step()
            dying.collect()
        del engine.backend.script  # type: ignore[attr-defined]
        if is_taken:
            assert living.submit(3, 2).slot == sequence
        dying.die()
        if has_restarted:
            engine.scheduler.close()
            engine.start_scheduler()
        engine.run(living)
        assert engine.segment.metrics[0]["requests_lost"] == 1
        engine.assert_nothing_held()


def test_hints_of_a_dead_worker_do_not_touch_the_slots_next_owner() -> None:
    with small_engine() as engine:
        dying, living = engine.worker(0), engine.worker(1)
        old = dying.submit(3, 9)
        dying.die()
        engine.segment.slots[old.slot]["owner"] = 0  # as if it had been reaped by a scheduler that then died
        new = living.submit(3, 4, seed=5)
        assert new.slot == old.slot
        engine.run(living)
        assert new.token_ids == new.expected_token_ids(4)
        assert engine.segment.metrics[0]["sequences_aborted"] == 0


def planned(engine: SmallEngine, worker: FakeWorker) -> tuple[int, int]:
    """Three sequences in a plan that is not executed, a fourth which waits. Returns the addresses."""
    for k in range(4):
        worker.submit(3, 4, arrival_ns=k)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.segment.header["in_device_call"] == 1
    return engine.scheduler.arena.address, engine.segment.address


def interrupt(plan: object) -> None:
    raise KeyboardInterrupt


def test_end_plan_ends_the_plans_sequences_alone() -> None:
    with small_engine(ScriptedBackend, max_running_seqs=3) as engine:
        engine.backend.script = interrupt
        worker = engine.worker()
        addresses = planned(engine, worker)
        assert end_plan(*addresses, layout.ERROR_BACKEND) == 3
        engine.check()
        assert engine.segment.header["in_device_call"] == 0
        assert end_plan(*addresses, layout.ERROR_BACKEND) == 0  # once
        assert {stream.error_code for stream in worker.collect()} == {layout.ERROR_BACKEND}
        assert len(engine.waiting()) == 1
        assert engine.segment.metrics[0]["sequences_failed"] == 3


def test_end_one_ends_it_once_wherever_it_is() -> None:
    with small_engine(ScriptedBackend, max_running_seqs=3) as engine:
        engine.backend.script = interrupt
        worker = engine.worker()
        addresses = planned(engine, worker)
        for sequence in (engine.running()[1], engine.waiting()[0]):
            assert end_one(*addresses, sequence, layout.ERROR_REQUEST) == 1
            assert end_one(*addresses, sequence, layout.ERROR_REQUEST) == 0
            engine.check()
        assert (len(engine.running()), len(engine.waiting())) == (2, 0)
        assert {stream.error_code for stream in worker.collect()} == {layout.ERROR_REQUEST}


def test_preempt_all_returns_everybody_to_their_places() -> None:
    with small_engine(ScriptedBackend, max_running_seqs=3) as engine:
        engine.backend.script = interrupt
        worker = engine.worker()
        addresses = planned(engine, worker)
        order = engine.running() + engine.waiting()
        assert preempt_all(*addresses, 1) == 3
        engine.check()
        assert engine.waiting() == order
        assert engine.gauge("free_count") == engine.config.total_kv_blocks


@given(arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=20), priorities=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rebuild_queues_by_seniority_whatever_the_slots_order(arrivals: list[int], priorities: Random) -> None:
    with small_engine() as engine:
        worker = engine.worker()
        ranks = [priorities.choice((-8, 0, 7)) for _ in arrivals]
        for arrival_ns, priority in zip(arrivals, ranks, strict=True):
            worker.submit(2, 2, arrival_ns=arrival_ns, priority=priority)
        engine.scheduler.close()
        engine.start_scheduler()
        engine.check()
        assert engine.waiting() == sorted(range(len(arrivals)), key=lambda slot: (ranks[slot], arrivals[slot], slot))
