"""The reference device against a model of it in plain Python, on a clock of their own."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ironbatch.driver import abi
from ironbatch.driver.reference import Pending
from ironbatch.kernels.mock_kv import POISON
from tests.driver.records import copy, step, zero
from tests.driver.reference_client import SPEC, STEP_US, Bench, Client

POLLIN, POLLERR = 1, 8
POSITIONS = SPEC.block_tokens
NOBODY = -1


# --------------------------------------------------------------------------------------------------------- the model


@dataclass
class Sent:
    """A batch in the model's queue: its two actions, a copy and a write."""

    number: int
    fence: int
    pair: tuple[int, int] | None
    token: int
    deadline_us: float
    start_us: int = 0
    due_us: int = 0

    @property
    def is_too_late(self) -> bool:
        return self.deadline_us < self.start_us


@dataclass
class Open:
    """An open file in the model."""

    client: Client
    writable: bool
    first_reset_count: int
    submitted: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """Of the batches that are over."""

    @property
    def has_room(self) -> bool:
        """Whether another batch may be in flight."""
        return self.submitted - len(self.statuses) < SPEC.max_in_flight


class Devices(RuleBasedStateMachine):
    """Files are opened and closed, claim and submit; the model is asked after each."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.files: dict[int, Open] = {}
        self.owners = [NOBODY] * SPEC.blocks
        self.kv = [[0] * POSITIONS for _ in range(SPEC.blocks)]
        self.queue: list[Sent] = []
        self.now_us = 0
        self.reset_count = 0

    def file(self, data: st.DataObject, *, writable: bool = True) -> tuple[int, Open]:
        """One of the open files."""
        number = data.draw(st.sampled_from([n for n, file in self.files.items() if file.writable or not writable]))
        return number, self.files[number]

    def has_writer(self) -> bool:
        return any(file.writable for file in self.files.values())

    # ------------------------------------------------------------------------------------------------------- files

    @rule(writable=st.sampled_from([True, True, False]))
    def opens(self, writable: bool) -> None:  # noqa: FBT001 - hypothesis names its arguments
        if len(self.files) == SPEC.contexts:
            with pytest.raises(OSError, match="contexts are in use") as caught:
                self.bench.client()
            assert caught.value.errno == errno.EBUSY
            return
        client = self.bench.client(writable=writable)
        assert client.number == min(set(range(SPEC.contexts)) - set(self.files))
        self.files[client.number] = Open(client, writable, self.reset_count)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        number, _ = self.file(data, writable=False)
        self.bench.device.release(number)
        del self.files[number]
        self.queue = [sent for sent in self.queue if sent.number != number]
        self.schedule()
        self.owners = [NOBODY if owner == number else owner for owner in self.owners]

    # ------------------------------------------------------------------------------------------------------ claims

    @precondition(has_writer)
    @rule(data=st.data(), want=st.integers(1, SPEC.blocks), is_exact=st.booleans())
    def claims(self, data: st.DataObject, want: int, is_exact: bool) -> None:  # noqa: FBT001 - as above
        number, file = self.file(data)
        found = self.run_of(want) or (None if is_exact else self.longest_run())
        flags = abi.CLAIM_EXACT if is_exact else 0
        if found is None:
            assert file.client.refused(abi.CLAIM_BLOCKS, want=want, flags=flags) == "ENOSPC"
            return
        answer = file.client.ask(abi.CLAIM_BLOCKS, want=want, flags=flags)
        assert (answer.first, answer.granted) == found
        for block in range(answer.first, answer.first + answer.granted):
            self.owners[block] = number
            self.kv[block] = [0] * POSITIONS

    def run_of(self, want: int) -> tuple[int, int] | None:
        """The first `want` free blocks in a row."""
        for first in range(SPEC.blocks - want + 1):
            if self.owners[first : first + want] == [NOBODY] * want:
                return first, want
        return None

    def longest_run(self) -> tuple[int, int] | None:
        return next((run for want in range(SPEC.blocks, 0, -1) if (run := self.run_of(want))), None)

    # ----------------------------------------------------------------------------------------------------- batches

    @precondition(has_writer)
    @rule(data=st.data(), token=st.integers(0, 2**31 - 1), patience_us=st.sampled_from([None, -1, 0, 150, 10**6]))
    def submits(self, data: st.DataObject, token: int, patience_us: int | None) -> None:
        number, file = self.file(data)
        mine = [block for block, owner in enumerate(self.owners) if owner == number]
        pair = (data.draw(st.sampled_from(mine)), data.draw(st.sampled_from(mine))) if mine else None
        records = [] if pair is None else [copy(pair), step([pair[1]], [token])]
        deadline_us = None if patience_us is None else max(0, self.now_us + patience_us)
        submission = file.client.submission(
            *records, deadline_ns=abi.NO_DEADLINE if deadline_us is None else deadline_us * 1000
        )
        if not file.has_room:
            assert file.client.refused(abi.SUBMIT_BATCH, **submission) == "EAGAIN"
            return
        file.submitted += 1
        assert file.client.ask(abi.SUBMIT_BATCH, **submission).fence == file.submitted
        deadline = math.inf if deadline_us is None else deadline_us
        self.queue.append(Sent(number, file.submitted, pair, token, deadline))
        self.schedule()

    def schedule(self) -> None:
        """Each begins when the one in front of it is over, and nobody begins anew."""
        idle_us = self.now_us
        for sent in self.queue:
            is_under_way = sent.due_us > 0 and sent.start_us <= self.now_us
            if not is_under_way:
                sent.start_us = idle_us
                sent.due_us = sent.start_us if sent.is_too_late else sent.start_us + STEP_US
            idle_us = sent.due_us

    @precondition(lambda self: any(file.writable and file.has_room for file in self.files.values()))
    @rule(data=st.data())
    def submits_what_is_another_s(self, data: st.DataObject) -> None:
        writers = [number for number, file in self.files.items() if file.writable and file.has_room]
        number = data.draw(st.sampled_from(writers))
        file = self.files[number]
        others = [block for block, owner in enumerate(self.owners) if owner != number]
        if others:
            block = data.draw(st.sampled_from(others))
            assert file.client.refused(abi.SUBMIT_BATCH, **file.client.submission(zero(block))) == "EINVAL"
            assert (file.client.error.record, file.client.error.item, file.client.error.value) == (0, 0, block)

    @rule(microseconds=st.sampled_from([0, 1, STEP_US - 1, STEP_US, 3 * STEP_US, 10**6]))
    def time_goes_by(self, microseconds: int) -> None:
        has_news = self.bench.pass_us(microseconds)
        self.now_us += microseconds
        due = [sent for sent in self.queue if sent.due_us <= self.now_us]
        self.queue = self.queue[len(due) :]
        for sent in due:
            if sent.pair and not sent.is_too_late:
                source, target = sent.pair
                self.kv[target] = self.kv[source].copy()
                self.kv[target][0] = sent.token
            self.files[sent.number].statuses[sent.fence] = -errno.ETIMEDOUT if sent.is_too_late else 0
        assert has_news >= bool(due)  # a reset since the last time is news too

    @precondition(has_writer)
    @rule(data=st.data())
    def resets(self, data: st.DataObject) -> None:
        _, file = self.file(data)
        self.reset_count += 1
        assert file.client.ask(abi.RESET).reset_count == self.reset_count
        for sent in self.queue:
            self.files[sent.number].statuses[sent.fence] = -errno.ECANCELED
        self.queue = []
        self.kv = [
            row if owner == NOBODY else [POISON] * POSITIONS for row, owner in zip(self.kv, self.owners, strict=True)
        ]

    @precondition(lambda self: any(not file.writable for file in self.files.values()))
    @rule()
    def readers_change_nothing(self) -> None:
        for file in self.files.values():
            if not file.writable:
                submission = file.client.submission()
                assert file.client.refused(abi.SUBMIT_BATCH, **submission) == "EBADF"
                assert file.client.refused(abi.CLAIM_BLOCKS, want=1) == "EBADF"
                assert file.client.refused(abi.RESET) == "EBADF"

    # -------------------------------------------------------------------------------------------------- what is seen

    @invariant()
    def the_arena_is_as_modelled(self) -> None:
        assert np.frombuffer(self.bench.arena, np.int32).reshape(SPEC.blocks, -1).tolist() == self.kv

    @invariant()
    def the_queue_is_as_modelled(self) -> None:
        due_ns = self.bench.device.next_due_ns()
        assert due_ns == (self.queue[0].due_us * 1000 if self.queue else None)

    @invariant()
    def each_file_sees_its_own(self) -> None:
        for number, file in self.files.items():
            counts = file.client.ask(abi.QUERY_FREE_BLOCKS)
            told = (counts.free, counts.total, counts.used_by_fd)
            assert told == (self.owners.count(NOBODY), SPEC.blocks, self.owners.count(number))
            assert file.client.signaled == len(file.statuses)
            assert file.client.page["reset_count"] == self.reset_count
            failed = max((fence for fence, status in file.statuses.items() if status), default=0)
            assert file.client.page["failed"] == failed
            for fence in range(max(1, file.submitted - 30), file.submitted + 1):
                assert file.client.status(fence) == file.statuses.get(fence)
            was_reset = POLLERR if self.reset_count > file.first_reset_count else 0
            is_done = POLLIN if 0 < file.submitted == len(file.statuses) else 0
            assert self.bench.device.poll_events(number) == was_reset | is_done


TestDevices = Devices.TestCase
TestDevices.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --------------------------------------------------------------------------------------------------------- the rest


def test_wait_without_an_answer_names_its_deadline() -> None:
    bench = Bench()
    client = bench.client()
    client.submit()
    later_ns = bench.clock.now_ns + 10**9
    assert client.ask(abi.WAIT_FENCE, fence=1, deadline_ns=later_ns) == Pending(later_ns)
    bench.pass_us(STEP_US)
    assert client.ask(abi.WAIT_FENCE, fence=1, deadline_ns=later_ns).status == 0


def test_the_newest_failures_are_remembered() -> None:
    bench = Bench()
    client = bench.client()
    for _ in range(100):
        client.submit(deadline_ns=0)
        bench.pass_us(STEP_US)
    assert [client.status(fence) for fence in (100, 37)] == [-errno.ETIMEDOUT] * 2
    assert [client.status(fence) for fence in (36, 1)] == [0, 0]  # too long ago
    assert client.page["failed"] == 100


def test_what_was_checked_is_what_is_run() -> None:
    """The ring is the client's to write at any time; the device has a copy."""
    bench = Bench()
    client = bench.client()
    block = client.claim(2)
    client.submit(step([block], [5]))
    client.submission(step([block + 9], [6]))  # over the first one, which is in flight
    bench.pass_us(STEP_US)
    assert np.frombuffer(bench.arena, np.int32)[POSITIONS * block] == 5
    assert np.count_nonzero(np.frombuffer(bench.arena, np.int32)) == 1


def test_what_was_dropped_keeps_nobody_waiting() -> None:
    bench = Bench()
    gone, waiting = bench.client(), bench.client()
    for _ in range(SPEC.max_in_flight):
        gone.submit()
    waiting.submit(deadline_ns=2 * STEP_US * 1000)
    bench.pass_us(STEP_US // 2)
    bench.device.release(gone.number)
    later = bench.client()
    later.submit()
    bench.pass_us(STEP_US)
    assert (waiting.status(1), later.status(1)) == (0, None)  # in time, where it would have been too late
    bench.pass_us(STEP_US)
    assert later.status(1) == 0


def test_reset_count_goes_round() -> None:
    bench = Bench()
    client = bench.client()
    bench.device.reset_count = 2**32 - 1
    assert client.ask(abi.RESET).reset_count == 0
    assert client.submit(epoch=0) == 1


def numbers_of_calls() -> list[Any]:
    return [message.request for message in abi.MESSAGES]


@pytest.mark.parametrize("request_number", [0, 1, 2**32 - 1, *(number ^ 1 << 16 for number in numbers_of_calls())])
def test_other_numbers_are_no_calls(request_number: int) -> None:
    bench = Bench()
    number = bench.device.open()
    with pytest.raises(OSError, match="ioctl") as caught:
        bench.device.ioctl(number, request_number, b"")
    assert caught.value.errno == errno.ENOTTY


@pytest.mark.parametrize("message", [message for message in abi.MESSAGES if message.request >> 30 & 1], ids=str)
@pytest.mark.parametrize("size", [0, 1, -1, 1000])
def test_arguments_of_another_size(message: abi.Message, size: int) -> None:
    bench = Bench()
    number = bench.device.open()
    argument = bytes(size if size >= 0 else message.size - 1)
    with pytest.raises(OSError, match="bytes") as caught:
        bench.device.ioctl(number, message.request, argument)
    assert caught.value.errno == errno.EINVAL
