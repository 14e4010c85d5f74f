"""The known faults of the first-generation implementation, each with the right behaviour (DESIGN, section 4)."""

from __future__ import annotations

import pytest

from ironbatch import layout
from ironbatch.backends import mock
from ironbatch.backends.base import BatchPlan
from ironbatch.kernels.allocator import BlockAllocator, OutOfBlocks
from tests.support import ScriptedBackend, SmallEngine, small_engine

EOS = 9


def covered_tokens(engine: SmallEngine, slot: int) -> int:
    """Positions of a sequence that its blocks back."""
    record = engine.scheduler.arena.views["sequences"][slot]
    return int(record["block_count"]) * engine.config.kv_block_size


def test_no_token_is_decoded_past_the_end_of_the_last_block() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=16, kv_block_size=4) as engine:
        worker = engine.worker()
        stream = worker.submit(4, 20)  # the prompt fills its block: the very first token needs another one

        def check_rows(plan: BatchPlan) -> None:
            for row in plan.rows:
                assert covered_tokens(engine, row["sequence"]) > row["context_tokens"]  # the emitted token's place too
                assert -1 < plan.kv_slot_mapping.min() <= plan.kv_slot_mapping.max() < 16 * 4

        engine.backend.script = check_rows
        while engine.step():
            worker.collect()
            held = covered_tokens(engine, stream.slot)
            assert stream.is_over or held >= stream.prompt_tokens + len(stream.token_ids)
        assert len(stream.token_ids) == 20


def test_request_that_exactly_fills_the_pool_runs_to_its_end_without_preemption() -> None:
    with small_engine(total_kv_blocks=4, kv_block_size=4, max_model_len=64) as engine:
        worker = engine.worker()
        stream = worker.submit(7, 9, seed=3)  # 16 positions
        steps = engine.run(worker)
        assert stream.reason == layout.FINISH_LENGTH
        assert stream.token_ids == stream.expected_token_ids(9)
        assert engine.segment.metrics[0]["preemptions"] == 0
        assert steps == 9
        engine.assert_nothing_held()


def test_end_of_sequence_on_the_step_that_preempts_is_not_lost() -> None:
    def make_backend(config: object) -> ScriptedBackend:
        backend = ScriptedBackend(config)
        backend.eos_token_id = EOS
        return backend

    with small_engine(make_backend, total_kv_blocks=4, kv_block_size=2) as engine:
        worker = engine.worker()
        senior = worker.submit(3, 5, arrival_ns=1)
        junior = worker.submit(3, 5, arrival_ns=2)
        engine.step()  # both hold two blocks, the pool is empty, and both have four tokens
        assert engine.gauge("free_count") == 0
        engine.backend.script = lambda plan: [[EOS]]
        assert engine.step() == 1  # the senior grows, for which the junior is preempted, and then ends
        assert engine.gauge("preempted_count") == 1
        worker.collect()
        assert (senior.reason, senior.token_ids) == (layout.FINISH_STOP, [1, EOS])
        assert (junior.reason, junior.token_ids) == (layout.FINISH_NONE, [1])
        engine.backend.script = ScriptedBackend.script
        engine.run(worker)
        assert (junior.reason, junior.token_ids) == (layout.FINISH_LENGTH, [1] * 5)
        engine.assert_nothing_held()


def test_four_sequences_preempted_in_one_step_return_in_their_order() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=8, kv_block_size=2) as engine:
        worker = engine.worker()
        streams = [worker.submit(1, 7, arrival_ns=k) for k in range(8)]
        engine.step()  # eight sequences of two positions, a block each, fill the pool
        assert engine.gauge("free_count") == 0
        engine.step()  # each wants a second block: the four seniors take those of the four juniors
        assert engine.gauge("preempted_count") == 4
        assert engine.running() == [stream.slot for stream in streams[:4]]
        assert engine.waiting() == [stream.slot for stream in streams[4:]]
        engine.run(worker)
        assert all(stream.token_ids == [1] * 7 for stream in streams)


def test_request_larger_than_the_pool_does_not_wedge_the_queue() -> None:
    with small_engine(total_kv_blocks=4, kv_block_size=4, max_model_len=64) as engine:
        worker = engine.worker()
        too_large = worker.submit(10, 7, arrival_ns=1)  # 17 positions in a pool of 16
        behind = worker.submit(3, 4, arrival_ns=2, seed=5)
        engine.run(worker)
        assert (too_large.reason, too_large.error_code) == (layout.FINISH_ERROR, layout.ERROR_INVALID)
        assert behind.token_ids == behind.expected_token_ids(4)
        engine.assert_nothing_held()


def test_fork_onto_a_live_sequence_is_refused_and_leaks_nothing() -> None:
    blocks = BlockAllocator(num_sequences=4, num_blocks=8, block_size=4, max_tokens=32)
    blocks.reserve(0, 8)
    blocks.reserve(1, 4)
    with pytest.raises(ValueError, match="sequence 1 is live"):
        blocks.fork(0, 1, 8)
    with pytest.raises(ValueError, match="sequence 0 is live"):
        blocks.fork(0, 0, 8)
    assert blocks.free_count == 5
    assert (blocks.release(0), blocks.release(1)) == (2, 1)
    assert blocks.free_count == 8


def test_fork_copies_the_partial_last_block_instead_of_sharing_it() -> None:
    blocks = BlockAllocator(num_sequences=4, num_blocks=4, block_size=4, max_tokens=32)
    blocks.reserve(0, 6)
    copy = blocks.fork(0, 1, 6)
    parent, child = blocks.table(0).tolist(), blocks.table(1).tolist()
    assert copy == (parent[1], child[1])
    assert child[0] == parent[0]
    assert child[1] != parent[1]
    assert [blocks.refcount(block) for block in (parent[0], parent[1], child[1])] == [2, 1, 1]
    blocks.reserve(2, 4)
    with pytest.raises(OutOfBlocks):
        blocks.fork(0, 3, 6)
    assert len(blocks.table(3)) == 0


def test_mock_waits_once_a_step_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    now_ns = 1_000_000
    monkeypatch.setattr(mock.time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(mock, "sleep_until", waits.append)
    with small_engine(mock_token_latency_us=200, total_kv_blocks=64) as engine:
        worker = engine.worker()
        streams = [worker.submit(1, 3) for _ in range(8)]
        engine.step()
        engine.step()
        assert waits == [now_ns + 200_000] * 2
        worker.collect()
        assert all(len(stream.token_ids) == 2 for stream in streams)
