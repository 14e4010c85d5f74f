"""The scheduler's step with backends that fail, stream, speculate and look closely at their plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.backends.base import BatchLimits, BatchPlan, StepOutput
from ironbatch.config import Config
from ironbatch.errors import BackendLost, RequestError
from ironbatch.kernels.emission import mock_token
from ironbatch.scheduler.step import LOSS_PAUSE_S, MOST_LOSSES
from tests.support import FakeWorker, ScriptedBackend, SmallEngine, Stream, small_engine


def mock_rows(plan: BatchPlan) -> list[list[int]]:
    """What the mock would emit."""
    tokens = zip(plan.rows.tolist(), plan.seeds.tolist(), strict=True)
    return [[mock_token(seed, row[3], -1, 0)] if row[4] else [] for row, seed in tokens]


class MockLike(ScriptedBackend):
    """Scripted with the mock's tokens, so that what a stream should be is known."""

    script = staticmethod(mock_rows)


class NotResumable(MockLike):
    resumable = False


def with_limits(**limits: int) -> Callable[[Config], MockLike]:
    def make(config: Config) -> MockLike:
        backend = MockLike(config)
        backend.batch_limits = BatchLimits(**limits)
        return backend

    return make


def fail_with(problem: Exception) -> Callable[[BatchPlan], None]:
    def script(plan: BatchPlan) -> None:
        raise problem

    return script


def submit_many(worker: FakeWorker, count: int, prompt: int = 5, max_new: int = 6) -> list[Stream]:
    return [worker.submit(prompt, max_new, arrival_ns=k, seed=100 + k) for k in range(count)]


def assert_complete(*streams: Stream) -> None:
    for stream in streams:
        assert stream.reason == layout.FINISH_LENGTH
        assert stream.token_ids == stream.expected_token_ids(stream.max_new_tokens)


# ------------------------------------------------------------------------------------------------------ a lost backend


@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_lost_backend_is_reopened_and_every_stream_goes_on(steps_before: int) -> None:
    with small_engine(MockLike, total_kv_blocks=32) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 10)
        for _ in range(steps_before):
            engine.step()
        engine.backend.script = fail_with(BackendLost("unplugged"))
        assert engine.step() > 0
        assert engine.running() == []
        assert engine.gauge("free_count") == 32
        assert engine.segment.header["scheduler_ready"] == 1  # until it can't be reopened, who comes is queued
        assert engine.segment.header["in_device_call"] == 0
        assert (engine.backend.starts, engine.backend.closes) == (1, 1)
        engine.backend.script = mock_rows
        engine.backend.forgotten.clear()
        engine.step()
        assert engine.segment.header["scheduler_ready"] == 1
        assert engine.backend.starts == 2
        assert engine.backend.forgotten == []  # it has forgotten everything by itself
        engine.run(worker)
        assert_complete(*streams)
        engine.assert_nothing_held()


def test_lost_backend_that_is_not_resumable_ends_what_it_has_begun_to_emit_and_nothing_else() -> None:
    with small_engine(NotResumable, max_running_seqs=3, max_batch_tokens=8) as engine:
        worker = engine.worker()
        emitting = submit_many(worker, 1)
        engine.step()
        prefilling = worker.submit(20, 4, arrival_ns=10, seed=1)
        waiting = worker.submit(5, 4, arrival_ns=11, seed=2)
        engine.step()
        assert engine.sequence(prefilling)["computed_tokens"] == 7
        engine.backend.script = fail_with(BackendLost("unplugged"))
        engine.step()
        worker.collect()
        for stream in emitting:
            assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_LOST)
            assert stream.token_ids == stream.expected_token_ids(2)
        engine.backend.script = mock_rows
        engine.run(worker)
        assert_complete(prefilling, waiting)
        assert engine.segment.metrics[0]["sequences_failed"] == len(emitting)


def test_lost_backend_that_is_not_resumable_ends_those_too_that_were_preempted_after_they_had_begun() -> None:
    with small_engine(NotResumable, total_kv_blocks=4, max_batch_tokens=32) as engine:
        worker = engine.worker()
        senior = worker.submit(6, 9, arrival_ns=1, seed=1)
        junior = worker.submit(6, 9, arrival_ns=2, seed=2)
        while not engine.segment.metrics[0]["preemptions"]:
            engine.step()
        assert engine.running() == [senior.slot]
        engine.backend.script = fail_with(BackendLost("unplugged"))
        engine.step()
        worker.collect()
        for stream in (senior, junior):
            assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_LOST)
            assert stream.token_ids
        engine.assert_nothing_held()


def test_backend_that_cannot_be_reopened_is_tried_again_while_everything_else_goes_on() -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        kept, cancelled = submit_many(worker, 2)
        engine.backend.script = fail_with(BackendLost("unplugged"))
        engine.step()
        start, attempts = engine.backend.start, []

        def refuse(*arguments: object) -> None:
            attempts.append(arguments)
            raise OSError("no such device")

        engine.backend.start = refuse
        worker.cancel(cancelled)
        for _ in range(3):
            engine.clock.advance_ns(5)
            assert engine.step() == 0
            assert engine.segment.header["heartbeat_ns"] == engine.clock.now_ns()
        worker.collect()
        assert len(attempts) == 3
        assert cancelled.reason == layout.FINISH_CANCELLED
        assert engine.segment.header["scheduler_ready"] == 0
        engine.backend.start, engine.backend.script = start, mock_rows
        engine.run(worker)
        assert_complete(kept)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the scheduler has paused each time; it does not."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_backend_that_is_lost_again_and_again_ends_what_was_planned_and_nothing_else(pauses: list[float]) -> None:
    with small_engine(MockLike, max_running_seqs=3) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 5)
        for _ in range(2):
            engine.step()
        begun = [stream.slot for stream in streams if stream.slot in engine.running()]
        engine.backend.script = fail_with(BackendLost("unplugged"))
        for _ in range(MOST_LOSSES - 1):
            engine.step()
            worker.collect()
            assert all(stream.reason == layout.FINISH_NONE for stream in streams)
        engine.step()
        worker.collect()
        ended = [stream for stream in streams if stream.reason != layout.FINISH_NONE]
        assert [stream.slot for stream in ended] == begun
        assert {(stream.reason, stream.error_code) for stream in ended} == {(layout.FINISH_ERROR, layout.ERROR_BACKEND)}
        assert pauses == [LOSS_PAUSE_S * 2**k for k in range(MOST_LOSSES - 2)]
        engine.backend.script = mock_rows
        engine.run(worker)
        assert_complete(*[stream for stream in streams if stream not in ended])
        engine.assert_nothing_held()


def test_losses_with_a_token_in_between_end_nobody(pauses: list[float]) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 4)
        for _ in range(3 * MOST_LOSSES):
            engine.backend.script = fail_with(BackendLost("unplugged"))
            engine.step()
            engine.backend.script = mock_rows
            engine.step()
        assert pauses == []
        engine.run(worker)
        assert_complete(*streams)


def test_whoever_watches_can_tell_that_a_lost_backend_is_opened() -> None:
    with small_engine(MockLike) as engine:
        submit_many(engine.worker(), 1)
        engine.backend.script = fail_with(BackendLost("unplugged"))
        engine.step()
        calls, start = [], engine.backend.start

        def look(*arguments: Any) -> None:
            calls.append(int(engine.segment.header["in_device_call"]))
            start(*arguments)

        engine.backend.start, engine.backend.script = look, mock_rows
        engine.step()
        assert calls == [layout.CALL_OPENING]
        assert engine.segment.header["in_device_call"] == layout.CALL_NONE


def test_lost_backend_may_fail_to_close() -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 2)
        engine.backend.script = fail_with(BackendLost("unplugged"))

        def cannot_close() -> None:
            raise OSError("no such device")

        engine.backend.close, close = cannot_close, engine.backend.close
        engine.step()
        engine.backend.close, engine.backend.script = close, mock_rows
        engine.run(worker)
        assert_complete(*streams)


# ------------------------------------------------------------------------------------------------------------- errors


def test_request_error_ends_the_sequences_that_it_names_alone() -> None:
    with small_engine(MockLike, max_running_seqs=4, max_batch_tokens=64) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 6)  # four run, two wait
        engine.step()
        engine.backend.script = fail_with(RequestError([streams[1].slot, streams[2].slot], "bad words"))
        engine.step()
        worker.collect()
        for stream in streams[1:3]:
            assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_REQUEST)
            assert stream.token_ids == stream.expected_token_ids(1)
        engine.backend.script = mock_rows
        engine.run(worker)
        assert_complete(streams[0], *streams[3:])
        assert engine.segment.metrics[0]["sequences_failed"] == 2
        engine.assert_nothing_held()


@pytest.mark.parametrize("problem", [ValueError("a bug"), RequestError([23], "a sequence that is not in the plan")])
def test_any_other_exception_ends_the_plans_sequences_and_the_server_lives(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with small_engine(MockLike, max_running_seqs=4, max_batch_tokens=64) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 6)
        engine.step()
        engine.backend.script = fail_with(problem)
        with caplog.at_level(logging.ERROR):
            assert engine.step() == 4
        assert any(record.exc_info for record in caplog.records)
        worker.collect()
        for stream in streams[:4]:
            assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_BACKEND)
            assert stream.token_ids == stream.expected_token_ids(1)
        assert engine.segment.header["in_device_call"] == 0
        engine.backend.script = mock_rows
        engine.run(worker)
        assert_complete(*streams[4:])
        assert engine.backend.starts == 1
        engine.assert_nothing_held()


def test_reasons_of_a_failed_step_do_not_end_the_next_one() -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        (first,) = submit_many(worker, 1)

        def fail_late(plan: BatchPlan) -> None:
            plan.output.finish_reasons[0] = layout.FINISH_STOP
            raise RequestError([first.slot], "on second thoughts")

        engine.backend.script = fail_late
        engine.step()
        engine.backend.script = mock_rows
        (second,) = submit_many(worker, 1)
        engine.run(worker)
        assert_complete(second)


def test_interrupt_is_not_the_backends_fault() -> None:
    with small_engine(MockLike) as engine:
        submit_many(engine.worker(), 1)
        engine.backend.script = fail_with(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.step()


# ------------------------------------------------------------------------------------------------------------- forget


def test_backend_is_told_of_whoever_leaves_before_it_executes_again() -> None:
    calls: list[tuple[str, list[int]]] = []

    class Recorder(MockLike):
        def forget(self, sequences: np.ndarray) -> None:
            calls.append(("forget", sequences.tolist()))

        def execute(self, plan: BatchPlan) -> StepOutput:
            calls.append(("execute", plan.rows["sequence"].tolist()))
            return super().execute(plan)

    with small_engine(Recorder, total_kv_blocks=4, kv_block_size=4, max_running_seqs=2) as engine:
        worker = engine.worker()
        finishing = worker.submit(3, 1, arrival_ns=0)
        engine.step()
        worker.collect()
        assert finishing.is_over
        senior = worker.submit(7, 6, arrival_ns=1)
        junior = worker.submit(7, 6, arrival_ns=2)
        only_waiting = worker.submit(3, 1, arrival_ns=3)
        engine.step()
        engine.step()  # the senior grows into the junior's blocks
        worker.cancel(only_waiting)
        engine.step()
        worker.cancel(senior)
        engine.step()
        assert calls == [
            ("execute", [finishing.slot]),
            ("forget", [finishing.slot]),
            ("execute", [senior.slot, junior.slot]),
            ("forget", [junior.slot]),
            ("execute", [senior.slot]),
            ("execute", [senior.slot]),
            ("forget", [senior.slot]),
            ("execute", [junior.slot]),
        ]


def test_what_ended_last_is_forgotten_though_nothing_is_left_to_compute() -> None:
    with small_engine(ScriptedBackend) as engine:
        stream = engine.worker().submit(3, 1)
        engine.step()
        assert engine.step() == 0
        assert engine.backend.forgotten == [[stream.slot]]
        assert engine.step() == 0
        assert len(engine.backend.forgotten) == 1


@pytest.mark.parametrize("problem", [BackendLost("unplugged"), OSError("no such device")])
def test_backend_that_fails_to_forget_does_not_end_the_server(problem: Exception) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        worker.submit(3, 1)
        engine.step()
        forget = engine.backend.forget
        engine.backend.forget = fail_with(problem)
        assert engine.step() == 0
        engine.backend.forget = forget
        streams = submit_many(worker, 3)
        engine.run(worker)
        assert_complete(*streams)


# ------------------------------------------------------------------------------------------------------------- output


def test_stream_without_news_emits_nothing_and_keeps_its_place() -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        quiet, lively = submit_many(worker, 2)
        engine.backend.script = lambda plan: [
            [] if row["sequence"] == quiet.slot else tokens
            for row, tokens in zip(plan.rows, mock_rows(plan), strict=True)
        ]
        for _ in range(6):
            engine.step()
            worker.collect()
        assert quiet.token_ids == []
        assert_complete(lively)
        engine.backend.script = mock_rows
        engine.run(worker)
        assert_complete(quiet)


def test_speculative_backend_emits_many_tokens_and_never_too_many() -> None:
    with small_engine(with_limits(max_tokens_per_step=4), max_batch_tokens=64) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 3, max_new=10)

        def four_each(plan: BatchPlan) -> list[list[int]]:
            for row in plan.rows:  # all of its places are backed
                record = engine.scheduler.arena.views["sequences"][row["sequence"]]
                most = min(row["context_tokens"] + 4, row["prompt_tokens"] + 10)
                assert record["block_count"] * engine.config.kv_block_size >= most
            pairs = zip(plan.rows["context_tokens"].tolist(), plan.seeds.tolist(), strict=True)
            return [[mock_token(seed, context + k, -1, 0) for k in range(4)] for context, seed in pairs]

        engine.backend.script = four_each
        assert engine.run(worker) == 3  # 4 + 4 + 2
        assert_complete(*streams)
        assert engine.segment.metrics[0]["tokens_generated"] == 30


def test_backend_may_hand_in_an_output_of_its_own() -> None:
    class Own(MockLike):
        def execute(self, plan: BatchPlan) -> StepOutput:
            rows = mock_rows(plan)
            counts = np.array([len(row) for row in rows], np.int32)
            tokens = np.array([token for row in rows for token in row], np.int32)
            return StepOutput(counts, tokens, np.zeros(len(rows), np.int32))

    with small_engine(Own) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 10)
        engine.run(worker)
        assert_complete(*streams)


@pytest.mark.parametrize("count", [-1, 2, 10**6])
def test_a_count_out_of_range_ends_the_plan_and_gives_no_row_anothers_tokens(count: int) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 3)
        engine.step()

        real = engine.backend.execute

        def execute(plan: BatchPlan) -> StepOutput:
            output = real(plan)
            output.counts[1] = count
            return output

        engine.backend.execute = execute  # type: ignore[method-assign]
        engine.step()
        engine.backend.execute = real  # type: ignore[method-assign]
        worker.collect()
        assert [stream.error_code for stream in streams] == [layout.ERROR_BACKEND] * 3
        assert all(stream.token_ids == stream.expected_token_ids(1) for stream in streams)
        engine.assert_nothing_held()


@pytest.mark.parametrize(
    "output",
    [
        None,
        StepOutput(np.array([5], np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32)),
        StepOutput(np.array([10**6], np.int32), np.zeros(10**6, np.int32), np.zeros(1, np.int32)),
    ],
    ids=["none", "tokens missing", "too many tokens"],
)
def test_output_that_does_not_fit_the_plan_ends_the_plans_sequences(output: Any) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        stream = worker.submit(3, 4)
        execute = engine.backend.execute
        engine.backend.execute = lambda plan: output
        engine.step()
        worker.collect()
        assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_BACKEND)
        engine.backend.execute = execute
        streams = submit_many(worker, 2)
        engine.run(worker)
        assert_complete(*streams)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (layout.FINISH_STOP, layout.ERROR_NONE),
        (layout.FINISH_LENGTH, layout.ERROR_NONE),
        (layout.FINISH_ERROR, layout.ERROR_REQUEST),
    ],
)
@pytest.mark.parametrize("emits", [True, False])
def test_backend_may_end_a_sequence_by_its_own_decision(reason: int, error: int, *, emits: bool) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        ended, other = submit_many(worker, 2)
        engine.step()

        def end(plan: BatchPlan) -> list[list[int]]:
            plan.output.finish_reasons[0] = reason
            rows = mock_rows(plan)
            return rows if emits else [[], rows[1]]

        engine.backend.script = end
        engine.step()
        engine.backend.script = mock_rows
        engine.run(worker)
        has_flag = not emits and reason != layout.FINISH_ERROR
        assert ended.reason == (reason | layout.FINISH_WITHOUT_TOKEN if has_flag else reason)
        assert ended.error_code == error
        assert ended.token_ids == ended.expected_token_ids(2 if emits else 1)
        assert_complete(other)
        engine.assert_nothing_held()


def test_backend_may_end_a_sequence_whose_prefill_goes_on() -> None:
    with small_engine(MockLike, max_batch_tokens=8) as engine:
        worker = engine.worker()
        ended, other = worker.submit(20, 4, arrival_ns=1), worker.submit(3, 4, arrival_ns=2, seed=7)

        def end(plan: BatchPlan) -> list[list[int]]:
            plan.output.finish_reasons[0] = layout.FINISH_ERROR
            return [[]]

        engine.backend.script = end
        engine.step()
        engine.backend.script = mock_rows
        engine.run(worker)
        assert (ended.reason, ended.token_ids) == (layout.FINISH_ERROR, [])
        assert_complete(other)
        engine.assert_nothing_held()


# --------------------------------------------------------------------------------------------------------------- plan


def test_plan_gives_a_paged_attention_step_all_that_it_needs() -> None:
    """A KV cache that is written where the plan says must hold, at each step, each sequence's tokens at its places."""
    block_size = 4
    cache: dict[int, tuple[int, int, int]] = {}
    recomputed: list[int] = []

    def attend(plan: BatchPlan) -> list[list[int]]:
        rows = plan.rows
        assert len(plan) == len(rows) > 0
        assert rows["token_offset"].tolist() == [0, *np.cumsum(rows["new_tokens"])[:-1].tolist()]
        assert len(plan.token_ids) == len(plan.positions) == len(plan.kv_slot_mapping) == rows["new_tokens"].sum()
        assert (plan.token_ids.dtype, plan.kv_slot_mapping.dtype) == (np.int32, np.int64)
        for row, sampling, seed in zip(rows, plan.sampling, plan.seeds, strict=True):
            slot, first, context = int(row["sequence"]), int(row["first_position"]), int(row["context_tokens"])
            stream = worker.streams[slot]
            history = prompts[slot] + stream.token_ids
            assert (seed, sampling["temperature"], sampling["top_k"]) == (stream.seed, 0.5 + slot, slot)
            assert (row["prompt_tokens"], row["produced_tokens"]) == (stream.prompt_tokens, len(stream.token_ids))
            assert row["emits"] == (context == len(history))
            part = slice(row["token_offset"], row["token_offset"] + row["new_tokens"])
            assert plan.positions[part].tolist() == list(range(first, context))
            assert plan.token_ids[part].tolist() == history[first:context]
            recomputed.extend([slot] * (first < stream.prompt_tokens < context))
            for token, position, place in zip(
                plan.token_ids[part].tolist(), range(first, context), plan.kv_slot_mapping[part].tolist(), strict=True
            ):
                block = int(plan.block_tables[slot, position // block_size])
                assert place == block * block_size + position % block_size
                cache[place] = (slot, position, token)
            for position in range(context):  # what attention reads
                block = int(plan.block_tables[slot, position // block_size])
                assert cache[block * block_size + position % block_size] == (slot, position, history[position])
        return mock_rows(plan)

    with small_engine(MockLike, total_kv_blocks=9, kv_block_size=block_size, max_batch_tokens=7) as engine:
        worker = engine.worker()
        engine.backend.script = attend
        prompts: dict[int, list[int]] = {}
        streams = []
        for k in range(6):
            ids = [1000 * k + position for position in range(5 + k)]
            stream = worker.submit(
                len(ids), 9, arrival_ns=k, seed=k, prompt_token_ids=ids, temperature=0.5 + k, top_k=k
            )
            assert stream.slot == k
            prompts[k] = ids
            streams.append(stream)
        engine.run(worker)
        assert_complete(*streams)
        assert engine.segment.metrics[0]["preemptions"] > 0
        assert recomputed, "nobody was resumed with prompt and output"


def test_prompt_of_which_only_the_length_is_known_counts_as_zeros() -> None:
    seen: list[list[int]] = []

    def look(plan: BatchPlan) -> list[list[int]]:
        seen.append(plan.token_ids.tolist())
        return mock_rows(plan)

    with small_engine(MockLike) as engine:
        engine.segment.tokens[:] = 77  # what earlier requests have left
        worker = engine.worker()
        stream = worker.submit(3, 2, seed=4)
        engine.backend.script = look
        engine.run(worker)
        assert seen == [[0, 0, 0], stream.token_ids[:1]]


def test_batch_limits_of_a_backend_are_kept() -> None:
    def watch(plan: BatchPlan) -> list[list[int]]:
        seen.append((len(plan), len(plan.token_ids)))
        return mock_rows(plan)

    seen: list[tuple[int, int]] = []
    with small_engine(with_limits(max_sequences=3, max_tokens=5), max_batch_tokens=16) as engine:
        limits = engine.backend.limits
        assert (limits.max_running, limits.max_batch_tokens) == (3, 5)
        assert (limits.num_sequences, limits.max_request_tokens) == (engine.config.num_slots, 64)
        assert (engine.backend.kv.num_blocks, engine.backend.kv.block_size) == (16, 4)
        engine.backend.script = watch
        worker = engine.worker()
        streams = submit_many(worker, 8)
        engine.run(worker)
        assert_complete(*streams)
        assert max(rows for rows, _ in seen) == 3
        assert max(tokens for _, tokens in seen) == 5


def test_limits_of_a_backend_cannot_widen_those_of_the_engine() -> None:
    with small_engine(with_limits(max_sequences=99, max_tokens=999), max_batch_tokens=4) as engine:
        assert engine.backend.limits.max_running == 4  # each takes a token of each step
        assert engine.backend.limits.max_batch_tokens == 4


# -------------------------------------------------------------------------------------------------- health and metrics


def words(engine: SmallEngine) -> dict[str, int]:
    return {name: int(engine.segment.header[name]) for name in ("heartbeat_ns", "step_started_ns", "in_device_call")}


def test_health_words_tell_a_long_step_from_an_idle_scheduler() -> None:
    during: list[dict[str, int]] = []

    def look(plan: BatchPlan) -> list[list[int]]:
        during.append(words(engine))
        return mock_rows(plan)

    with small_engine(MockLike) as engine:
        assert engine.segment.header["longest_step_ns"] == engine.backend.longest_step_ns
        assert engine.segment.header["scheduler_ready"] == 1
        engine.backend.script = look
        submit_many(engine.worker(), 1)
        engine.clock.set_ns(5_000)
        engine.step()
        assert during == [{"heartbeat_ns": 5_000, "step_started_ns": 5_000, "in_device_call": 1}]
        assert words(engine)["in_device_call"] == 0
        while engine.step():
            pass
        engine.clock.set_ns(9_000)
        assert engine.step() == 0
        assert words(engine)["heartbeat_ns"] == 9_000  # it beats in idle too
        assert words(engine)["in_device_call"] == 0


def test_metrics_count_what_was_computed() -> None:
    with small_engine(MockLike, max_running_seqs=2, max_batch_tokens=8, total_kv_blocks=32) as engine:
        worker = engine.worker()
        worker.submit(10, 3, arrival_ns=1)
        worker.submit(4, 3, arrival_ns=2)
        worker.submit(4, 3, arrival_ns=3)
        metrics = engine.segment.metrics[0]
        engine.step()
        assert (metrics["running"], metrics["waiting"], metrics["kv_blocks_free"]) == (1, 2, 29)
        steps = 1 + engine.run(worker)
        assert metrics["steps"] == steps
        assert metrics["tokens_generated"] == 9
        assert metrics["prefill_tokens"] == 18
        assert metrics["decode_tokens"] == 6
        assert metrics["preemptions"] == metrics["sequences_aborted"] == metrics["sequences_failed"] == 0
        assert (metrics["running"], metrics["waiting"], metrics["kv_blocks_free"]) == (0, 0, 32)
        assert (metrics["scheduler_starts"], metrics["kv_blocks_total"]) == (1, 32)


# -------------------------------------------------------------------------------------------------------------- wakes


def test_only_sleeping_workers_with_news_are_rung_and_once() -> None:
    with small_engine(MockLike) as engine:
        busy, asleep, idle = (engine.worker(lane) for lane in range(3))
        assert [bell.wait(0) for bell in engine.bells] == [True] * 4  # each is woken once at the start
        for worker in (busy, asleep):
            submit_many(worker, 2)
        for worker in (asleep, idle):
            worker.collect()  # armed
        engine.step()
        assert [bell.wait(0) for bell in engine.bells] == [False, True, False, False]
        engine.step()
        assert [bell.wait(0) for bell in engine.bells] == [False] * 4  # it was rung already, and has not looked yet
        asleep.collect()
        engine.step()
        assert [bell.wait(0) for bell in engine.bells] == [False, True, False, False]


@pytest.mark.parametrize("failure", [ValueError("a bug"), RequestError([0], "refused")])
def test_ends_outside_of_a_commit_ring_too(failure: Exception) -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        (stream,) = submit_many(worker, 1)
        worker.collect()
        engine.bells[0].wait(0)
        engine.backend.script = fail_with(failure)
        engine.step()
        assert engine.bells[0].wait(0)
        assert worker.collect() == [stream]
        (stream,) = submit_many(worker, 1)
        worker.cancel(stream)
        assert engine.step() == 0
        assert engine.bells[0].wait(0)
        assert worker.collect() == [stream]


# ----------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("steps", range(8))
def test_successor_takes_every_stream_over_wherever_it_stands(steps: int) -> None:
    with small_engine(MockLike, total_kv_blocks=6, max_running_seqs=3) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 5)
        for _ in range(steps):
            engine.step()
        waiting = engine.gauge("running_count") + engine.gauge("waiting_count") if steps else 5
        assert engine.start_scheduler() == waiting
        engine.run(worker)
        assert_complete(*streams)
        assert engine.segment.metrics[0]["scheduler_starts"] == 2
        engine.assert_nothing_held()


def test_successor_of_a_backend_that_is_not_resumable_ends_what_was_emitted() -> None:
    with small_engine(NotResumable, max_running_seqs=1) as engine:
        worker = engine.worker()
        begun, waiting = submit_many(worker, 2)
        engine.step()
        engine.start_scheduler()
        engine.run(worker)
        assert (begun.reason, begun.error_code) == (layout.FINISH_ERROR, layout.ERROR_LOST)
        assert begun.token_ids == begun.expected_token_ids(1)
        assert_complete(waiting)


def test_closing_leaves_the_streams_to_a_successor() -> None:
    with small_engine(MockLike) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 3)
        engine.step()
        engine.scheduler.close()
        engine.scheduler.close()
        assert engine.backend.closes == 1
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
