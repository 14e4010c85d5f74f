"""Why requests wait, and for how long: the right reason at each moment, and sums that are exact to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.base import BatchPlan
from ironbatch.errors import BackendLost
from tests.scheduler.helpers import (
    RecordingBackend,
    ask,
    assert_complete,
    fared,
    ids,
    metric,
    reason,
    recording,
    waited_ns,
)
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

US = 1_000

ROOMY = {"total_kv_blocks": 64, "max_batch_tokens": 64}


def lose(plan: BatchPlan) -> None:
    raise BackendLost("unplugged")


def refuse(*arguments: object) -> None:
    raise OSError("no such device")


# ------------------------------------------------------------------------------------------- a scenario for each reason


@dataclass
class Scene:
    """What keeps a waiting request from being admitted, until `end` is called."""

    options: dict[str, Any]
    begin: Callable[[SmallEngine, FakeWorker], Any]
    end: Callable[[SmallEngine, FakeWorker, Any], None]
    limits: dict[str, Any] = field(default_factory=dict)
    prompt: int = 4


def hold(prompt: int) -> Callable[[SmallEngine, FakeWorker], Stream]:
    """One that runs, and gets no further until it is cancelled."""

    def begin(engine: SmallEngine, worker: FakeWorker) -> Stream:
        stream = worker.submit(prompt, 8, arrival_ns=engine.clock.now_ns())
        engine.step()
        engine.backend.is_quiet = True
        return stream

    return begin


def let_go(engine: SmallEngine, worker: FakeWorker, holder: Stream) -> None:
    worker.cancel(holder)
    engine.backend.is_quiet = False


def prefill(engine: SmallEngine, worker: FakeWorker) -> Stream:
    """One whose prefill takes all of each step's tokens."""
    stream = worker.submit(200, 8, arrival_ns=engine.clock.now_ns())
    engine.step()
    return stream


def close_backend(engine: SmallEngine, worker: FakeWorker) -> Any:
    worker.submit(1, 1)
    engine.backend.before = lose
    engine.step()
    start = engine.backend.start
    engine.backend.start, engine.backend.before = refuse, None  # type: ignore[method-assign]
    return start


def open_backend(engine: SmallEngine, worker: FakeWorker, start: Any) -> None:
    engine.backend.start = start  # type: ignore[method-assign]


SCENES = {
    "slots": Scene({"max_running_seqs": 1}, hold(4), let_go),
    "blocks": Scene({"total_kv_blocks": 8}, hold(20), let_go, prompt=12),
    "tokens": Scene(
        {"max_batch_tokens": 4, "max_model_len": 256}, prefill, lambda engine, worker, holder: worker.cancel(holder)
    ),
    "device": Scene({}, hold(20), let_go, limits={"max_batch_context": 40}),
    "closed": Scene({}, close_backend, open_backend),
}


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_request_is_charged_for_what_it_lacks(name: str, steps: int) -> None:
    scene = SCENES[name]
    expected = "device" if name == "closed" else name
    with small_engine(recording(**scene.limits), **(ROOMY | scene.options)) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        holder = scene.begin(engine, worker)
        engine.clock.advance_ns(3 * US)
        waiting = worker.submit(scene.prompt, 2, arrival_ns=engine.clock.now_ns() - 2 * US, seed=3)
        engine.step()  # it came 2 us before the scheduler looked
        for step in range(steps):
            assert reason(engine) == expected
            assert waiting.slot in engine.waiting()
            engine.clock.advance_ns((step + 1) * 7 * US)
            if step < steps - 1:
                engine.step()
        scene.end(engine, worker, holder)
        engine.run(worker)
        assert_complete(waiting)
        in_vain = sum((step + 1) * 7 * US for step in range(steps))
        assert waited_ns(engine, waiting) == {"step": 2 * US, expected: in_vain}
        assert metric(engine, f"waited_{expected}_us") >= in_vain // US


@pytest.mark.parametrize("wait_us", [0, 1, 999])
def test_request_that_is_admitted_by_the_first_plan_has_waited_for_the_step(wait_us: int) -> None:
    with small_engine(RecordingBackend, **ROOMY) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        stream = worker.submit(4, 2, arrival_ns=50_000)
        engine.clock.advance_ns(wait_us * US)
        engine.run(worker)
        assert_complete(stream)
        assert waited_ns(engine, stream) == ({"step": wait_us * US} if wait_us else {})
        assert metric(engine, "waited_step_us") == wait_us


def test_the_reason_changes_with_what_the_head_lacks() -> None:
    """First a place, then blocks; each for as long as it was so."""
    with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": 8, "max_running_seqs": 2})) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        large = worker.submit(20, 8, arrival_ns=1)  # 6 blocks of 8
        small = worker.submit(2, 8, arrival_ns=2)
        engine.step()
        engine.backend.is_quiet = True
        waiting = worker.submit(12, 2, arrival_ns=50_000, seed=3)  # 4
        engine.step()
        assert reason(engine) == "slots"
        engine.clock.advance_ns(5 * US)
        worker.cancel(small)
        engine.step()
        assert reason(engine) == "blocks"
        engine.clock.advance_ns(11 * US)
        worker.cancel(large)
        engine.backend.is_quiet = False
        engine.run(worker)
        assert_complete(waiting)
        assert waited_ns(engine, waiting) == {"slots": 5 * US, "blocks": 11 * US}


def test_nobody_passes_the_head_so_all_wait_for_its_reason() -> None:
    """The second would fit; it waits for the blocks that the first lacks."""
    with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": 8})) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        holder = hold(20)(engine, worker)
        head = worker.submit(12, 2, arrival_ns=50_001, seed=3)
        behind = worker.submit(1, 2, arrival_ns=50_001, seed=4)
        engine.clock.advance_ns(1)
        engine.step()
        assert engine.waiting() == [head.slot, behind.slot]
        engine.clock.advance_ns(9 * US)
        let_go(engine, worker, holder)
        engine.run(worker)
        assert_complete(head, behind)
        for stream in (head, behind):
            assert waited_ns(engine, stream) == {"blocks": 9 * US}


def test_time_between_preemption_and_resumption_is_waited_too() -> None:
    with small_engine(RecordingBackend, **ROOMY, max_running_seqs=1) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        low = worker.submit(4, 6, priority=7, arrival_ns=40_000, seed=1)
        engine.step()
        waited = 10_000
        for k in range(3):
            high = worker.submit(4, 2, arrival_ns=engine.clock.now_ns(), seed=2)
            engine.step()
            worker.collect()
            assert engine.running() == [high.slot]
            engine.clock.advance_ns((k + 1) * US)
            engine.step()
            worker.collect()
            assert_complete(high)
            engine.clock.advance_ns((k + 1) * 10 * US)
            engine.step()
            assert engine.running() == [low.slot]
            waited += (k + 1) * 11 * US
        engine.run(worker)
        assert_complete(low)
        assert sum(waited_ns(engine, low).values()) == waited
        assert fared(engine, low)["preemptions"] == 3
        assert waited_ns(engine, low)["slots"] >= 6 * US


def test_words_of_a_slot_tell_nothing_of_the_request_before() -> None:
    """The next one in the slot is neither preempted nor waits nor finds anything."""
    with small_engine(RecordingBackend, **ROOMY, max_running_seqs=1) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        ask(worker, ids(9), 1)
        engine.run(worker)
        low = ask(worker, ids(9), 4, priority=7, arrival_ns=40_000, seed=1)
        engine.step()
        worker.submit(4, 1, arrival_ns=50_000)
        engine.run(worker)
        assert fared(engine, low)["preemptions"] == 1
        assert fared(engine, low)["cached_tokens"] == 8
        after = worker.submit(4, 2, arrival_ns=50_000)
        assert after.slot == low.slot
        engine.run(worker)
        assert set(fared(engine, after).values()) == {0}


def test_time_after_a_lost_backend_is_waited_too() -> None:
    with small_engine(RecordingBackend, **ROOMY) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        stream = worker.submit(4, 6, arrival_ns=50_000, seed=1)
        engine.step()
        engine.clock.advance_ns(4 * US)
        engine.backend.before = lose
        engine.step()
        engine.backend.before = None
        engine.clock.advance_ns(8 * US)
        engine.run(worker)
        assert_complete(stream)
        assert sum(waited_ns(engine, stream).values()) == 8 * US


# ----------------------------------------------------------------------------------------------------- never below zero


@pytest.mark.parametrize("ahead_ns", [1, 500, 10**9])
@pytest.mark.parametrize("places", [1, 8])
def test_a_request_that_arrived_after_the_plans_time_has_not_waited_less_than_nothing(
    ahead_ns: int, places: int
) -> None:
    """A worker may stamp its arrival after the scheduler has read the clock and before it drains the lane."""
    with small_engine(RecordingBackend, **ROOMY, max_running_seqs=places) as engine:
        worker = engine.worker()
        engine.clock.set_ns(50_000)
        holder = worker.submit(2, 3, arrival_ns=50_000)
        engine.step()
        early = worker.submit(4, 3, arrival_ns=50_000 + ahead_ns, seed=1)
        for _ in range(20):
            engine.step()
            engine.clock.advance_ns(US)
        words = [
            fared(engine, stream)[f"waited_{name}_ns"] for stream in (holder, early) for name in layout.WAIT_REASONS
        ]
        worker.collect()
        assert_complete(holder, early)
        assert min(words) >= 0
        assert sum(words) <= 20 * US
        assert min(metric(engine, f"waited_{name}_us") for name in layout.WAIT_REASONS) >= 0


# ------------------------------------------------------------------------------------------------- exact, in any course


@dataclass
class Waits:
    """What a request should have waited, from when it was seen to run and to wait."""

    stream: Stream
    since_ns: int
    is_waiting: bool = True
    total_ns: int = 0
    preemptions: int = 0


def note(engine: SmallEngine, waits: list[Waits]) -> None:
    """A step is over."""
    now_ns = engine.clock.now_ns()
    running = set(engine.running())
    waiting = set(engine.waiting())
    for entry in waits:
        slot = entry.stream.slot
        if entry.is_waiting and slot not in waiting:  # it runs, or has done so and is at its end already
            entry.total_ns += now_ns - entry.since_ns
            entry.is_waiting = False
        elif not entry.is_waiting and slot in waiting:
            entry.since_ns = now_ns
            entry.is_waiting = True
        assert not (slot in running and slot in waiting)


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20),  # prompt
            st.integers(1, 12),  # max_new_tokens
            st.integers(-8, 7),  # priority
            st.integers(0, 9),  # age on submission, us
            st.integers(0, 3),  # steps before the next one comes
        ),
        min_size=1,
        max_size=16,
    ),
    pool=st.integers(9, 20),
    batch=st.sampled_from([4, 16]),
    places=st.sampled_from([1, 2, 8]),
    lost=st.sets(st.integers(0, 40), max_size=4),
    limits=st.sampled_from([{}, {"max_batch_context": 96}, {"max_prefill_sequences": 1}]),
)
@example(requests=[(20, 12, 7, 3, 1), (20, 12, -8, 2, 1)], pool=9, batch=16, places=8, lost={3}, limits={})
def test_sums_are_exact_whatever_happens(
    requests: list[tuple[int, int, int, int, int]],
    pool: int,
    batch: int,
    places: int,
    lost: set[int],
    limits: dict[str, int],
) -> None:
    """All five add up to the time from arrival to admission, and from each preemption to the next admission."""
    options = {"total_kv_blocks": pool, "max_batch_tokens": batch, "max_running_seqs": places, "no_prefix_cache": True}
    with small_engine(recording(**limits), **options) as engine:
        worker = engine.worker()
        engine.clock.set_ns(100 * US)
        waits: list[Waits] = []
        clock = iter(range(10**6))

        def step() -> None:
            engine.backend.before = lose if next(clock) in lost else None
            engine.step()
            note(engine, waits)
            engine.clock.advance_ns((3 + len(waits) % 5) * US)

        for k, (prompt, max_new, priority, age_us, steps) in enumerate(requests):
            arrival_ns = engine.clock.now_ns() - age_us * US
            stream = ask(worker, ids(prompt), max_new, arrival_ns=arrival_ns, priority=priority, seed=k)
            waits.append(Waits(stream, arrival_ns))
            for _ in range(steps):
                step()
        while engine.gauge("waiting_count") + engine.gauge("running_count") or any(e.is_waiting for e in waits):
            step()
        for entry in waits:  # nobody has collected, so each slot still has its request
            words = fared(engine, entry.stream)
            assert min(words.values()) >= 0
            assert sum(words[f"waited_{name}_ns"] for name in layout.WAIT_REASONS) == entry.total_ns
        for name in layout.WAIT_REASONS:
            total_ns = sum(fared(engine, entry.stream)[f"waited_{name}_ns"] for entry in waits)
            assert metric(engine, f"waited_{name}_us") == total_ns // US
        worker.collect()
        assert_complete(*(entry.stream for entry in waits))
