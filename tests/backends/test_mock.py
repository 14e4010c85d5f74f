"""The mock: when its steps end, and that its tokens depend on the request alone."""

from __future__ import annotations

import ctypes
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends import mock
from ironbatch.backends.base import Backend, BatchLimits, BatchPlan
from ironbatch.backends.mock import EOS_TOKEN_ID, SPIN_NS, MockBackend, sleep_until
from ironbatch.kernels.emission import EOS_SCALE
from tests.support import small_config, small_engine

PR_GET_TIMERSLACK = 30  # prctl(2)
TERMS = ("mock_prefill_token_latency_ns", "mock_sequence_latency_ns", "mock_kv_token_latency_ns")


class StoppedTime:
    """In the place of the time module: a clock that moves by itself only a little, and what was slept."""

    def __init__(self, tick_ns: int = 0) -> None:
        self.now_ns = 10**12
        self.tick_ns = tick_ns
        self.slept_ns: list[int] = []

    def monotonic_ns(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_ns.append(round(seconds * 1e9))
        self.now_ns += self.slept_ns[-1]


@given(
    base_us=st.integers(0, 10**6),
    terms=st.tuples(*[st.integers(0, 10**6)] * 3),
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=10),
)
@settings(max_examples=50)
def test_step_takes_what_the_latency_model_says(
    base_us: int, terms: tuple[int, int, int], requests: list[tuple[int, int]]
) -> None:
    deadlines: list[int] = []
    expected: list[int] = []
    stopped = StoppedTime()

    class Modelled(MockBackend):
        def execute(self, plan: BatchPlan) -> object:
            rows = plan.rows
            prefill = rows["new_tokens"][rows["new_tokens"] > 1].sum()
            sums = (prefill, len(rows), rows["context_tokens"].sum())
            step_ns = base_us * 1000 + sum(term * int(total) for term, total in zip(terms, sums, strict=True))
            expected.append(stopped.now_ns + step_ns)
            assert step_ns <= self.longest_step_ns
            return super().execute(plan)

    options = {"mock_token_latency_us": base_us, **dict(zip(TERMS, terms, strict=True))}
    with pytest.MonkeyPatch.context() as patch, small_engine(Modelled, **options) as engine:
        patch.setattr(mock, "time", stopped)
        patch.setattr(mock, "sleep_until", deadlines.append)
        worker = engine.worker()
        for prompt, max_new in requests:
            worker.submit(prompt, max_new)
        steps = engine.run(worker)
        assert len(deadlines) == steps > 0
        assert deadlines == expected


def test_time_that_the_kernel_takes_is_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = StoppedTime()

    def slow_kernel(*arguments: int) -> int:
        stopped.now_ns += 77_000
        return 200_000

    monkeypatch.setattr(mock, "time", stopped)
    monkeypatch.setattr(mock, "mock_execute", slow_kernel)
    with small_engine(mock_token_latency_us=200) as engine:
        engine.worker().submit(1, 1)
        start_ns = stopped.now_ns
        stopped.tick_ns = 1_000
        engine.step()
        assert start_ns + 201_000 <= stopped.now_ns < start_ns + 203_000


@pytest.mark.parametrize("ahead_ns", [-(10**9), 0, 1, SPIN_NS // 2, SPIN_NS, SPIN_NS + 1, 200_000, 3_000_000])
def test_sleep_is_never_early(ahead_ns: int) -> None:
    for _ in range(20):
        deadline_ns = time.monotonic_ns() + ahead_ns
        sleep_until(deadline_ns)
        assert time.monotonic_ns() >= deadline_ns


def test_sleep_leaves_the_end_to_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = StoppedTime(tick_ns=500)
    monkeypatch.setattr(mock, "time", stopped)
    deadline_ns = stopped.now_ns + 1_000_000
    sleep_until(deadline_ns)
    assert stopped.slept_ns == [1_000_000 - 500 - SPIN_NS]
    assert deadline_ns <= stopped.now_ns <= deadline_ns + 500


@pytest.mark.parametrize("ahead_ns", [-5_000, 0, SPIN_NS])
def test_what_is_due_is_not_slept_for(ahead_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = StoppedTime(tick_ns=500)
    monkeypatch.setattr(mock, "time", stopped)
    sleep_until(stopped.now_ns + ahead_ns)
    assert stopped.slept_ns == []


def test_start_takes_the_timers_slack_away() -> None:
    prctl = ctypes.CDLL(None).prctl
    before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(mock.PR_SET_TIMERSLACK, 50_000, 0, 0, 0)
    try:
        with small_engine():
            assert prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0) == 1
    finally:
        prctl(mock.PR_SET_TIMERSLACK, before, 0, 0, 0)


def test_tokens_do_not_depend_on_the_batch() -> None:
    requests = [(3 + k, 12, 1000 + k) for k in range(6)]
    alone = []
    for prompt, max_new, seed in requests:
        with small_engine() as engine:
            worker = engine.worker()
            stream = worker.submit(prompt, max_new, seed=seed)
            engine.run(worker)
            alone.append(stream.token_ids)
    with small_engine(total_kv_blocks=6, max_batch_tokens=8) as engine:
        worker = engine.worker()
        together = [worker.submit(prompt, max_new, seed=seed) for prompt, max_new, seed in requests]
        engine.run(worker)
        assert engine.segment.metrics[0]["preemptions"] > 0
        assert [stream.token_ids for stream in together] == alone


def test_without_ends_it_gives_exactly_the_tokens_asked_for() -> None:
    with small_engine(mock_eos_prob=0.0) as engine:
        assert engine.backend.eos_token_id == mock.NO_EOS
        worker = engine.worker()
        streams = [worker.submit(1, 60, seed=seed) for seed in range(32)]
        engine.run(worker)
        assert {(stream.reason, len(stream.token_ids)) for stream in streams} == {(layout.FINISH_LENGTH, 60)}


@pytest.mark.parametrize("probability", [0.02, 0.3, 1.0])
def test_end_of_sequence_ends_who_does_not_ignore_it(probability: float) -> None:
    threshold = round(probability * EOS_SCALE)
    with small_engine(mock_eos_prob=probability) as engine:
        assert engine.backend.eos_token_id == EOS_TOKEN_ID
        worker = engine.worker()
        flags = (0, layout.FLAG_IGNORE_EOS)
        streams = [worker.submit(1, 60, seed=seed, flags=flag) for seed in range(16) for flag in flags]
        engine.run(worker)
        for stream in streams:
            full = stream.expected_token_ids(60, EOS_TOKEN_ID, threshold)
            ends = [] if stream.ignores_eos else [k + 1 for k in range(60) if full[k] == EOS_TOKEN_ID]
            assert stream.token_ids == full[: min([60, *ends])]
            assert stream.reason == (layout.FINISH_STOP if ends else layout.FINISH_LENGTH)


def test_mean_length_is_that_of_a_geometric_distribution() -> None:
    """At 0.05 a sequence has 20 tokens in the mean, cut at 600; of 1,500 the mean strays by 0.5."""
    options = {"max_model_len": 601, "total_kv_blocks": 1_000, "max_running_seqs": 100, "max_batch_tokens": 100}
    with small_engine(mock_eos_prob=0.05, max_queued_requests=1_400, **options) as engine:
        worker = engine.worker()
        streams = [worker.submit(1, 600, seed=seed) for seed in range(1_500)]
        engine.run(worker)
        assert sum(len(stream.token_ids) for stream in streams) / len(streams) == pytest.approx(20, rel=0.15)


def test_what_it_says_of_itself() -> None:
    config = small_config(mock_token_latency_us=300, mock_kv_token_latency_ns=7)
    backend = MockBackend(config)
    assert isinstance(backend, Backend)
    assert backend.resumable
    assert backend.batch_limits == BatchLimits()
    assert backend.longest_step_ns == config.mock_longest_step_ns
