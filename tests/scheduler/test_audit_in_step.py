"""The audit as a part of the step: it finds each fault in the step that it was planted in, and streams go on."""

from __future__ import annotations

import pytest

from ironbatch.backends.base import BatchPlan
from ironbatch.kernels.violations import VIOLATIONS
from ironbatch.scheduler.step import AuditFailed
from tests.scheduler.faults import FAULTS, VIOLATIONS_OF
from tests.scheduler.helpers import (
    RecordingBackend,
    ask,
    assert_all_given_back,
    assert_complete,
    complete,
    ids,
    metric,
)
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

OPTIONS = {"total_kv_blocks": 64, "max_batch_tokens": 64, "mock_kv": True}


def busy(engine: SmallEngine, worker: FakeWorker) -> list[Stream]:
    """Evictable chains, free blocks, and six that run, some of which share a prefix, some of which are to fork."""
    complete(engine, worker, ids(18))
    complete(engine, worker, ids(11, 3_000))
    streams = [ask(worker, [*ids(9, 5_000), k], 20, arrival_ns=k, seed=k) for k in range(4)]
    streams += worker.submit_group(10, 20, 2, prompt_token_ids=ids(10, 7_000), arrival_ns=9, seed=9)
    engine.step()
    return streams


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_fault_ends_the_scheduler_and_its_successor_serves_every_stream(fault: str, step: int) -> None:
    with small_engine(RecordingBackend, **OPTIONS, audit_every=1) as engine:
        worker = engine.worker()
        streams = busy(engine, worker)
        for _ in range(step):
            engine.step()
            worker.collect()
        audits = metric(engine, "audits")
        planted: list[bool] = []
        engine.backend.after = lambda plan: planted.append(FAULTS[fault](plan._arena))
        with pytest.raises(AuditFailed) as failure:
            engine.scheduler.step()
        assert planted == [True]
        assert any(VIOLATIONS[key] in str(failure.value) for key in VIOLATIONS_OF[fault]), failure.value
        assert metric(engine, "audits") == audits + 1
        assert metric(engine, "audit_failures") == 1
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
        assert metric(engine, "audit_failures") == 1
        assert_all_given_back(engine)


@pytest.mark.parametrize("every", [1, 2, 7, 1000])
def test_audit_comes_every_so_many_steps(every: int) -> None:
    with small_engine(RecordingBackend, **OPTIONS, audit_every=every) as engine:
        worker = engine.worker()
        worker.submit(3, 30)
        engine.run(worker)
        assert metric(engine, "audits") == metric(engine, "steps") // every
        for _ in range(20):
            assert engine.step() == 0  # in idle nothing changes
        assert metric(engine, "audits") == metric(engine, "steps") // every


def plant_once(engine: SmallEngine, fault: str) -> None:
    """In the next plan."""

    def plant(plan: BatchPlan) -> None:
        assert FAULTS[fault](plan._arena)
        engine.backend.after = None

    engine.backend.after = plant


def step_often(engine: SmallEngine, count: int) -> None:
    for _ in range(count):
        engine.scheduler.step()


@pytest.mark.parametrize("every", [2, 3, 7])
def test_fault_is_found_within_so_many_steps(every: int) -> None:
    with small_engine(RecordingBackend, **OPTIONS, audit_every=every) as engine:
        worker = engine.worker()
        busy(engine, worker)
        plant_once(engine, "leak")
        with pytest.raises(AuditFailed):
            step_often(engine, every)


def test_nothing_is_audited_when_it_is_turned_off() -> None:
    with small_engine(RecordingBackend, **OPTIONS, audit_every=0) as engine:
        worker = engine.worker()
        streams = busy(engine, worker)

        plant_once(engine, "promised to nobody")
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert_complete(*streams)
        assert metric(engine, "audits") == metric(engine, "audit_failures") == 0


def test_sound_state_passes_through_growth_displacement_forks_and_evictions() -> None:
    """Over a pool that is too small for its load, with an audit after every step."""
    options = OPTIONS | {"total_kv_blocks": 20, "max_batch_tokens": 16}
    with small_engine(RecordingBackend, **options, audit_every=1) as engine:
        worker = engine.worker()
        streams = []
        for k in range(9):
            prompt = [*ids(8, 100 * (k % 2)), *ids(3, 900 + k)]
            streams += worker.submit_group(
                11, 14, 1 + k % 3, prompt_token_ids=prompt, arrival_ns=k, seed=k, priority=5 - k
            )
            engine.step()
        engine.run(worker)
        assert_complete(*streams)
        assert metric(engine, "preemptions") > 0
        assert metric(engine, "prefix_evicted_blocks") > 0
        assert metric(engine, "copied_blocks") > 0
        assert metric(engine, "audits") == metric(engine, "steps")
        assert metric(engine, "audit_failures") == 0
