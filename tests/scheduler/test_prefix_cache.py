"""The prefix cache: what is found is right, all that should be found is, and nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ironbatch.backends.base import BatchPlan
from ironbatch.errors import BackendLost
from tests.scheduler.helpers import (
    RecordingBackend,
    ask,
    assert_all_given_back,
    assert_complete,
    available,
    cached,
    complete,
    cover,
    drop_from_cache,
    evictable,
    fared,
    first_row,
    ids,
    metric,
    plans,
    reason,
    refcounts,
    salted,
    table,
)
from tests.support import FakeWorker, SmallEngine, small_engine

ROOMY = {"total_kv_blocks": 256, "max_batch_tokens": 256, "max_model_len": 256}


@contextmanager
def cache_engine(**options: Any) -> Iterator[tuple[SmallEngine, FakeWorker]]:
    """A roomy engine, and its one worker."""
    with small_engine(RecordingBackend, **(ROOMY | options)) as engine:
        yield engine, engine.worker()


# ----------------------------------------------------------------------------------------------------- what is matched


@settings(max_examples=25)
@given(length=st.integers(1, 100), block_size=st.sampled_from([1, 2, 4, 16]), batch=st.integers(1, 128))
@example(length=31, block_size=16, batch=128)
@example(length=32, block_size=16, batch=128)
@example(length=33, block_size=16, batch=128)
def test_identical_prompt_is_found_in_full_blocks_but_never_whole(length: int, block_size: int, batch: int) -> None:
    """32 tokens in blocks of 16: 16 are found, for one at least must be computed; of 33, 32 are."""
    found = (length - 1) // block_size * block_size
    with cache_engine(kv_block_size=block_size, max_batch_tokens=batch) as (engine, worker):
        assert complete(engine, worker, ids(length)) == 0
        since = len(plans(engine))
        second = ask(worker, ids(length), 3, seed=2)
        engine.run(worker)
        assert_complete(second)
        assert fared(engine, second)["cached_tokens"] == found
        assert first_row(engine, second, since).first == found
        assert metric(engine, "prefix_query_tokens") == 2 * length
        assert metric(engine, "prefix_hit_tokens") == found
        computed = sum(row.new for plan in plans(engine)[since:] for row in plan.rows)
        assert computed == length - found + 2  # two decodes
        assert_all_given_back(engine)


def test_nothing_is_found_without_the_cache() -> None:
    with cache_engine(no_prefix_cache=True) as (engine, worker):
        assert [complete(engine, worker, ids(33)) for _ in range(3)] == [0, 0, 0]
        assert metric(engine, "prefix_hit_tokens") == 0
        assert engine.gauge("free_count") == engine.config.total_kv_blocks
        assert metric(engine, "kv_blocks_cached") == 0


def test_generated_tokens_are_found_by_whoever_goes_on_from_them() -> None:
    """A conversation's next turn: prompt and answer of the one before, and more."""
    with cache_engine() as (engine, worker):
        turn = ids(10)
        for k in range(4):
            stream = ask(worker, turn, 7, seed=k)
            engine.run(worker)
            assert_complete(stream)
            computed = len(turn) + 6  # the last token's KV was never computed
            turn = [*turn, *stream.token_ids, *ids(3, 9_000)]
            again = ask(worker, turn, 1)
            engine.run(worker)
            assert fared(engine, again)["cached_tokens"] == computed // 4 * 4


def test_the_gauges_tell_what_is_free_and_what_of_it_is_cached() -> None:
    with cache_engine() as (engine, worker):
        complete(engine, worker, ids(33))
        engine.step()
        assert engine.gauge("evictable_count") == metric(engine, "kv_blocks_cached") == 8
        assert metric(engine, "kv_blocks_free") == engine.config.total_kv_blocks
        assert cached(engine) == set(evictable(engine))


# ------------------------------------------------------------------------------------------------------ against a model


@dataclass
class Cache:
    """What a cache without end must find: every chain of full blocks that was ever computed."""

    block_size: int
    chains: set[tuple[tuple[int, int], tuple[int, ...]]] = field(default_factory=set)

    def hit(self, salt: tuple[int, int], tokens: list[int]) -> int:
        size = self.block_size
        blocks = 0
        while (blocks + 1) * size < len(tokens) and (salt, tuple(tokens[: (blocks + 1) * size])) in self.chains:
            blocks += 1
        return blocks * size

    def add(self, salt: tuple[int, int], tokens: list[int]) -> None:
        for blocks in range(1, len(tokens) // self.block_size + 1):
            self.chains.add((salt, tuple(tokens[: blocks * self.block_size])))


# Few different tokens, so that prefixes meet; 65 and 321 are equal modulo 256, 2**31 - 1 and 0 in their low bits' sign.
TOKENS = st.sampled_from([65, 321, 0, 2**31 - 1])
SALTS = st.sampled_from([(0, 0), (1, 0), (0, 1), (1, 1), (-1, 2**62)])


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(SALTS, st.lists(TOKENS, min_size=1, max_size=14), st.integers(1, 6), st.integers(0, 3)),
        min_size=2,
        max_size=14,
    ),
    block_size=st.sampled_from([1, 2, 4]),
    collide=st.booleans(),
)
def test_exactly_what_was_computed_is_found(
    requests: list[tuple[tuple[int, int], list[int], int, int]], block_size: int, *, collide: bool
) -> None:
    """With all hashes equal too: no wrong hit, and no right one is missed."""
    model = Cache(block_size)
    known: list[list[int]] = []
    with cache_engine(kv_block_size=block_size, total_kv_blocks=1024, mock_kv=True) as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        for (salt_a, salt_b), tokens, max_new, back in requests:
            prompt = known[-back] + tokens if 0 < back <= len(known) else tokens
            prompt = prompt[:200]
            stream = ask(worker, prompt, max_new, seed=3, **salted(salt_a, salt_b))
            engine.run(worker)
            assert_complete(stream)
            assert fared(engine, stream)["cached_tokens"] == model.hit((salt_a, salt_b), prompt)
            context = prompt + stream.token_ids
            model.add((salt_a, salt_b), context[:-1])
            known.append(context)
        assert_all_given_back(engine)


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 0), (7, 9)), ((7, 9), (0, 0)), ((7, 9), (7, 10)), ((7, 9), (8, 9)), ((7, 9), (9, 7)), ((1, 0), (0, 1))],
)
def test_salts_part_the_cache(first: tuple[int, int], second: tuple[int, int], *, collide: bool) -> None:
    """Whoever measures times learns nothing of the prompts of another salt."""
    with cache_engine() as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        hits = [complete(engine, worker, ids(33), **salted(a, b)) for a, b in (first, second, first, second)]
        assert hits == [0, 0, 32, 32]


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("place", [0, 1, 15, 16, 31])
def test_token_ids_that_agree_modulo_256_are_different(place: int, *, collide: bool) -> None:
    one, other = [65] * 33, [65] * 33
    other[place] = 321
    with cache_engine(kv_block_size=16) as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        assert [complete(engine, worker, prompt) for prompt in (one, other, one, other)] == [
            0,
            place // 16 * 16,
            32,
            32,
        ]


@pytest.mark.parametrize("collide", [False, True])
def test_prompt_of_which_only_the_length_is_known_never_takes_part(*, collide: bool) -> None:
    """Its tokens count as zeros, and are no zeros: neither does it find a prompt of zeros, nor is it found."""
    with cache_engine() as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        for _ in range(2):
            for k in range(2):
                stream = worker.submit(33, 2, seed=k)
                engine.run(worker)
                assert_complete(stream)
                assert fared(engine, stream)["cached_tokens"] == 0
            if metric(engine, "prefix_hit_tokens") == 0:
                assert engine.gauge("evictable_count") == 0
                assert complete(engine, worker, [0] * 33) == 0
                assert complete(engine, worker, [0] * 33) == 32


# ------------------------------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("collide", [False, True])
def test_a_block_is_found_behind_its_own_parent_only(*, collide: bool) -> None:
    one, two, three = ids(4, 100), ids(4, 200), ids(4, 300)
    with cache_engine() as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        complete(engine, worker, [*one, *two, *three, 1])
        assert complete(engine, worker, [*ids(4, 900), *two, *three, 1]) == 0
        assert complete(engine, worker, [*two, *three, 1]) == 0
        assert complete(engine, worker, [*three, 1]) == 0
        assert complete(engine, worker, [*one, *three, 1]) == 4
        assert complete(engine, worker, [*one, *two, *ids(4, 700), 1]) == 8
        assert complete(engine, worker, [*one, *two, *three, 1]) == 12


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("collide", [False, True])
def test_chain_is_found_up_to_its_first_gap(gone: int, *, collide: bool) -> None:
    """Without its first block nothing of it, though the others are there; and not after that block has come back."""
    with cache_engine(audit_every=0) as (engine, worker):
        if collide:
            engine.scheduler.arena.header["hash_mask"] = 0
        stream = ask(worker, ids(13), 2)
        engine.step()
        chain = table(engine, stream)[:3]
        engine.run(worker)
        assert set(chain) <= set(evictable(engine))
        drop_from_cache(engine, chain[gone])
        prompt = ids(13)
        again = ask(worker, prompt, 1)
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert_complete(again)
        assert fared(engine, again)["cached_tokens"] == 4 * gone
        once_more = ask(worker, prompt, 1)
        while engine.scheduler.step():
            worker.collect()
        worker.collect()
        assert fared(engine, once_more)["cached_tokens"] == 12  # computed anew, behind a parent with an id of its own


@pytest.mark.parametrize("length", [5, 13, 33])
def test_children_are_evicted_before_their_parents(length: int) -> None:
    """After k evictions what is left of a chain is its first part."""
    blocks = (length - 1) // 4
    for evictions in range(blocks + 1):
        with cache_engine(total_kv_blocks=cover(length + 1, 4) + 2) as (engine, worker):
            stream = ask(worker, ids(length), 1)
            engine.run(worker)
            chain = first_row(engine, stream).blocks[: length // 4]
            assert evictable(engine) == chain[::-1]
            needed = engine.gauge("free_count") + evictions
            complete(engine, worker, [1] * (4 * needed - 1))
            assert metric(engine, "prefix_evicted_blocks") == evictions
            assert complete(engine, worker, ids(length)) == 4 * min(len(chain) - evictions, blocks)


def test_the_least_recently_released_goes_first() -> None:
    with cache_engine(total_kv_blocks=12) as (engine, worker):
        prompts = [ids(5, 100 * k) for k in range(1, 5)]
        for prompt in prompts:
            complete(engine, worker, prompt)  # a block in the cache each
        complete(engine, worker, prompts[0])  # used again
        complete(engine, worker, [7] * 39)  # 10 blocks: 8 free, then the two that were released longest ago
        assert metric(engine, "prefix_evicted_blocks") == 2
        assert [complete(engine, worker, prompts[k]) for k in (0, 3)] == [4, 4]


def test_free_blocks_are_taken_before_evictable_ones() -> None:
    with cache_engine(total_kv_blocks=16) as (engine, worker):
        complete(engine, worker, ids(17))
        assert engine.gauge("evictable_count") == 4
        complete(engine, worker, [7] * 47)  # 12 blocks, as many as are free
        assert metric(engine, "prefix_evicted_blocks") == 0
        assert complete(engine, worker, ids(17)) == 16


def test_a_block_that_somebody_holds_is_never_evicted() -> None:
    """Over a pool that is too small: every token that attention reads is still its own (mock_kv would tell)."""
    with cache_engine(total_kv_blocks=16, mock_kv=True, max_batch_tokens=16) as (engine, worker):
        shared = ids(12)
        streams = [ask(worker, [*shared, k], 20 + k, seed=k, arrival_ns=k) for k in range(8)]
        engine.run(worker)
        assert_complete(*streams)
        assert metric(engine, "prefix_evicted_blocks") > 0
        assert metric(engine, "prefix_hit_tokens") > 0
        assert_all_given_back(engine)


# ------------------------------------------------------------------------------------------------------------ counting


def head_and_holder(engine: SmallEngine, worker: FakeWorker, held_blocks: int) -> Any:
    """A prompt of 16 in the cache (4 blocks, evictable), and a running one that holds `held_blocks`."""
    complete(engine, worker, ids(17))
    holder = ask(worker, ids(4 * held_blocks - 2, 7_000), 2, arrival_ns=1)
    engine.step()
    assert len(table(engine, holder)) == held_blocks
    return holder


@pytest.mark.parametrize("extra", [0, 1, 2, 5])
def test_a_hit_that_is_evictable_is_not_counted_as_available_too(extra: int) -> None:
    """One block too few, and the hit blocks would be promised twice: as found, and as room for the rest."""
    needed = cover(17 + 4 * extra + 1, 4)  # 4 of them are found
    for too_few in (0, 1):
        with cache_engine(total_kv_blocks=needed + 4 - too_few, mock_kv=True) as (engine, worker):
            holder = head_and_holder(engine, worker, held_blocks=4)
            assert available(engine) == needed - too_few
            head = ask(worker, [*ids(17), *ids(4 * extra, 3_000)], 1, arrival_ns=2)
            engine.step()
            worker.collect()
            is_admitted = bool(engine.running() == [head.slot] or head.is_over)
            assert is_admitted == (not too_few)
            engine.run(worker)
            assert_complete(holder, head)
            assert fared(engine, head)["cached_tokens"] == 16
            assert metric(engine, "prefix_hit_tokens") == 16
            assert_all_given_back(engine)


@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize("lacks", ["blocks", "slots"])
def test_queries_and_hits_are_counted_once_however_often_admission_is_tried(steps: int, lacks: str) -> None:
    options = {"total_kv_blocks": 12} if lacks == "blocks" else {"max_running_seqs": 1}
    with cache_engine(**options) as (engine, worker):
        complete(engine, worker, ids(17))
        holder = ask(worker, ids(22, 7_000), 4, arrival_ns=1)
        engine.step()
        engine.backend.is_quiet = True
        before = metric(engine, "prefix_query_tokens")
        head = ask(worker, ids(33), 3, arrival_ns=2)
        for _ in range(steps):
            engine.step()
            assert engine.waiting() == [head.slot]
            assert reason(engine) == lacks
        assert metric(engine, "prefix_query_tokens") == before
        assert metric(engine, "prefix_hit_tokens") == 0
        engine.backend.is_quiet = False
        engine.run(worker)
        assert_complete(holder, head)
        assert metric(engine, "prefix_query_tokens") == before + 33
        assert metric(engine, "prefix_hit_tokens") == fared(engine, head)["cached_tokens"] == 16


@pytest.mark.parametrize("preemptions", [1, 2, 5])
def test_what_is_found_after_a_preemption_is_no_hit_of_the_request(preemptions: int) -> None:
    """It finds what it has computed itself; the counts, and `cached_tokens`, are of its first admission."""
    with cache_engine(max_running_seqs=1) as (engine, worker):
        complete(engine, worker, ids(9))
        low = ask(worker, ids(21), 9, priority=7, arrival_ns=1, seed=1)
        engine.step()
        queries, hits = (metric(engine, f"prefix_{kind}_tokens") for kind in ("query", "hit"))
        for k in range(preemptions):
            high = worker.submit(2, 1, priority=-8, arrival_ns=10 + k)
            engine.step()
            worker.collect()
            assert_complete(high)
            since = len(plans(engine))
            engine.step()
            assert first_row(engine, low, since).first > 8  # its own blocks are found, generated ones as well
        engine.run(worker)
        assert_complete(low)
        assert fared(engine, low)["cached_tokens"] == 8
        assert fared(engine, low)["preemptions"] == preemptions
        assert metric(engine, "prefix_hit_tokens") == hits
        assert metric(engine, "prefix_query_tokens") - queries in (0, 2 * preemptions)  # of those without token ids


# ----------------------------------------------------------------------------------------- the same prompt, at one time


@settings(max_examples=30)
@given(
    length=st.integers(1, 60),
    chunk=st.integers(6, 24),
    lead=st.integers(0, 20),
    block_size=st.sampled_from([2, 4, 16]),
    count=st.integers(2, 4),
)
@example(length=32, chunk=64, lead=0, block_size=16, count=2)
def test_nobody_waits_for_a_prefix_that_another_computes_and_they_share_it_afterwards(
    length: int, chunk: int, lead: int, block_size: int, count: int
) -> None:
    options = {"kv_block_size": block_size, "max_batch_tokens": chunk, "mock_kv": True, "total_kv_blocks": 512}
    with cache_engine(**options) as (engine, worker):
        first = ask(worker, ids(length), 150, arrival_ns=1)
        for _ in range(lead):
            engine.step()
        others = [ask(worker, ids(length), 150, arrival_ns=2 + k, seed=k) for k in range(count - 1)]
        streams = [first, *others]
        prompt_blocks = (length - 1) // block_size  # the last position may be computed as a decode, without a chunk

        def all_decode() -> bool:
            return all(engine.sequence(stream)["produced_tokens"] > 0 for stream in streams)

        for _ in range(4 * count * length + 100):
            if all_decode():
                break
            engine.step()
            assert not engine.gauge("waiting_count") or reason(engine) == "tokens"
        assert all_decode()
        shared = [table(engine, stream)[:prompt_blocks] for stream in streams]
        assert all(blocks == shared[0] for blocks in shared)
        assert all(refcounts(engine)[block] == len(streams) for block in shared[0])
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


def test_two_that_come_together_are_computed_in_the_same_step() -> None:
    with cache_engine(kv_block_size=16) as (engine, worker):
        streams = [ask(worker, ids(32), 3, seed=k) for k in range(3)]
        engine.step()
        assert [(row.first, row.new) for row in plans(engine)[0].rows] == [(0, 32)] * 3
        assert len({tuple(table(engine, stream)[:2]) for stream in streams}) == 1
        assert available(engine) == engine.config.total_kv_blocks - 2 - 3  # the two shared, and each its own third
        engine.run(worker)
        assert_complete(*streams)


# ----------------------------------------------------------------------------------------------- what empties the cache


def lose(plan: BatchPlan) -> None:
    raise BackendLost("unplugged")


@pytest.mark.parametrize("running", [0, 1, 3])
def test_lost_backend_empties_the_cache(running: int) -> None:
    """The KV went with it: to find a block afterwards would be to read what is not there."""
    with cache_engine(mock_kv=True) as (engine, worker):
        complete(engine, worker, ids(33))
        streams = [ask(worker, ids(33), 9, seed=k, arrival_ns=k) for k in range(running)]
        if not running:
            streams = [worker.submit(1, 2)]
        engine.step()
        assert cached(engine)
        engine.backend.before = lose
        engine.step()
        engine.backend.before = None
        assert cached(engine) == set()
        assert evictable(engine) == []
        assert engine.gauge("evictable_count") == 0
        assert engine.gauge("free_count") == engine.config.total_kv_blocks
        since = len(plans(engine))
        engine.run(worker)
        assert_complete(*streams)
        assert all(first_row(engine, stream, since).first == 0 for stream in streams[:1])
        assert complete(engine, worker, ids(33, 7_000)) == 0
        assert complete(engine, worker, ids(33)) == (32 if running else 0)
        assert_all_given_back(engine)


def test_new_scheduler_starts_with_an_empty_cache() -> None:
    with cache_engine(mock_kv=True) as (engine, worker):
        complete(engine, worker, ids(33))
        stream = ask(worker, ids(33), 9)
        engine.step()
        engine.start_scheduler()
        assert cached(engine) == set()
        engine.run(worker)
        assert_complete(stream)
        assert first_row(engine, stream).first == 0
        assert complete(engine, worker, ids(33)) == 32
