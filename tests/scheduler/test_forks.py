"""Several choices of one prompt: one prefill, the fewest copies, all or none, and nothing left however they end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.base import BatchPlan
from ironbatch.errors import BackendLost, RequestError
from tests.scheduler.helpers import (
    Plan,
    RecordingBackend,
    ask,
    assert_all_given_back,
    assert_complete,
    available,
    cover,
    ids,
    metric,
    plans,
    reason,
    refcounts,
    slots,
    table,
    waited_ns,
)
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

BLOCK = 4
COUNTS = [2, 3, 8]
PROMPTS = sorted({1, 2, *(BLOCK * blocks + off for blocks in (1, 2, 3) for off in (-1, 0, 1))})

ROOMY = {
    "kv_block_size": BLOCK,
    "total_kv_blocks": 128,
    "max_batch_tokens": 64,
    "max_running_seqs": 10,
    "mock_kv": True,  # a token is right only if all that it should read was there
}


def group(worker: FakeWorker, prompt: int, max_new: int, n: int, **fields: Any) -> list[Stream]:
    """`n` choices of a prompt of `prompt` token ids."""
    fields = {"seed": 11, "prompt_token_ids": ids(prompt)} | fields
    return worker.submit_group(prompt, max_new, n, **fields)


def blocks_of_group(prompt: int, max_new: int, n: int, block_size: int = BLOCK) -> int:
    """Blocks for the parent up to its first token, and each fork's own part."""
    all_of_one = cover(min(prompt + 1, prompt + max_new), block_size)
    return all_of_one + (n - 1) * (all_of_one - (prompt - 1) // block_size)


def copies(engine: SmallEngine) -> list[tuple[int, int]]:
    return [copy for plan in plans(engine) for copy in plan.copies]


def run_to_the_fork(engine: SmallEngine) -> None:
    """Step until no running fork waits for its parent any more, and every copy is owed still."""
    engine.step()
    while engine.gauge("pending_forks"):
        engine.step()


# ---------------------------------------------------------------------------------------------------- the usual course


@pytest.mark.parametrize("no_prefix_cache", [False, True])
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_choices_are_right_after_one_prefill(prompt: int, n: int, *, no_prefix_cache: bool) -> None:
    with small_engine(RecordingBackend, **ROOMY, no_prefix_cache=no_prefix_cache) as engine:
        streams = group(worker := engine.worker(), prompt, 9, n)
        engine.run(worker)
        assert_complete(*streams)
        assert streams[0].seed == 11
        assert len({tuple(stream.token_ids) for stream in streams}) == n
        rows = [row for plan in plans(engine) for row in plan.rows]
        # Every position of the prompt but its last is computed once, by the parent; the last by each choice.
        assert sum(min(row.context, prompt - 1) - row.first for row in rows if row.first < prompt - 1) == prompt - 1
        assert {row.sequence for row in rows if row.first < prompt - 1} <= {streams[0].slot}
        assert sum(row.first <= prompt - 1 < row.context for row in rows) == n
        assert prompt == 1 or metric(engine, "prefill_tokens") == prompt
        assert_all_given_back(engine)


@pytest.mark.parametrize("batch", [10, 64])
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_block_is_copied_only_if_it_holds_a_position_before_the_last(prompt: int, n: int, batch: int) -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": batch})) as engine:
        streams = group(worker := engine.worker(), prompt, 9, n)
        engine.run(worker)
        assert_complete(*streams)
        parent, *forks = streams
        shared = (prompt - 1) // BLOCK
        is_partial = (prompt - 1) % BLOCK != 0
        history = plans(engine)
        assert len(copies(engine)) == metric(engine, "copied_blocks") == (n - 1 if is_partial else 0)
        forked_at = next(k for k, plan in enumerate(history) if (row := plan.row_of(parent)) and row.emits)
        of_parent = history[forked_at].row_of(parent).blocks
        for fork in forks:
            first = next(k for k, plan in enumerate(history) if plan.row_of(fork))
            row = history[first].row_of(fork)
            assert first > forked_at or prompt == 1  # then there is nothing to wait for
            assert (row.first, row.new, row.context, row.emits) == (prompt - 1, 1, prompt, True)
            assert row.blocks[:shared] == of_parent[:shared]
            assert not set(row.blocks[shared:]) & set(of_parent)
            if is_partial:
                assert (of_parent[shared], row.blocks[shared]) in history[first].copies
        assert all(len(plan.copies) <= len(plan.rows) for plan in history)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_parent_may_finish_with_its_first_token(prompt: int, n: int) -> None:
    """What is to be copied from it stays, though it gives up its blocks before the copy is made."""
    with small_engine(RecordingBackend, **ROOMY) as engine:
        streams = group(worker := engine.worker(), prompt, 1, n)
        engine.step()
        worker.collect()
        assert streams[0].is_over
        assert prompt == 1 or not any(stream.is_over for stream in streams[1:])
        if (prompt - 1) % BLOCK:
            assert engine.gauge("owed_copies") == n - 1
        other = ask(worker, ids(30, 9_000), 2, arrival_ns=5)  # takes whatever is wrongly free
        engine.run(worker)
        assert_complete(other, *streams)
        assert_all_given_back(engine)


def test_choices_are_independent_of_what_the_others_generate() -> None:
    with small_engine(RecordingBackend, **ROOMY) as engine:
        worker = engine.worker()
        alone = group(worker, 10, 12, 1)
        engine.run(worker)
        together = group(worker, 10, 12, 4)
        engine.run(worker)
        assert_complete(*alone, *together)
        assert alone[0].token_ids == together[0].token_ids
        for stream in together[1:]:
            single = ask(worker, ids(10), 12, seed=stream.seed)
            engine.run(worker)
            assert single.token_ids == stream.token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_block_that_is_shared_is_ever_written(prompt: int) -> None:
    with small_engine(RecordingBackend, **ROOMY) as engine:

        def look(plan: BatchPlan) -> None:
            references = refcounts(engine)
            sources = [source for source, _ in plans(engine)[-1].copies]  # one reference each, and copied by now
            for row in plans(engine)[-1].rows:
                for position in range(row.first, row.context):
                    block = row.blocks[position // BLOCK]
                    found.append(references[block] == 1 + sources.count(block))

        worker = engine.worker()
        found: list[bool] = []
        engine.backend.before = look
        streams = group(worker, prompt, 9, 5)
        engine.run(worker)
        assert found
        assert all(found), "a block of two is written"
        assert_complete(*streams)


def test_a_group_whose_prompt_is_cached_computes_what_is_not() -> None:
    with small_engine(RecordingBackend, **ROOMY) as engine:
        worker = engine.worker()
        ask(worker, ids(13), 1)
        engine.run(worker)
        since = len(plans(engine))
        streams = group(worker, 13, 5, 3)
        engine.run(worker)
        assert_complete(*streams)
        prompt_rows = [row for plan in plans(engine)[since:] for row in plan.rows if row.context <= 13]
        assert sorted((row.first, row.new) for row in prompt_rows) == [(12, 1)] * 3


# ------------------------------------------------------------------------------------------------------- all or none


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_group_is_admitted_only_with_places_for_all(n: int, taken: int) -> None:
    options = ROOMY | {"max_running_seqs": 4, "max_batch_tokens": 8}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        singles = [ask(worker, ids(2, 100 * k), 30, arrival_ns=1, seed=k) for k in range(1, taken + 1)]
        engine.step()
        streams = group(worker, 20, 4, n, arrival_ns=2)  # three chunks and more
        behind = [ask(worker, ids(2, 500 + 10 * k), 2, arrival_ns=3) for k in range(4)]
        engine.step()
        fits = taken + n <= 4
        assert (engine.waiting()[:n] == slots(streams)) == (not fits)
        assert engine.gauge("running_count") == (taken + n if fits else taken)
        if not fits:
            assert reason(engine) == "slots"
            assert engine.waiting()[n:] == slots(behind)  # nobody passes the head
        while engine.step():
            worker.collect()
            assert engine.gauge("running_count") <= 4
        worker.collect()
        assert_complete(*singles, *streams, *behind)
        assert_all_given_back(engine)


@pytest.mark.parametrize("prompt", [3, 8, 9, 12, 17])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_group_is_admitted_only_with_blocks_for_all(prompt: int, n: int, spare: int) -> None:
    needed = blocks_of_group(prompt, 1, n)
    holder_blocks = 2
    options = ROOMY | {"total_kv_blocks": needed + holder_blocks + spare, "no_prefix_cache": True}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        holder = ask(worker, ids(5, 7_000), 3, arrival_ns=1)
        engine.step()
        assert available(engine) == needed + spare
        streams = group(worker, prompt, 1, n, arrival_ns=2)
        during: list[int] = []
        engine.backend.before = lambda plan: during.append(available(engine))
        engine.step()
        fits = spare >= 0
        assert (engine.waiting() == slots(streams)) == (not fits)
        assert during == [spare if fits else needed + spare]  # held, or promised
        if not fits:
            assert reason(engine) == "blocks"
            assert engine.gauge("reserved_count") == 0
        engine.run(worker)
        assert_complete(holder, *streams)
        assert metric(engine, "preemptions") == 0
        assert_all_given_back(engine)


def test_nobody_takes_what_is_promised_to_forks() -> None:
    """During the parent's chunks others come and grow; when they are over every fork has its blocks."""
    options = ROOMY | {"max_batch_tokens": 10, "total_kv_blocks": 24}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        grows = ask(worker, ids(3, 7_000), 40, arrival_ns=1)
        engine.step()
        streams = group(worker, 30, 2, 6, arrival_ns=2)
        engine.step()
        assert engine.gauge("pending_forks") == 5
        assert engine.gauge("reserved_count") > 0
        others = [ask(worker, ids(5, 8_000 + 100 * k), 3, arrival_ns=3 + k) for k in range(6)]
        while engine.gauge("pending_forks"):
            assert available(engine) >= 0
            engine.step()
            worker.collect()
        assert all(len(table(engine, stream)) >= cover(30, BLOCK) for stream in streams if not stream.is_over)
        engine.run(worker)
        assert_complete(grows, *streams, *others)
        assert_all_given_back(engine)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_group_beyond_the_empty_engine_does_not_stay_at_the_head_for_ever(n: int) -> None:
    """The web worker answers 400. What gets past it is refused, or gets its choices without being a group."""
    needed = blocks_of_group(13, 3, n)
    with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": needed - 1})) as engine:
        worker = engine.worker()
        too_many = group(worker, 13, 3, n, arrival_ns=1)
        behind = ask(worker, ids(3), 2, arrival_ns=2)
        engine.run(worker)
        assert_complete(behind, *(stream for stream in too_many if stream.error_code != layout.ERROR_INVALID))
        assert_all_given_back(engine)


def test_group_that_just_fits_the_empty_engine_runs() -> None:
    for n in COUNTS:
        with small_engine(RecordingBackend, **(ROOMY | {"total_kv_blocks": blocks_of_group(13, 3, n)})) as engine:
            worker = engine.worker()
            streams = group(worker, 13, 3, n)
            engine.run(worker)
            assert_complete(*streams)
            assert_all_given_back(engine)


# ------------------------------------------------------------------------------------------------------------- cancels


@settings(max_examples=80)
@given(
    n=st.sampled_from(COUNTS),
    prompt=st.sampled_from(PROMPTS),
    max_new=st.sampled_from([1, 2, 7]),
    batch=st.sampled_from([10, 64]),
    cancels=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=12),
    has_cache=st.booleans(),
)
@example(n=3, prompt=7, max_new=7, batch=64, cancels=[(0, 0)], has_cache=True)  # the parent, before it has begun
@example(n=3, prompt=13, max_new=7, batch=10, cancels=[(1, 0)], has_cache=True)  # during its prefill
@example(n=3, prompt=7, max_new=7, batch=64, cancels=[(1, 1)], has_cache=True)  # a fork that owes a copy
@example(n=3, prompt=7, max_new=7, batch=64, cancels=[(1, 0), (1, 1), (1, 2)], has_cache=False)
def test_any_choices_may_be_cancelled_at_any_time(
    n: int, prompt: int, max_new: int, batch: int, cancels: list[tuple[int, int]], *, has_cache: bool
) -> None:
    options = ROOMY | {"max_batch_tokens": batch, "no_prefix_cache": not has_cache}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams = group(worker, prompt, max_new, n)
        other = ask(worker, ids(6, 9_000), 5, arrival_ns=3)
        cancelled = set()
        for step in range(7):
            for when, index in cancels:
                if when == step and index < n and index not in cancelled and not streams[index].is_over:
                    worker.cancel(streams[index])
                    cancelled.add(index)
            engine.step()
            worker.collect()
        engine.run(worker)
        for index, stream in enumerate(streams):
            if index in cancelled and stream.reason == layout.FINISH_CANCELLED:
                assert stream.token_ids == stream.expected_token_ids(len(stream.token_ids))
            else:
                assert_complete(stream)
        assert_complete(other)
        assert_all_given_back(engine)


def test_death_of_the_worker_frees_the_whole_group_wherever_it_stands() -> None:
    for steps in range(6):
        with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10})) as engine:
            doomed, other = engine.worker(0), engine.worker(1)
            group(doomed, 15, 9, 3)
            stream = ask(other, ids(5), 9, seed=4)
            for _ in range(steps):
                engine.step()
            doomed.die()
            engine.run(other)
            assert_complete(stream)
            assert_all_given_back(engine)


# -------------------------------------------------------------------------------------------------- errors and losses


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("who", [0, 1, 2])
def test_error_of_one_choice_leaves_the_others(who: int, step: int) -> None:
    """Also of the parent, in any chunk of its prefill: then its forks compute their own."""
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10})) as engine:
        worker = engine.worker()
        streams = group(worker, 25, 5, 3)  # three chunks, then the forks
        for _ in range(step):
            engine.step()
            worker.collect()
        raised: list[int] = []

        def refuse(plan: BatchPlan) -> None:
            if streams[who].slot in plan.rows["sequence"] and not raised:
                raised.append(streams[who].slot)
                raise RequestError([streams[who].slot], "refused")

        engine.backend.before = refuse
        engine.run(worker)
        assert raised
        assert (streams[who].reason, streams[who].error_code) == (layout.FINISH_ERROR, layout.ERROR_REQUEST)
        assert_complete(*(stream for index, stream in enumerate(streams) if index != who))
        assert metric(engine, "sequences_failed") == 1
        assert_all_given_back(engine)


@pytest.mark.parametrize("step", range(6))
def test_failure_of_a_whole_plan_ends_who_was_in_it_and_nobody_else(step: int) -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10})) as engine:
        worker = engine.worker()
        streams = group(worker, 25, 5, 3)
        for _ in range(step):
            engine.step()

        def fail(plan: BatchPlan) -> None:
            raise ValueError("a bug")

        engine.backend.before = fail
        engine.step()
        engine.backend.before = None
        in_plan = plans(engine)[-1].sequences
        engine.run(worker)
        for stream in streams:
            if stream.slot in in_plan:
                assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_BACKEND)
            else:
                assert_complete(stream)
        assert_all_given_back(engine)


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("prompt", [1, 12, 25])
def test_group_survives_a_lost_backend_wherever_it_stands(prompt: int, step: int) -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10})) as engine:
        worker = engine.worker()
        streams = group(worker, prompt, 9, 3)
        for _ in range(step):
            engine.step()

        def lose(plan: BatchPlan) -> None:
            raise BackendLost("unplugged")

        engine.backend.before = lose
        engine.step()
        engine.backend.before = None
        assert engine.gauge("reserved_count") == engine.gauge("owed_copies") == engine.gauge("pending_forks") == 0
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("prompt", [1, 12, 25])
def test_group_survives_the_death_of_its_scheduler_wherever_it_stands(prompt: int, step: int) -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10})) as engine:
        worker = engine.worker()
        streams = group(worker, prompt, 9, 3)
        for _ in range(step):
            engine.step()
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


# --------------------------------------------------------------------------------------------------------- preemptions


@pytest.mark.parametrize("displaced", [1, 2, 3])
def test_fork_that_waits_may_be_displaced_and_goes_its_own_way(displaced: int) -> None:
    """In the very step that completes its parent's prefill: a moment later it would have forked."""
    options = ROOMY | {"max_running_seqs": 4, "max_batch_tokens": 20}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams = group(worker, 30, 5, 4, priority=7)
        engine.step()
        assert engine.gauge("pending_forks") == 3
        high = [ask(worker, ids(2, 9_000 + 10 * k), 8, priority=-8, arrival_ns=5 + k) for k in range(displaced)]
        engine.step()
        assert engine.running() == [*slots(high), *slots(streams[: 4 - displaced])]
        assert engine.waiting() == slots(streams[4 - displaced :])
        assert engine.gauge("pending_forks") == engine.gauge("reserved_count") == 0
        engine.run(worker)
        assert_complete(*high, *streams)
        assert metric(engine, "preemptions") == displaced
        assert_all_given_back(engine)


def test_growth_may_preempt_a_fork_that_waits() -> None:
    """What it gives is what was promised to it."""
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 10, "total_kv_blocks": 12})) as engine:
        worker = engine.worker()
        grows = ask(worker, ids(5, 7_000), 40, arrival_ns=1)
        engine.step()
        streams = group(worker, 30, 5, 3, arrival_ns=2)  # 8 blocks, and 1 for each fork
        engine.step()
        engine.step()
        assert available(engine) == 0
        assert engine.gauge("reserved_count") == engine.gauge("pending_forks") == 2
        engine.step()
        assert engine.gauge("preempted_count") == 1
        assert engine.running() == [grows.slot, *slots(streams[:2])]
        assert engine.waiting() == [streams[2].slot]
        assert engine.gauge("reserved_count") == engine.gauge("pending_forks") == 1
        engine.run(worker)
        assert_complete(grows, *streams)
        assert_all_given_back(engine)


@pytest.mark.parametrize("steps", range(1, 6))
def test_whole_group_may_be_preempted_wherever_it_stands(steps: int) -> None:
    options = ROOMY | {"max_running_seqs": 4, "max_batch_tokens": 16}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams = group(worker, 21, 9, 4, priority=7)
        for _ in range(steps):
            engine.step()
        high = [ask(worker, ids(1, 9_000 + 10 * k), 8, priority=-8, arrival_ns=5 + k) for k in range(4)]
        engine.step()
        assert sorted(engine.running()) == sorted(slots(high))
        assert engine.gauge("reserved_count") == engine.gauge("pending_forks") == engine.gauge("owed_copies") == 0
        engine.run(worker)
        assert_complete(*high, *streams)
        assert_all_given_back(engine)


@settings(max_examples=40)
@given(
    groups=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 20), st.integers(1, 16), st.integers(-8, 7)),
        min_size=1,
        max_size=5,
    ),
    pool=st.integers(26, 40),
    batch=st.sampled_from([8, 20]),
    restart=st.integers(0, 30),
)
def test_groups_over_a_small_pool_all_complete(
    groups: list[tuple[int, int, int, int]], pool: int, batch: int, restart: int
) -> None:
    """Growth, displacement and a new scheduler between all of it."""
    options = ROOMY | {"total_kv_blocks": pool, "max_batch_tokens": batch, "max_running_seqs": 6}
    with small_engine(RecordingBackend, **options) as engine:
        worker = engine.worker()
        streams: list[Stream] = []
        for k, (n, prompt, max_new, priority) in enumerate(groups):
            token_ids = ids(prompt, 1_000 * (k % 2))
            streams += group(
                worker, prompt, max_new, n, seed=k, priority=priority, arrival_ns=k, prompt_token_ids=token_ids
            )
            engine.step()
            worker.collect()
        for _ in range(restart):
            engine.step()
            worker.collect()
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


# -------------------------------------------------------------------------------------------------------------- waiting


def test_every_choice_has_waited_until_its_group_was_admitted() -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_running_seqs": 3})) as engine:
        worker = engine.worker()
        engine.clock.set_ns(10_000)
        holder = ask(worker, ids(2), 4, arrival_ns=10_000)
        engine.step()
        streams = group(worker, 9, 4, 3, arrival_ns=10_000)
        while not holder.is_over:
            engine.clock.advance_ns(1_000)
            engine.step()
            worker.collect()
        engine.clock.advance_ns(1_000)
        admitted_ns = engine.clock.now_ns()
        engine.step()
        assert engine.running() == slots(streams)
        while engine.step():
            engine.clock.advance_ns(1_000)
        for stream in streams:
            assert sum(waited_ns(engine, stream).values()) == admitted_ns - 10_000
        worker.collect()
        assert_complete(*streams)


def test_decodes_of_others_go_on_beside_a_group() -> None:
    with small_engine(RecordingBackend, **(ROOMY | {"max_batch_tokens": 12})) as engine:
        worker = engine.worker()
        decodes = ask(worker, ids(2, 9_000), 30, arrival_ns=1)
        engine.step()
        group(worker, 30, 4, 3, arrival_ns=2)
        run_to_the_fork(engine)
        history: list[Plan] = plans(engine)
        assert all(plan.row_of(decodes) for plan in history)


@pytest.mark.parametrize("over", range(4), ids="{} choices over before".format)
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_dead_workers_request_is_lost_once(over: int, *, is_rebuilt: bool) -> None:
    """However many of its choices still live, whichever they are; two requests of the same time are two."""
    with small_engine() as engine:
        worker = engine.worker()
        first = worker.submit_group(5, 20, 3)
        worker.submit_group(5, 20, 2)
        engine.step()
        for stream in first[:over]:
            worker.cancel(stream)
        engine.step()
        worker.collect()
        worker.die()
        if is_rebuilt:
            engine.scheduler.close()
            engine.start_scheduler()
        engine.step()
        assert engine.segment.metrics[0]["requests_lost"] == 1 + (over < 3)
