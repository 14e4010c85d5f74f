"""A sequence that kills its scheduler is found and ended; everybody else gets every token, and is not kept waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends.base import BatchPlan, StepOutput
from ironbatch.backends.mock import MockBackend
from ironbatch.config import Config
from ironbatch.errors import BackendLost
from ironbatch.kernels.arena import StateArena
from ironbatch.kernels.suspects import ALONE_DEATHS, CROWD_DEATHS, find_suspects
from ironbatch.scheduler import quarantine
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

NS_PER_S = 1_000_000_000


class Killed(BaseException):
    """A SIGKILL, as far as one process can have it: no handler in the engine may see it."""


class Killer:
    """What all backends of one engine do, one after the other: they die where they are told to."""

    def __init__(self) -> None:
        self.poison: dict[int, int] = {}  # seed -> how many tokens it has when it kills
        self.kills_next = 0  # plans, whoever is in them: kills from outside
        self.plans: list[list[int]] = []  # the sequences of each plan, of those that killed too
        self.alone: list[bool] = []  # whether the header said of it that it was a suspect's
        self.deaths = 0
        self.is_resumable = True
        self.before: Callable[[BatchPlan], Any] = lambda plan: None

    def backend(self, config: Config) -> MockBackend:
        return KillerBackend(config, self)


class KillerBackend(MockBackend):
    def __init__(self, config: Config, killer: Killer) -> None:
        super().__init__(config)
        self.killer = killer
        self.resumable = killer.is_resumable

    def execute(self, plan: BatchPlan) -> StepOutput:
        killer = self.killer
        killer.plans.append(plan.rows["sequence"].tolist())
        killer.alone.append(bool(plan._segment.header["in_quarantine"]))
        if killer.kills_next:
            killer.kills_next -= 1
            raise Killed
        for seed, row in zip(plan.seeds.tolist(), plan.rows, strict=True):
            if seed in killer.poison and row["produced_tokens"] >= killer.poison[seed]:
                raise Killed
        killer.before(plan)
        return super().execute(plan)


@pytest.fixture
def killer() -> Killer:
    return Killer()


@pytest.fixture
def engine(killer: Killer) -> Iterator[SmallEngine]:
    with small_engine(killer.backend, total_kv_blocks=64, max_batch_tokens=64) as found:
        yield found


def attempt(engine: SmallEngine, killer: Killer, what: Callable[[], Any]) -> Any:
    """Do it; if the scheduler dies of it, start others until one survives its start."""
    while True:
        try:
            return what()
        except Killed:
            killer.deaths += 1
            what = engine.start_scheduler


def run(engine: SmallEngine, killer: Killer, worker: FakeWorker, most_steps: int = 2_000) -> None:
    """Step, through all deaths, until nothing is left to do."""
    for _ in range(most_steps):
        deaths = killer.deaths
        count = attempt(engine, killer, engine.step)
        worker.collect()
        engine.check()
        if count == 0 and killer.deaths == deaths and not worker.streams:
            return
    raise AssertionError(f"no end after {most_steps} steps and {killer.deaths} deaths")


def assert_whole(*streams: Stream) -> None:
    for stream in streams:
        assert stream.reason == layout.FINISH_LENGTH
        assert stream.token_ids == stream.expected_token_ids(stream.max_new_tokens)


def assert_poisoned(stream: Stream, tokens: int) -> None:
    assert (stream.reason, stream.error_code) == (layout.FINISH_ERROR, layout.ERROR_POISON)
    assert stream.token_ids == stream.expected_token_ids(tokens)


def submit_many(worker: FakeWorker, count: int, max_new_tokens: int = 12) -> list[Stream]:
    return [worker.submit(3 + k, max_new_tokens, seed=100 + k, arrival_ns=10 * k) for k in range(count)]


# ------------------------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("arrival_ns", [0, 35, 1_000], ids=["oldest", "among others", "newest"])
def test_poison_is_ended_and_nobody_else(engine: SmallEngine, killer: Killer, tokens: int, arrival_ns: int) -> None:
    worker = engine.worker()
    killer.poison[7] = tokens
    streams = submit_many(worker, 6)
    poison = worker.submit(5, 12, seed=7, arrival_ns=arrival_ns)
    run(engine, killer, worker)
    assert_poisoned(poison, tokens)
    assert_whole(*streams)
    assert killer.deaths == CROWD_DEATHS + ALONE_DEATHS
    engine.assert_nothing_held()
    assert engine.segment.metrics[0]["sequences_failed"] == 1
    assert engine.segment.metrics[0]["scheduler_starts"] == 1 + killer.deaths


def test_poison_that_is_alone_anyway(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    killer.poison[7] = 3
    poison = worker.submit(5, 12, seed=7)
    run(engine, killer, worker)
    assert_poisoned(poison, 3)
    assert killer.deaths == CROWD_DEATHS + ALONE_DEATHS, "somebody's kills must not look like its own"


@pytest.mark.parametrize("tokens", [(0, 0), (0, 6), (6, 6)])
def test_two_at_once(engine: SmallEngine, killer: Killer, tokens: tuple[int, int]) -> None:
    worker = engine.worker()
    killer.poison |= {7: tokens[0], 8: tokens[1]}
    streams = submit_many(worker, 4)
    poisons = [worker.submit(5, 12, seed=seed, arrival_ns=5 * seed) for seed in (7, 8)]
    run(engine, killer, worker)
    for poison, count in zip(poisons, tokens, strict=True):
        assert_poisoned(poison, count)
    assert_whole(*streams)
    engine.assert_nothing_held()


def test_each_suspect_runs_alone_until_one_kills_and_then_that_one_first(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    killer.poison[7] = 4
    streams = submit_many(worker, 4)
    poison = worker.submit(5, 12, seed=7, arrival_ns=1)  # as many tokens as the others when it kills, and the second
    run(engine, killer, worker)
    alone = [plan for plan, is_alone in zip(killer.plans, killer.alone, strict=True) if is_alone]
    cleared = {stream.slot for stream in streams}
    assert all(len(plan) == 1 for plan in alone)
    assert alone[-2:] == [[poison.slot], [poison.slot]]
    assert {plan[0] for plan in alone[:-2]} <= cleared
    assert len(alone) - 2 == len({plan[0] for plan in alone[:-2]}), "one token each"
    assert_whole(*streams)


def test_a_newcomer_without_a_token_is_the_first_suspect(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 5)
    for _ in range(3):
        engine.step()
    killer.poison[7] = 0
    poison = worker.submit(5, 12, seed=7, arrival_ns=5)
    run(engine, killer, worker)
    assert_poisoned(poison, 0)
    assert_whole(*streams)
    alone = [plan for plan, is_alone in zip(killer.plans, killer.alone, strict=True) if is_alone]
    assert alone == [[poison.slot], [poison.slot]], "nobody else had to run alone"


def test_who_waits_is_no_suspect(killer: Killer) -> None:
    with small_engine(killer.backend, max_running_seqs=2) as engine:
        worker = engine.worker()
        killer.poison[7] = 2
        first, second = submit_many(worker, 2, max_new_tokens=4)
        poison = worker.submit(5, 4, seed=7, arrival_ns=50)
        last = worker.submit(5, 4, seed=9, arrival_ns=60)
        others = submit_many(worker, 3, max_new_tokens=4)
        run(engine, killer, worker)
        assert_poisoned(poison, 2)
        assert_whole(first, second, last, *others)


def test_a_prompt_in_chunks(killer: Killer) -> None:
    """Its suspects need several steps for a token."""
    with small_engine(killer.backend, total_kv_blocks=64, max_batch_tokens=8) as engine:
        worker = engine.worker()
        killer.poison[7] = 1
        streams = [worker.submit(30 + k, 10, seed=20 + k, arrival_ns=k) for k in range(3)]
        poison = worker.submit(29, 10, seed=7, arrival_ns=1)
        run(engine, killer, worker)
        assert_poisoned(poison, 1)
        assert_whole(*streams)
        engine.assert_nothing_held()


def test_choices_of_one_request(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    group = worker.submit_group(6, 10, 3, seed=5)
    killer.poison[group[1].seed] = 2
    run(engine, killer, worker)
    assert_poisoned(group[1], 2)
    assert_whole(group[0], group[2])
    engine.assert_nothing_held()


def test_its_slot_is_nobodys_fault(engine: SmallEngine, killer: Killer) -> None:
    """Whoever gets the slot next begins without a suspicion."""
    worker = engine.worker()
    killer.poison[7] = 1
    poison = worker.submit(5, 8, seed=7)
    run(engine, killer, worker)
    successor = worker.submit(5, 8, seed=8)
    assert successor.slot == poison.slot
    assert engine.segment.slots[poison.slot]["suspicion"] != 0
    engine.step()
    assert engine.segment.slots[poison.slot]["suspicion"] == 0
    killer.kills_next = CROWD_DEATHS
    run(engine, killer, worker)
    assert_whole(successor)


# -------------------------------------------------------------------------------------------------- kills from outside


def test_kills_while_streams_go_on_make_no_suspects(killer: Killer, caplog: pytest.LogCaptureFixture) -> None:
    with small_engine(killer.backend, total_kv_blocks=64, max_batch_tokens=512) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 6, max_new_tokens=30)
        while any(not stream.is_over for stream in streams):
            attempt(engine, killer, engine.step)
            worker.collect()
            if killer.deaths < 20 and len(killer.plans) % 2:
                killer.kills_next = 1
        assert killer.deaths == 20
        assert not any(killer.alone)
        assert "alone" not in caplog.text
        assert_whole(*streams)


@pytest.mark.parametrize("kills", range(1, CROWD_DEATHS))
def test_a_few_kills_in_a_row_make_no_suspects(engine: SmallEngine, killer: Killer, kills: int) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 6)
    engine.step()
    killer.kills_next = kills
    run(engine, killer, worker)
    assert killer.deaths == kills
    assert not any(killer.alone)
    assert_whole(*streams)


@pytest.mark.parametrize("kills", [CROWD_DEATHS, CROWD_DEATHS + 1])
def test_more_of_them_cost_a_token_alone_and_no_stream(
    engine: SmallEngine, killer: Killer, kills: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 6)
    killer.kills_next = kills
    run(engine, killer, worker)
    assert killer.deaths == kills
    assert sum(killer.alone) == 6 + kills - CROWD_DEATHS
    assert "each runs alone" in caplog.text
    assert_whole(*streams)
    engine.assert_nothing_held()


@pytest.mark.parametrize("moment", ["start", "idle", "between steps"])
def test_deaths_between_computations_count_against_nobody(engine: SmallEngine, killer: Killer, moment: str) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 3)
    if moment == "between steps":
        engine.step()
    elif moment == "idle":
        killer.kills_next = 1
    for _ in range(10):
        attempt(engine, killer, engine.step) if killer.kills_next else None
        engine.start_scheduler()
    assert not any(killer.alone)
    run(engine, killer, worker)
    assert_whole(*streams)


def test_a_death_is_counted_once_whoever_dies_while_it_is_being_counted(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 4)
    engine.step()
    header = engine.segment.header
    killer.kills_next = 1
    with pytest.raises(Killed):
        engine.step()
    state = StateArena(engine.scheduler.arena.geometry)
    words = []
    for _ in range(5):  # each is killed before its last store, having counted all
        assert find_suspects(state.address, engine.segment.address) == 0
        words.append(engine.segment.slots["suspicion"].tolist())
        header["in_device_call"] = 1
    assert len({tuple(found) for found in words}) == 1
    assert {word & layout.SUSPICION_DEATHS_MASK for word in words[0] if word} == {1}
    engine.start_scheduler()
    run(engine, killer, worker)
    assert not any(killer.alone)
    assert_whole(*streams)


# ------------------------------------------------------------------------------------------ what else happens meanwhile


def suspect(engine: SmallEngine, killer: Killer) -> None:
    """Let the scheduler die as often as makes a suspect of whoever runs; there is none afterwards."""
    for death in range(CROWD_DEATHS):
        if death:
            engine.start_scheduler()
        killer.kills_next = 1
        with pytest.raises(Killed):
            engine.step()


def test_a_suspect_that_was_cancelled_does_not_run(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    gone, *others = submit_many(worker, 3)
    suspect(engine, killer)
    worker.cancel(gone)
    engine.start_scheduler()
    assert [plan for plan, alone in zip(killer.plans, killer.alone, strict=True) if alone] == [
        [stream.slot] for stream in reversed(others)
    ]
    run(engine, killer, worker)
    assert gone.reason == layout.FINISH_CANCELLED
    assert_whole(*others)


def test_suspects_of_a_dead_worker_are_freed(engine: SmallEngine, killer: Killer) -> None:
    doomed, worker = engine.worker(0), engine.worker(1)
    submit_many(doomed, 2)
    stream = worker.submit(4, 9, seed=1)
    suspect(engine, killer)
    doomed.die()
    engine.start_scheduler()
    assert sum(killer.alone) == 1
    run(engine, killer, worker)
    assert_whole(stream)
    engine.assert_nothing_held()
    assert engine.segment.metrics[0]["requests_lost"] == 2


def test_of_a_backend_that_is_not_resumable(killer: Killer) -> None:
    """Whoever has begun is lost with its scheduler; whoever has not is served, alone or not."""
    killer.is_resumable = False
    with small_engine(killer.backend, total_kv_blocks=64, max_batch_tokens=64) as engine:
        worker = engine.worker()
        (begun,) = submit_many(worker, 1)
        engine.step()
        killer.poison[7] = 0
        poison = worker.submit(4, 9, seed=7, arrival_ns=100)
        unbegun = worker.submit(5, 9, seed=3, arrival_ns=90)
        run(engine, killer, worker)
        assert (begun.reason, begun.error_code) == (layout.FINISH_ERROR, layout.ERROR_LOST)
        assert_poisoned(poison, 0)
        assert_whole(unbegun)


def test_one_that_was_cleared_on_such_a_backend_goes_on(killer: Killer) -> None:
    """Its token alone is of the present backend, so that leaving quarantine is a preemption like any other."""
    killer.is_resumable = False
    with small_engine(killer.backend) as engine:
        worker = engine.worker()
        streams = submit_many(worker, 3)
        suspect(engine, killer)
        engine.start_scheduler()
        assert sum(killer.alone) == 3
        run(engine, killer, worker)
        assert_whole(*streams)


@pytest.mark.parametrize("failure", [ValueError("a bug"), BackendLost("unplugged")])
def test_a_backend_that_fails_meanwhile(engine: SmallEngine, killer: Killer, failure: Exception) -> None:
    worker = engine.worker()
    streams = submit_many(worker, 3)
    suspect(engine, killer)
    victims: list[int] = []

    def fail_once(plan: BatchPlan) -> None:
        if not victims:
            victims.extend(plan.rows["sequence"].tolist())
            raise failure

    killer.before = fail_once
    engine.start_scheduler()
    run(engine, killer, worker)
    (victim,) = [stream for stream in streams if stream.slot in victims]
    if isinstance(failure, BackendLost):
        assert_whole(*streams)
    else:
        assert (victim.reason, victim.error_code) == (layout.FINISH_ERROR, layout.ERROR_BACKEND)
        assert_whole(*[stream for stream in streams if stream is not victim])
    engine.assert_nothing_held()
    assert engine.segment.header["scheduler_ready"] == 1


def test_one_that_does_nothing_for_long_is_let_go(engine: SmallEngine, killer: Killer) -> None:
    """A backend whose tokens come when they come may have none for it."""
    worker = engine.worker()
    streams = submit_many(worker, 2)
    suspect(engine, killer)

    class Silent(KillerBackend):
        def execute(self, plan: BatchPlan) -> StepOutput:
            engine.clock.advance_ns(NS_PER_S)
            output = super().execute(plan)
            if self.killer.alone[-1]:
                output.counts[: len(plan)] = 0
            return output

    engine._make_backend = lambda config: Silent(config, killer)
    started_ns = engine.clock.now_ns()
    engine.start_scheduler()
    assert engine.clock.now_ns() - started_ns <= 2 * (quarantine.PATIENCE_NS + 2 * NS_PER_S)
    assert engine.segment.header["in_quarantine"] == 0
    assert not engine.segment.slots["suspicion"].any()
    run(engine, killer, worker)
    assert_whole(*streams)


def test_the_heart_beats_and_the_header_says_that_one_runs_alone(engine: SmallEngine, killer: Killer) -> None:
    worker = engine.worker()
    submit_many(worker, 2)
    suspect(engine, killer)
    header, beats = engine.segment.header, []

    def look(plan: BatchPlan) -> None:
        beats.append((int(header["heartbeat_ns"]), int(header["scheduler_ready"]), int(header["in_quarantine"])))
        engine.clock.advance_ns(NS_PER_S)

    killer.before = look
    header["scheduler_ready"] = 0  # as its keeper does in a storm
    start_ns = engine.clock.now_ns()
    engine.start_scheduler()
    assert beats == [(start_ns + k * NS_PER_S, 1, 1) for k in range(2)]
    assert (header["in_quarantine"], header["in_device_call"], header["scheduler_ready"]) == (0, 0, 1)


def test_the_operator_is_told(engine: SmallEngine, killer: Killer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    worker = engine.worker()
    submit_many(worker, 4)
    killer.poison[7] = 0
    worker.submit(5, 8, seed=7)
    run(engine, killer, worker)
    assert "schedulers have died of late while they computed the same 5 sequences" in caplog.text
    assert "a sequence ended with an error: schedulers died again and again while they computed it" in caplog.text


def test_a_list_that_makes_no_sense_harms_nobody(engine: SmallEngine, killer: Killer) -> None:
    """Whoever has damaged its memory may have damaged this too."""
    worker = engine.worker()
    streams = submit_many(worker, 3)
    killer.kills_next = 1
    with pytest.raises(Killed):
        engine.step()
    engine.segment.running[:4] = [-1, 2**31 - 1, engine.config.num_slots, -(2**31)]
    engine.segment.header["listed_count"] = 2**62
    engine.start_scheduler()
    run(engine, killer, worker)
    assert_whole(*streams)
