"""Faults: which batches meet one, and what each of them does to a device, to the nanosecond."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

import numpy as np
import pytest

from ironbatch.driver import abi
from ironbatch.driver.faults import KINDS, OF_A_PROCESS, Faults
from ironbatch.errors import ConfigError
from ironbatch.kernels.mock_kv import POISON
from tests.driver.records import copy, step
from tests.driver.reference_client import SPEC, STEP_US, Bench

LONGEST_US = SPEC.longest_step_us


def draws(faults: Faults, count: int = 400) -> list[str | None]:
    return [faults.draw() for _ in range(count)]


# ----------------------------------------------------------------------------------------------- which batches meet one


def test_the_same_seed_plants_the_same_faults() -> None:
    first, again, other = (draws(Faults(KINDS, 0.3, seed)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.5, 1.0])
def test_the_rate_is_kept(rate: float) -> None:
    found = Counter(draws(Faults(["eio", "reset"], rate, 1), 10_000))
    assert set(found) <= {None, "eio", "reset"}
    met = found["eio"] + found["reset"]
    assert abs(met - 10_000 * rate) <= 200
    assert abs(found["eio"] - found["reset"]) <= 300


def test_planted_ones_are_met_once_and_move_no_others() -> None:
    without = draws(Faults(["late-fence"], 0.2, 3))
    planted = draws(Faults(["late-fence", "eio@2", "reset@300"], 0.2, 3))
    assert (planted[1], planted[299]) == ("eio", "reset")
    assert set(draws(Faults(["eio@1"], 1.0))[1:]) == {None}  # a rate is of kinds without a number
    without[1] = planted[1]
    without[299] = planted[299]
    assert Counter(without)["late-fence"] == pytest.approx(Counter(planted)["late-fence"], abs=3)
    assert draws(Faults(["eio@2"], 0.9, 3)) == [None, "eio", *[None] * 398]


def test_nothing_happens_unasked() -> None:
    assert set(draws(Faults())) == {None}
    assert set(draws(Faults(["eio"]))) == {None}  # a rate of 0


def test_the_kinds_that_may_happen() -> None:
    assert Faults(["eio", "vanish@4", "eio@2"]).kinds == {"eio", "vanish"}
    assert set(KINDS) > OF_A_PROCESS


@pytest.mark.parametrize(
    ("kinds", "rate", "told"),
    [
        (["eoi"], 0.1, "--inject: 'eoi' is no fault; use some of lost-fence,"),
        (["eio@0"], 0.1, "--inject: 'eio@0' names no batch; use a number from 1 on, such as eio@3"),
        (["eio@"], 0.1, "'eio@' names no batch"),
        (["eio@-3"], 0.1, "'eio@-3' names no batch"),
        (["eio@1e3"], 0.1, "'eio@1e3' names no batch"),
        (["eio@3", "reset@4", "reset@3"], 0.1, "--inject: batch 3 has eio already; give reset to another one"),
        (["eio"], 1.5, "--inject-rate: 1.5 is not between 0 and 1; use a probability such as 0.02"),
        (["eio"], float("nan"), "--inject-rate: nan is not between"),
        (["x", "eio@x"], -1, "--inject-rate: -1"),
    ],
)
def test_bad_faults(kinds: list[str], rate: float, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Faults(kinds, rate)
    assert any(told in problem for problem in caught.value.problems)


# ----------------------------------------------------------------------------------------------- what each of them does


def test_lost_fence_comes_with_the_next() -> None:
    bench = Bench(SPEC, "lost-fence@1")
    client = bench.client()
    block = client.claim(1)
    client.submit(step([block], [5, 6]))
    assert not bench.pass_us(100 * LONGEST_US)
    assert (client.status(1), client.signaled, client.first_result[0]) == (None, 0, 1)  # it has run for all that
    client.submit()
    assert bench.pass_us(STEP_US)
    assert (client.status(1), client.status(2), client.signaled) == (0, 0, 2)


@pytest.mark.parametrize("seed", range(5))
def test_late_fence_comes_after_the_longest_step(seed: int) -> None:
    bench = Bench(SPEC, "late-fence@1", seed=seed)
    client = bench.client()
    client.submit()
    bench.pass_us(STEP_US + LONGEST_US - 1)
    assert client.status(1) is None
    due_ns = bench.device.next_due_ns()
    assert due_ns is not None
    assert LONGEST_US * 1000 <= due_ns - STEP_US * 1000 <= 2 * LONGEST_US * 1000
    assert bench.pass_us(LONGEST_US + 1)
    assert (client.status(1), client.signaled) == (0, 1)


def test_late_fence_that_the_next_has_overtaken_says_nothing_new() -> None:
    bench = Bench(SPEC, "late-fence@1")
    client = bench.client()
    client.submit()
    client.submit()
    assert bench.pass_us(2 * STEP_US)
    assert client.signaled == 2
    assert not bench.pass_us(10 * LONGEST_US)
    assert (client.signaled, bench.device.next_due_ns()) == (2, None)


def test_duplicate_fence_sets_the_page_back_until_the_one_after_the_next() -> None:
    bench = Bench(SPEC, "duplicate-fence@2")
    client = bench.client()
    pages = []
    for _ in range(4):
        client.submit()
        bench.pass_us(STEP_US)
        pages.append(client.signaled)
    assert pages == [1, 2, 2, 4]
    assert [client.status(fence) for fence in range(1, 5)] == [0, 0, 0, 0]  # the call is not deceived


def test_eio_fails_one_batch_and_leaves_garbage_where_that_was_to_write() -> None:
    bench = Bench(SPEC, "eio@1")
    client = bench.client()
    block = client.claim(3)
    client.submit(step([block], [5, 6]), copy((block, block + 1)))
    client.submit(step([block], [7]))
    bench.pass_us(STEP_US)
    kv = np.frombuffer(bench.arena, np.int32).reshape(SPEC.blocks, -1)
    assert kv[block : block + 3].tolist() == [[POISON, POISON, 0, 0], [POISON] * 4, [0] * 4]
    assert client.first_result == (0, 0)
    assert (client.status(1), int(client.page["failed"]), client.signaled) == (-errno.EIO, 1, 1)
    told = client.error
    assert (told.fence, told.code, told.message.rstrip(b"\0")) == (1, -errno.EIO, b"injected")
    bench.pass_us(STEP_US)
    assert (client.status(2), client.first_result[0], client.signaled) == (0, 1, 2)


def test_short_ring_refuses_one_submission_which_is_none() -> None:
    bench = Bench(SPEC, "short-ring@2")
    client = bench.client()
    block = client.claim(1)
    assert client.submit() == 1
    before = bench.arena
    assert client.refused(abi.SUBMIT_BATCH, **client.submission(step([block], [5]))) == "ENOSPC"
    assert (client.error.fence, client.error.value) == (0, 40)
    assert client.submit(step([block], [6])) == 2
    bench.pass_us(STEP_US)
    assert bench.arena == before
    bench.pass_us(STEP_US)
    assert bench.arena != before


def test_reset_ends_what_all_have_in_flight() -> None:
    bench = Bench(SPEC, "reset@2")
    one, other = bench.client(), bench.client()
    block = one.claim(3)
    one.submit()
    other.submit()
    one.submit()
    assert bench.pass_us(STEP_US)
    assert (one.status(1), one.status(2), other.status(1)) == (0, None, None)
    assert bench.pass_us(STEP_US)
    assert (one.status(1), one.status(2), other.status(1)) == (0, -errno.ECANCELED, -errno.ECANCELED)
    assert [int(client.page["reset_count"]) for client in (one, other)] == [1, 1]
    claimed = np.frombuffer(bench.arena, np.int32).reshape(SPEC.blocks, -1)[block : block + 3]
    assert (claimed == POISON).all()
    assert one.ask(abi.QUERY_FREE_BLOCKS).used_by_fd == 3
    assert bench.device.next_due_ns() is None
    assert one.refused(abi.SUBMIT_BATCH, **one.submission(epoch=0)) == "ESTALE"
    assert one.submit() == 3


@pytest.mark.parametrize(("kind", "sent"), [("hang", signal.SIGSTOP), ("vanish", signal.SIGKILL)])
def test_process_stops_or_dies_in_the_batch_s_place(kind: str, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That they do is seen on nodes (test_ioctl_device.py); here it is seen when, and to whom."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    bench = Bench(SPEC, f"{kind}@2")
    client = bench.client()
    client.submit()
    client.submit()
    bench.pass_us(STEP_US)
    assert not killed
    bench.pass_us(STEP_US)
    assert killed == [(os.getpid(), sent)]
    assert client.status(2) == 0  # whoever was stopped goes on where it was


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_fence_ends_once_and_for_all(seed: int) -> None:
    """Two clients, all faults of a device that goes on living; when nothing is in flight, everything has an answer."""
    bench = Bench(SPEC, *(set(KINDS) - OF_A_PROCESS), rate=0.4, seed=seed)
    clients = [bench.client(), bench.client()]
    fences: list[dict[int, int | None]] = [{}, {}]
    ends: Counter[int] = Counter()
    for turn in range(400):
        try:
            fences[turn % 2][clients[turn % 2].submit()] = None
        except OSError as refusal:
            assert refusal.errno in (errno.ENOSPC, errno.EAGAIN)  # noqa: PT017 - most are taken
        bench.pass_us((turn * 7919 + seed) % (3 * STEP_US))
        for client, known in zip(clients, fences, strict=True):
            for fence in list(known)[-40:]:
                status = client.status(fence)
                assert known[fence] in (None, status)
                ends[status or 0] += known[fence] is None and status is not None
                known[fence] = status
    assert set(ends) == {0, -errno.EIO, -errno.ECANCELED}
    bench.device.faults = Faults()
    bench.pass_us(10 * LONGEST_US)
    for client, known in zip(clients, fences, strict=True):
        if client.submit() > 1:  # what was lost comes with the next
            bench.pass_us(STEP_US)
        assert None not in [client.status(fence) for fence in known]
