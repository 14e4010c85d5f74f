"""Classes, ageing and displacement: who goes before whom, who gives way, and how long anybody can be kept waiting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.helpers import (
    RecordingBackend,
    ask,
    assert_all_given_back,
    assert_complete,
    available,
    ids,
    metric,
    plans,
    seniority,
    slots,
    table,
)
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

S = 1_000_000_000
HIGHEST, LOWEST = -8, 7

ROOMY = {"total_kv_blocks": 256, "max_batch_tokens": 256, "max_model_len": 256, "no_prefix_cache": True}
PLACES = 4

priorities = st.integers(HIGHEST, LOWEST)


def preemptions(engine: SmallEngine, stream: Stream) -> int:
    return int(engine.sequence(stream)["preemptions"])


def finish(engine: SmallEngine, worker: FakeWorker, *streams: Stream) -> None:
    engine.run(worker)
    assert_complete(*streams)
    assert_all_given_back(engine)


# ---------------------------------------------------------------------------------------------------- who makes way


@settings(max_examples=60)
@given(
    running=st.lists(priorities, min_size=PLACES, max_size=PLACES),
    arriving=st.lists(priorities, min_size=1, max_size=6),
    late=st.booleans(),
)
def test_places_go_to_the_most_senior_but_only_from_strictly_lower_classes(
    running: list[int], arriving: list[int], *, late: bool
) -> None:
    """Those who arrive may even have arrived before all who run: an equal class never gives way."""
    with small_engine(RecordingBackend, **ROOMY, max_running_seqs=PLACES) as engine:
        worker = engine.worker()
        holders = [worker.submit(2, 40, priority=p, arrival_ns=100 + k, seed=k) for k, p in enumerate(running)]
        engine.step()
        comers = [
            worker.submit(2, 40, priority=p, arrival_ns=(200 if late else 1) + k, seed=50 + k)
            for k, p in enumerate(arriving)
        ]
        # The model: the most senior waiting one takes the place of the least senior running one, if that is lower.
        places = {
            stream.slot: (p, 100 + k, stream.slot) for k, (stream, p) in enumerate(zip(holders, running, strict=True))
        }
        queue = sorted(
            (p, (200 if late else 1) + k, stream.slot)
            for k, (stream, p) in enumerate(zip(comers, arriving, strict=True))
        )
        displaced = 0
        for comer in queue:
            victim = max(places.values())
            if comer[0] >= victim[0]:
                break
            del places[victim[2]]
            places[comer[2]] = comer
            displaced += 1
        engine.step()
        assert engine.running() == [slot for _, _, slot in sorted(places.values())]
        assert metric(engine, "preemptions") == displaced
        everybody = [*holders, *comers]
        assert engine.waiting() == sorted(
            set(slots(everybody)) - places.keys(), key=lambda slot: seniority(engine, slot)
        )
        assert len(plans(engine)[-1].rows) == PLACES
        engine.step()
        assert metric(engine, "preemptions") == displaced  # and that was all
        finish(engine, worker, *everybody)


@settings(max_examples=60)
@given(held=st.lists(st.tuples(st.integers(1, 6), priorities), min_size=1, max_size=6), wanted=st.integers(1, 24))
def test_blocks_are_taken_from_the_least_senior_of_lower_classes_and_no_more_than_needed(
    held: list[tuple[int, int]], wanted: int
) -> None:
    """And from nobody when all of them together would not be enough."""
    pool = max(sum(blocks for blocks, _ in held) + 1, wanted)
    with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": pool})) as engine:
        worker = engine.worker()
        holders = [
            worker.submit(4 * blocks - 2, 2, priority=priority, arrival_ns=k, seed=k)
            for k, (blocks, priority) in enumerate(held)
        ]
        engine.step()
        assert [len(table(engine, stream)) for stream in holders] == [blocks for blocks, _ in held]
        missing = wanted - available(engine)
        victims: list[int] = []
        for slot in reversed(engine.running()):
            if missing <= 0:
                break
            if seniority(engine, slot)[0] <= 8:
                break
            victims.append(slot)
            missing -= int(engine.scheduler.arena.views["sequences"][slot]["block_count"])
        before = engine.running()
        comer = worker.submit(4 * wanted - 1, 1, priority=0, arrival_ns=50, seed=50)
        engine.step()
        if missing > 0:
            victims = []
        worker.collect()
        assert metric(engine, "preemptions") == len(victims)
        assert comer.is_over == (missing <= 0)
        assert {row.sequence for row in plans(engine)[-1].rows} >= set(before) - set(victims)
        finish(engine, worker, comer, *holders)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
@pytest.mark.parametrize("no_prefix_cache", [True, False])
@pytest.mark.parametrize("priority", [HIGHEST, 0, LOWEST])
def test_equals_over_a_pool_too_small_do_not_take_turns_at_each_others_expense(
    count: int, priority: int, *, no_prefix_cache: bool
) -> None:
    """Between two ends at most each junior is preempted, once: never more than count x (count - 1) / 2."""
    options = ROOMY | {"total_kv_blocks": 12, "no_prefix_cache": no_prefix_cache, "max_batch_tokens": 32}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams = [
            ask(worker, ids(6, 100 * k), 40, arrival_ns=k, seed=k, priority=priority) for k in range(1, count + 1)
        ]
        engine.run(worker)
        assert 0 < metric(engine, "preemptions") <= count * (count - 1) // 2
        assert_complete(*streams)
        assert_all_given_back(engine)


def test_the_least_senior_gives_way_whatever_its_class_when_growth_needs_a_block() -> None:
    """Growth looks at seniority, not at classes: the junior of the two, of one class or not, is preempted."""
    for priority in (0, LOWEST):
        with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": 4})) as engine:
            worker = engine.worker()
            senior = worker.submit(6, 10, arrival_ns=1, seed=1)
            junior = worker.submit(6, 10, arrival_ns=2, seed=2, priority=priority)
            engine.run(worker)
            assert_complete(senior, junior)
            assert metric(engine, "preemptions") == preemptions(engine, junior) == 1


def test_who_made_way_returns_to_its_old_place() -> None:
    with small_engine(RecordingBackend, **ROOMY, max_running_seqs=2) as engine:
        worker = engine.worker()
        first, second = (worker.submit(2, 9, priority=3, arrival_ns=k, seed=k) for k in (1, 2))
        engine.step()
        third = worker.submit(2, 9, priority=3, arrival_ns=3, seed=3)
        high = worker.submit(2, 3, priority=0, arrival_ns=4, seed=4)
        engine.step()
        assert engine.running() == [high.slot, first.slot]
        assert engine.waiting() == [second.slot, third.slot]
        finish(engine, worker, first, second, third, high)
        assert metric(engine, "preemptions") == 1


def test_what_was_made_free_is_not_taken_by_a_decode_or_by_another() -> None:
    """Way is made before the decodes; what the victim gave is still there at the admission of the same plan."""
    with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": 9})) as engine:
        worker = engine.worker()
        grower = worker.submit(7, 20, priority=HIGHEST, arrival_ns=1, seed=1)  # a third block at its second token
        victim = worker.submit(22, 2, priority=LOWEST, arrival_ns=2, seed=2)  # 6
        engine.step()
        assert available(engine) == 1
        high = worker.submit(23, 1, priority=0, arrival_ns=3, seed=3)  # 6
        engine.step()
        worker.collect()
        assert_complete(high)
        assert (preemptions(engine, victim), preemptions(engine, grower)) == (1, 0)
        finish(engine, worker, grower, victim)


# -------------------------------------------------------------------------------------------------------------- ageing


def engine_that_ages(**options: Any) -> Any:
    return small_engine(RecordingBackend, **(ROOMY | {"priority_aging_s": 1} | options))


@settings(max_examples=40)
@given(priority=priorities, elapsed_ns=st.integers(0, 20 * S), aging_s=st.integers(0, 3))
def test_class_falls_by_one_each_time(priority: int, elapsed_ns: int, aging_s: int) -> None:
    with engine_that_ages(priority_aging_s=aging_s, max_running_seqs=1) as engine:
        worker = engine.worker()
        arrival_ns = engine.clock.now_ns()
        holder = worker.submit(2, 9, priority=HIGHEST)
        waiting = worker.submit(2, 2, priority=priority, arrival_ns=arrival_ns, seed=1)
        engine.step()
        engine.clock.advance_ns(elapsed_ns)
        engine.step()
        fallen = elapsed_ns // (aging_s * S) if aging_s else 0
        assert seniority(engine, waiting.slot)[0] == max(0, priority + 8 - fallen)
        assert engine.waiting() == [waiting.slot]
        finish(engine, worker, holder, waiting)


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(priorities, st.integers(0, 15 * S)), min_size=2, max_size=10),
    at_ns=st.integers(15 * S, 40 * S),
)
def test_queue_is_in_the_order_of_the_aged_classes(requests: list[tuple[int, int]], at_ns: int) -> None:
    with engine_that_ages(max_running_seqs=1) as engine:
        worker = engine.worker()
        holder = worker.submit(2, 9, priority=HIGHEST)
        engine.step()
        engine.clock.set_ns(at_ns)
        streams = [
            worker.submit(2, 1, priority=p, arrival_ns=arrival, seed=k) for k, (p, arrival) in enumerate(requests)
        ]
        engine.step()
        keys = [
            (max(0, p + 8 - (at_ns - arrival) // S), arrival, stream.slot)
            for stream, (p, arrival) in zip(streams, requests, strict=True)
        ]
        assert engine.waiting() == [slot for _, _, slot in sorted(keys)]
        finish(engine, worker, holder, *streams)


@pytest.mark.parametrize("elapsed_s", [0, 3, 7, 20])
def test_running_ones_age_too_where_a_displacement_is_weighed(elapsed_s: int) -> None:
    """One of class 15 that arrived long ago is judged as if it had waited: only what is higher yet displaces it."""
    for priority in range(HIGHEST, LOWEST + 1):
        with engine_that_ages(max_running_seqs=1) as engine:
            worker = engine.worker()
            holder = worker.submit(2, 9, priority=LOWEST, arrival_ns=engine.clock.now_ns(), seed=1)
            engine.step()
            engine.clock.advance_ns(elapsed_s * S)
            comer = worker.submit(2, 9, priority=priority, arrival_ns=engine.clock.now_ns(), seed=2)
            engine.step()
            gives_way = priority + 8 < max(0, 15 - elapsed_s)
            assert engine.running() == [comer.slot if gives_way else holder.slot]
            finish(engine, worker, holder, comer)


@pytest.mark.parametrize("priority", [HIGHEST + 1, -3, 0, LOWEST])
@pytest.mark.parametrize("aging_s", [1, 2])
def test_nobody_starves_under_a_flood_of_the_highest_class(priority: int, aging_s: int) -> None:
    """Admitted by (class x ageing) and the drain of what runs then, and before all that came after that moment."""
    step_ns, tokens = S // 10, 5
    with engine_that_ages(priority_aging_s=aging_s, max_running_seqs=2, max_queued_requests=12) as engine:
        worker = engine.worker()
        engine.clock.set_ns(S)
        flood = [worker.submit(2, tokens, priority=HIGHEST, arrival_ns=S, seed=k) for k in range(4)]
        engine.step()
        poor = worker.submit(2, tokens, priority=priority, arrival_ns=S, seed=99)
        bound_ns = S + (priority + 8) * aging_s * S
        deadline_ns = bound_ns + (tokens + 1) * step_ns
        while not engine.running().count(poor.slot):
            assert engine.clock.now_ns() <= deadline_ns
            engine.clock.advance_ns(step_ns)
            while True:  # as many as the engine takes, at all times
                comer = worker.try_submit(
                    2, tokens, priority=HIGHEST, arrival_ns=engine.clock.now_ns(), seed=len(flood)
                )
                if comer is None:
                    break
                flood.append(comer)
            engine.step()
            worker.collect()
        assert bound_ns <= engine.clock.now_ns() <= deadline_ns
        assert not poor.is_over
        while not poor.is_over:
            engine.step()
            worker.collect()
        assert_complete(poor)
        assert metric(engine, "preemptions") == 0
        finish(engine, worker, *flood)


def test_without_ageing_the_lowest_class_waits_as_long_as_higher_ones_come() -> None:
    with engine_that_ages(priority_aging_s=0, max_running_seqs=1, max_queued_requests=6) as engine:
        worker = engine.worker()
        worker.submit(2, 3, priority=HIGHEST)
        engine.step()
        poor = worker.submit(2, 3, priority=LOWEST, seed=9)
        for _ in range(300):
            engine.clock.advance_ns(S)
            worker.try_submit(2, 3, priority=HIGHEST, arrival_ns=engine.clock.now_ns())
            engine.step()
            worker.collect()
            assert poor.slot not in engine.running()
        engine.run(worker)
        assert_complete(poor)


def test_aged_one_keeps_the_class_that_it_was_admitted_with() -> None:
    with engine_that_ages(max_running_seqs=1) as engine:
        worker = engine.worker()
        arrival_ns = engine.clock.now_ns()
        holder = worker.submit(2, 2, priority=HIGHEST, arrival_ns=arrival_ns)
        engine.step()
        old = worker.submit(2, 9, priority=LOWEST, arrival_ns=arrival_ns, seed=1)
        engine.clock.advance_ns(5 * S)
        engine.step()
        worker.collect()
        assert holder.is_over
        engine.step()
        assert engine.running() == [old.slot]
        assert seniority(engine, old.slot)[0] == 10
        engine.clock.advance_ns(5 * S)
        engine.step()
        assert seniority(engine, old.slot)[0] == 10
        finish(engine, worker, old)


# ----------------------------------------------------------------------------------------------- everything at one time


@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(priorities, st.integers(1, 20), st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=20
    ),
    pool=st.integers(10, 24),
    batch=st.sampled_from([4, 16]),
)
def test_all_of_any_classes_complete_over_a_small_pool(
    requests: list[tuple[int, int, int, int]], pool: int, batch: int
) -> None:
    options = {"total_kv_blocks": pool, "max_batch_tokens": batch, "max_running_seqs": 4, "priority_aging_s": 1}
    with small_engine(RecordingBackend, **options, mock_kv=True) as engine:
        worker = engine.worker()
        streams = []
        for k, (priority, prompt, max_new, steps) in enumerate(requests):
            arrival_ns = engine.clock.now_ns()
            streams.append(
                ask(worker, ids(prompt, 50 * (k % 3)), max_new, priority=priority, arrival_ns=arrival_ns, seed=k)
            )
            for _ in range(steps):
                engine.clock.advance_ns(S // 3)
                engine.step()
                worker.collect()
                running = engine.running()
                assert running == sorted(running, key=lambda slot: seniority(engine, slot))
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)
