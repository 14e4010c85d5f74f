"""How schedulers like this one have failed before, case by case, each with the right behaviour."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends import mock
from ironbatch.backends.base import BatchPlan
from ironbatch.errors import BackendLost
from ironbatch.kernels.lanes import arm_scheduler, disarm_scheduler
from tests.scheduler.helpers import (
    RecordingBackend,
    ask,
    assert_all_given_back,
    assert_backed,
    assert_complete,
    available,
    changed,
    complete,
    cover,
    ids,
    leak_free_blocks,
    lend_table,
    metric,
    plans,
    reason,
    recording,
    seniority,
    slots,
    snapshot,
)
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

LOWEST, HIGHEST = 7, -8  # priorities


def lose(plan: BatchPlan) -> None:
    raise BackendLost("unplugged")


# ------------------------------------------------------------------------------ blocks before the tokens that fill them


@settings(max_examples=25)
@given(
    prompt=st.integers(1, 70),
    max_new=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    batch=st.integers(1, 40),
)
@example(prompt=31, max_new=20, block_size=16, batch=64)
@example(prompt=32, max_new=20, block_size=16, batch=64)
def test_every_context_is_backed_after_every_step(prompt: int, max_new: int, block_size: int, batch: int) -> None:
    """A prompt of 31 in blocks of 16: the second token after it is the first that has no place in its two blocks."""
    options = {"kv_block_size": block_size, "total_kv_blocks": 256, "max_batch_tokens": batch, "max_model_len": 128}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        stream = ask(worker, ids(prompt), max_new)
        while engine.step():
            assert_backed(engine)
            worker.collect()
        worker.collect()
        assert_complete(stream)
        for row in (row for plan in plans(engine) for row in plan.rows):
            # What the row emits has its place already, if there is a position for it.
            reach = min(row.context + 1, prompt + max_new) if row.emits else row.context
            assert len(row.blocks) * block_size >= reach
        assert_all_given_back(engine)


# -------------------------------------------------------------------------------------------- waiting for a running one


@pytest.mark.parametrize("batch", [2, 3, 4, 64])
@pytest.mark.parametrize("no_prefix_cache", [False, True])
def test_who_needs_more_than_is_left_waits_and_evicts_nobody(batch: int, *, no_prefix_cache: bool) -> None:
    """A pool of 10 blocks of which A holds 6; B needs 7, and its prompt would be computed in chunks."""
    options = {"total_kv_blocks": 10, "max_batch_tokens": batch, "no_prefix_cache": no_prefix_cache}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        a = ask(worker, ids(20), 4, arrival_ns=1, seed=1)  # 24 positions: 6 blocks of 4
        engine.step()
        b = ask(worker, ids(24, 5_000), 4, arrival_ns=2, seed=2)  # 25 at its first token: 7 blocks
        while not a.is_over:
            assert engine.running() == [a.slot]
            engine.step()
            worker.collect()
            assert a.is_over or engine.waiting() == [b.slot]
        engine.run(worker)
        assert_complete(a, b)
        assert metric(engine, "preemptions") == 0
        assert all(plan.row_of(a) is None or plan.row_of(b) is None for plan in plans(engine))
        assert_all_given_back(engine)


# ------------------------------------------------------------------------------------------- victims that free nothing


def growing_pool(engine: SmallEngine, juniors: int) -> tuple[FakeWorker, Stream, Stream, list[Stream]]:
    """One step before the requester needs its second block of 8, with none left: sharer, requester, juniors."""
    worker = engine.worker()
    sharer = worker.submit(1, 7, arrival_ns=1, seed=1)
    requester = worker.submit(6, 10, arrival_ns=2, seed=2)
    others = [worker.submit(1, 7, arrival_ns=3 + k, seed=3 + k) for k in range(juniors)]
    engine.step()
    engine.step()
    assert available(engine) == 0
    assert engine.running() == [sharer.slot, requester.slot, *slots(others)]
    return worker, sharer, requester, others


@pytest.mark.parametrize("juniors", [1, 2, 3, 5])
def test_growth_stops_at_a_victim_that_frees_nothing(juniors: int) -> None:
    """Preempting on, past a victim whose blocks are all shared, would empty the running set for nothing."""
    options = {"total_kv_blocks": 2 + juniors, "kv_block_size": 8, "audit_every": 0, "max_running_seqs": 7}
    with small_engine(RecordingBackend, **options) as engine:
        worker, sharer, requester, others = growing_pool(engine, juniors)
        lend_table(engine, others[-1], sharer)
        engine.scheduler.step()
        assert engine.gauge("preempted_count") == 1
        assert engine.running() == [sharer.slot, *slots(others)]
        assert engine.waiting() == [requester.slot]
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert_complete(sharer, requester, *others)
        assert_all_given_back(engine)


@pytest.mark.parametrize("juniors", [2, 3, 5])
def test_growth_takes_the_least_senior_alone_when_that_is_enough(juniors: int) -> None:
    options = {"total_kv_blocks": 2 + juniors, "kv_block_size": 8, "audit_every": 0, "max_running_seqs": 7}
    with small_engine(RecordingBackend, **options) as engine:
        worker, sharer, requester, others = growing_pool(engine, juniors)
        lend_table(engine, others[0], sharer)  # its turn would come last
        engine.scheduler.step()
        assert engine.gauge("preempted_count") == 1
        assert engine.running() == [sharer.slot, requester.slot, *slots(others[:-1])]
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert_complete(sharer, requester, *others)
        assert_all_given_back(engine)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_nobody_is_preempted_for_a_higher_class_when_a_victim_frees_nothing(shared: int) -> None:
    """Three juniors of a block each; a senior class needs three. The count ends at the one whose block is shared."""
    options = {"total_kv_blocks": 4, "kv_block_size": 8, "audit_every": 0}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        sharer = worker.submit(1, 7, priority=HIGHEST, seed=1)
        juniors = [worker.submit(1, 7, priority=LOWEST, arrival_ns=2 + k, seed=2 + k) for k in range(3)]
        engine.step()
        assert available(engine) == 0
        lend_table(engine, juniors[shared], sharer)
        high = worker.submit(20, 4, priority=0, arrival_ns=9, seed=9)
        engine.scheduler.step()
        assert engine.running() == [sharer.slot, *slots(juniors)]
        assert engine.waiting() == [high.slot]
        assert metric(engine, "preemptions") == 0
        assert reason(engine) == "blocks"
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert metric(engine, "preemptions") == 0
        assert_complete(sharer, high, *juniors)


# ---------------------------------------------------------------------------------- a failed admission changes nothing

Scene = Callable[[SmallEngine, FakeWorker], Callable[[], Stream]]


def lacks_blocks(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    ask(worker, ids(40), 8)  # 11 of 12
    return lambda: ask(worker, ids(30, 5_000), 8, arrival_ns=5)


def lacks_one_block_beside_its_hits(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    """Its prefix is found, in blocks that are evictable, which are then not available to it."""
    complete(engine, worker, ids(16, 5_000))  # 4 evictable blocks, of 12
    ask(worker, ids(16), 4)  # 5 held: 3 are free
    return lambda: ask(worker, ids(31, 5_000), 8, arrival_ns=5)  # 8, of which 4 are found


def lacks_a_place(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    complete(engine, worker, ids(8, 5_000))
    for k in range(4):
        ask(worker, ids(3, 100 * k), 20, seed=k)
    return lambda: ask(worker, ids(8, 5_000), 2, arrival_ns=5)


def lacks_victims(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    """A higher class, for which those below it would not free enough."""
    complete(engine, worker, ids(8, 5_000))
    ask(worker, ids(28), 9, priority=HIGHEST)
    ask(worker, ids(4, 300), 9, priority=LOWEST)
    return lambda: ask(worker, ids(40, 5_000), 2, priority=0, arrival_ns=5)


def group_lacks_a_place(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    complete(engine, worker, ids(8, 5_000))
    ask(worker, ids(3), 20)
    ask(worker, ids(3, 300), 20)
    return lambda: worker.submit_group(9, 4, 3, prompt_token_ids=ids(9, 5_000), arrival_ns=5)[0]


def group_lacks_a_block(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    """Parent 5, and 1 for each of two forks: 7 blocks, of which 2 are found; 4 are left for it beside these."""
    complete(engine, worker, ids(8, 5_000))  # 2 evictable
    ask(worker, ids(20), 4)  # 6 held of 12
    return lambda: worker.submit_group(19, 1, 3, prompt_token_ids=[*ids(8, 5_000), *ids(11)], arrival_ns=5)[0]


def device_is_full(engine: SmallEngine, worker: FakeWorker) -> Callable[[], Stream]:
    complete(engine, worker, ids(8, 5_000))
    ask(worker, ids(20), 20)  # 40 alone; two rows x 40 are over the device's 64
    return lambda: ask(worker, ids(8, 5_000), 2, arrival_ns=5)


SCENES: dict[str, tuple[Scene, dict[str, int], str]] = {
    "blocks": (lacks_blocks, {}, "blocks"),
    "one block beside its hits": (lacks_one_block_beside_its_hits, {}, "blocks"),
    "place": (lacks_a_place, {}, "slots"),
    "victims": (lacks_victims, {}, "blocks"),
    "group's place": (group_lacks_a_place, {}, "slots"),
    "group's block": (group_lacks_a_block, {}, "blocks"),
    "device": (device_is_full, {"max_batch_context": 64}, "device"),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_failed_admission_changes_nothing(name: str) -> None:
    scene, limits, why = SCENES[name]
    options = {"total_kv_blocks": 12, "max_running_seqs": 4, "max_batch_tokens": 64}
    with small_engine(recording(**limits), **options) as engine:
        worker = engine.worker()
        submit = scene(engine, worker)
        engine.step()
        worker.collect()
        engine.backend.is_quiet = True  # from now on, only what is tried for the waiting one could change anything
        engine.step()
        queries = [metric(engine, f"prefix_{kind}_tokens") for kind in ("query", "hit")]
        settled = snapshot(engine)
        running = engine.running()
        head = submit()
        engine.step()
        assert (engine.running(), engine.waiting()[0], reason(engine)) == (running, head.slot, why)
        queue = {"waiting_count", "table sequences", "table forks", "table arrival_ns", "table seeds"}
        queue |= {"table queue_heads", "table queue_tails", "table block_tables"}
        assert changed(settled, snapshot(engine)) <= queue
        tried = snapshot(engine, head)
        for _ in range(20):
            engine.step()
        assert changed(tried, snapshot(engine, head)) == set()
        assert [metric(engine, f"prefix_{kind}_tokens") for kind in ("query", "hit")] == queries
        engine.backend.is_quiet = False
        engine.run(worker)
        assert_all_given_back(engine)


# ----------------------------------------------------------------------------------------------- order after preemption

MANY = 300


def submit_shuffled(worker: FakeWorker, priorities: list[int]) -> list[Stream]:
    """Requests whose arrivals stand in no order, many of them equal, so that class, arrival and slot all decide."""
    arrivals = np.random.default_rng(7).integers(0, 60, MANY).tolist()
    return [
        worker.submit(1, 3, arrival_ns=arrival, seed=k, priority=priorities[k % len(priorities)])
        for k, arrival in enumerate(arrivals)
    ]


MANY_OPTIONS = {
    "total_kv_blocks": MANY,
    "max_running_seqs": MANY,
    "max_batch_tokens": 4 * MANY,
    "max_model_len": 4 * MANY,
}


def test_three_hundred_lost_with_their_backend_keep_their_order() -> None:
    with small_engine(RecordingBackend, **MANY_OPTIONS) as engine:
        worker = engine.worker()
        streams = submit_shuffled(worker, [0, 5, HIGHEST, LOWEST])
        engine.step()
        order = engine.running()
        assert len(order) == MANY
        engine.backend.before = lose
        engine.step()
        assert engine.running() == []
        assert engine.waiting() == order == sorted(order, key=lambda sequence: seniority(engine, sequence))
        engine.backend.before = None
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


def test_three_hundred_that_make_way_in_one_step_keep_their_order() -> None:
    with small_engine(RecordingBackend, **MANY_OPTIONS) as engine:
        worker = engine.worker()
        streams = submit_shuffled(worker, [5, 0, LOWEST])
        engine.step()
        order = engine.running()
        assert len(order) == MANY
        assert available(engine) == 0
        high = worker.submit(4 * MANY - 1, 1, priority=HIGHEST, arrival_ns=100)  # every block there is
        engine.step()
        worker.collect()
        assert metric(engine, "preemptions") == MANY
        assert engine.waiting() == order == sorted(order, key=lambda sequence: seniority(engine, sequence))
        assert_complete(high)
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


# ------------------------------------------------------------------------------------------- who runs alone, and can't


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_sole_runner_that_outgrows_the_pool_ends_with_an_error_and_nobody_else(
    waiting: int, caplog: pytest.LogCaptureFixture, *, has_ids: bool
) -> None:
    with small_engine(RecordingBackend, total_kv_blocks=8, audit_every=0, max_running_seqs=1) as engine:
        worker = engine.worker()
        prompts = {"prompt_token_ids": ids(3)} if has_ids else {}
        alone = worker.submit(3, 20, arrival_ns=1, seed=1, **prompts)
        engine.step()
        others = [worker.submit(2, 2, arrival_ns=2 + k, seed=2 + k) for k in range(waiting)]
        leak_free_blocks(engine)  # what should never happen: the pool is smaller than everybody believed
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                engine.scheduler.step()
                worker.collect()
        assert (alone.reason, alone.error_code) == (layout.FINISH_ERROR, layout.ERROR_NO_BLOCKS)
        assert alone.token_ids == alone.expected_token_ids(1)
        assert caplog.records, "the client is told that the log says more"
        assert_complete(*others)
        assert metric(engine, "sequences_failed") == 1
        assert engine.gauge("free_count") + engine.gauge("evictable_count") == 1


def test_who_outgrows_the_pool_beside_another_is_preempted_and_not_ended() -> None:
    with small_engine(RecordingBackend, total_kv_blocks=2, kv_block_size=4) as engine:
        worker = engine.worker()
        streams = [worker.submit(3, 5, arrival_ns=k, seed=k) for k in range(2)]
        engine.run(worker)
        assert_complete(*streams)
        assert metric(engine, "sequences_failed") == 0


# ------------------------------------------------------------------------------------------------ nothing can progress


def assert_may_sleep(engine: SmallEngine) -> None:
    """There was nothing to do, and the scheduler may sleep until its doorbell is rung."""
    assert engine.scheduler.step() == 0
    assert arm_scheduler(engine.segment.address) == 1
    disarm_scheduler(engine.segment.address)


@pytest.mark.parametrize("waiting", [1, 5])
def test_when_nobody_can_be_admitted_the_scheduler_sleeps(waiting: int, caplog: pytest.LogCaptureFixture) -> None:
    with small_engine(RecordingBackend, total_kv_blocks=8, audit_every=0) as engine:
        worker = engine.worker()
        lost = leak_free_blocks(engine)
        streams = [worker.submit(2, 2, arrival_ns=k, seed=k) for k in range(waiting)]
        with caplog.at_level(logging.DEBUG):
            for _ in range(100):
                engine.clock.advance_ns(1_000)
                assert_may_sleep(engine)
        assert len(caplog.records) < 10
        assert engine.waiting() == slots(streams)
        assert reason(engine) == "blocks"
        engine.scheduler.arena.header["free_count"] = lost
        engine.scheduler.arena.header["helps"] += 1  # as whatever gives blocks back
        engine.run(worker)
        assert_complete(*streams)


def test_backend_that_stays_lost_neither_spins_nor_floods_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with small_engine(RecordingBackend) as engine:
        worker = engine.worker()
        streams = [worker.submit(5, 6, arrival_ns=k, seed=k) for k in range(10)]
        engine.step()
        engine.backend.before = lose
        start = engine.backend.start

        def refuse(*arguments: object) -> None:
            raise OSError("no such device")

        with caplog.at_level(logging.DEBUG):
            engine.step()
            engine.backend.start = refuse  # type: ignore[method-assign]
            for _ in range(100):
                engine.clock.advance_ns(500_000_000)
                assert_may_sleep(engine)
        assert 1 <= len(caplog.records) < 10
        assert reason(engine) == "device"
        engine.backend.start, engine.backend.before = start, None  # type: ignore[method-assign]
        engine.run(worker)
        assert_complete(*streams)


def test_a_backend_without_news_is_asked_again_and_nobody_starves() -> None:
    with small_engine(RecordingBackend) as engine:
        worker = engine.worker()
        streams = [worker.submit(5, 3, arrival_ns=k, seed=k) for k in range(3)]
        engine.step()
        engine.backend.is_quiet = True
        for _ in range(20):
            assert engine.step() == 3
        engine.backend.is_quiet = False
        engine.run(worker)
        assert_complete(*streams)


# ----------------------------------------------------------------------------------------------------------------- TTFT


def test_time_to_first_token_is_counted_once_for_each_request_that_had_one() -> None:
    """Also after preemptions, a lost backend and a new scheduler; and never for one that had no token."""
    with small_engine(RecordingBackend, total_kv_blocks=6, max_running_seqs=3, max_batch_tokens=8) as engine:
        worker = engine.worker()
        streams = [worker.submit(5, 6, arrival_ns=k, seed=k) for k in range(8)]
        unlucky = worker.submit(5, 6, arrival_ns=99)
        engine.step()
        worker.collect(engine.clock.now_ns())
        worker.cancel(unlucky)
        for disturbance in (None, lose, None):
            engine.backend.before = disturbance
            engine.step()
            engine.backend.before = None
            worker.collect(engine.clock.now_ns())
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
        assert unlucky.token_ids == []
        lane = engine.segment.metrics[1 + worker.lane]
        assert lane["ttft_us"].sum() == len(streams)
        assert lane["ttft_us"].sum() + lane["inter_token_us"].sum() == sum(len(s.token_ids) for s in streams)


# ---------------------------------------------------------------------------------------------------------- equal seeds


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"no_prefix_cache": True}, {"mock_kv": True}, {"total_kv_blocks": 6}])
def test_live_requests_that_are_equal_in_everything_all_complete(count: int, options: dict[str, Any]) -> None:
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams = [ask(worker, ids(7), 9, seed=5) for _ in range(count)]
        engine.run(worker)
        assert_complete(*streams)
        assert all(stream.token_ids == streams[0].token_ids for stream in streams)
        assert_all_given_back(engine)


# ------------------------------------------------------------------------------------ a long prefill beside the decodes

STEP_NS, PREFILL_NS = 200_000, 1_000


def gaps_beside_a_long_prefill(
    monkeypatch: pytest.MonkeyPatch, *, mixes: bool, batch: int
) -> tuple[list[list[bool]], int]:
    """Four decode while a prompt of 2,000 is computed. Returns, for each plan, who of them had a row; the longest gap.

    The mock's steps take the time that it says, of the engine's clock.
    """
    options = {
        "max_batch_tokens": batch,
        "max_model_len": 4_096,
        "total_kv_blocks": 2_048,
        "mock_token_latency_us": STEP_NS // 1_000,
        "mock_prefill_token_latency_ns": PREFILL_NS,
    }
    with small_engine(recording(mixes_prefill_and_decode=mixes), **options) as engine:
        monkeypatch.setattr(mock.time, "monotonic_ns", engine.clock.now_ns)
        monkeypatch.setattr(mock, "sleep_until", engine.clock.set_ns)
        worker = engine.worker()
        decoding = [worker.submit(2, 1_000, arrival_ns=k, seed=k) for k in range(4)]
        while not all(stream.token_ids for stream in decoding):
            engine.step()
            worker.collect()
        long = worker.submit(2_000, 1, arrival_ns=engine.clock.now_ns(), seed=9)
        first = len(plans(engine))
        last_ns = dict.fromkeys(slots(decoding), engine.clock.now_ns())
        longest_ns = 0
        while not long.is_over:
            before = {stream.slot: len(stream.token_ids) for stream in decoding}
            engine.step()
            worker.collect()
            now_ns = engine.clock.now_ns()
            for stream in decoding:
                if len(stream.token_ids) > before[stream.slot]:
                    longest_ns = max(longest_ns, now_ns - last_ns[stream.slot])
                    last_ns[stream.slot] = now_ns
        longest_ns = max(longest_ns, *(engine.clock.now_ns() - then for then in last_ns.values()))
        shares = [[plan.row_of(stream) is not None for stream in decoding] for plan in plans(engine)[first:]]
        kinds = [{row.is_decode for row in plan.rows} for plan in plans(engine)[first:]]
        assert mixes or all(len(kind) == 1 for kind in kinds), "decodes and chunks in one plan"
        return shares, longest_ns


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_decodes_are_in_every_plan_beside_a_long_prefill(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    shares, longest_ns = gaps_beside_a_long_prefill(monkeypatch, mixes=True, batch=batch)
    assert all(all(share) for share in shares)
    assert longest_ns <= STEP_NS + batch * PREFILL_NS  # one step's time, with one chunk in it


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_decodes_are_in_every_second_plan_of_a_device_that_does_not_mix(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    shares, longest_ns = gaps_beside_a_long_prefill(monkeypatch, mixes=False, batch=batch)
    assert all(all(share) or not any(share) for share in shares)
    assert all(any(one) or any(next_one) for one, next_one in itertools.pairwise(shares))
    assert not all(any(share) for share in shares)
    assert longest_ns <= 2 * STEP_NS + batch * PREFILL_NS  # a plan of chunks, and the decodes' own


def test_prefill_gets_its_turn_beside_decodes_that_never_end() -> None:
    """The two take turns: neither side is put off for ever."""
    with small_engine(recording(mixes_prefill_and_decode=False), max_batch_tokens=8, max_model_len=256) as engine:
        worker = engine.worker()
        ask(worker, ids(4), 20, seed=1)
        engine.step()
        prefill = ask(worker, ids(24, 5_000), 1, seed=2, arrival_ns=5)
        for _ in range(8):  # 3 chunks, each after a plan of decodes, and one plan to spare
            engine.step()
        worker.collect()
        assert prefill.is_over
        assert cover(24, 8) == sum(plan.row_of(prefill) is not None for plan in plans(engine))
        engine.run(worker)
