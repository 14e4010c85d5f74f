"""Doorbells."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironbatch.shm.wakeup import Doorbell
from tests.support import wait_until


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    found = Doorbell.create()
    yield found
    found.close()


def test_a_new_one_is_silent(bell: Doorbell) -> None:
    assert not bell.wait(0)


def test_a_ring_before_the_wait_is_heard_once(bell: Doorbell) -> None:
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_many_rings_are_one(bell: Doorbell) -> None:
    for _ in range(1000):
        bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_silenced_rings_are_forgotten(bell: Doorbell) -> None:
    bell.silence()
    bell.ring()
    bell.ring()
    bell.silence()
    assert not bell.wait(0)


def test_it_cannot_fill(bell: Doorbell) -> None:
    os.eventfd_write(bell.descriptor, 2**64 - 2)  # the most that the counter holds
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_a_sleeper_is_woken(bell: Doorbell) -> None:
    heard: list[bool] = []
    sleeper = threading.Thread(target=lambda: heard.append(bell.wait(20_000)))
    sleeper.start()
    status = Path(f"/proc/self/task/{sleeper.native_id}/stat")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S", what="the sleep")
    bell.ring()
    sleeper.join(10)
    assert heard == [True]
    assert not bell.wait(0)


def test_a_wait_comes_to_its_end(bell: Doorbell) -> None:
    assert not bell.wait(1)


def test_each_rings_for_itself() -> None:
    bells = [Doorbell.create() for _ in range(3)]
    bells[1].ring()
    assert [bell.wait(0) for bell in bells] == [False, True, False]
    for bell in bells:
        bell.close()


def test_an_event_loop_sees_it_until_it_is_silenced(bell: Doorbell) -> None:
    poller = select.epoll()
    poller.register(bell.descriptor, select.EPOLLIN)
    assert poller.poll(0) == []
    bell.ring()
    assert poller.poll(0) == poller.poll(0) == [(bell.descriptor, select.EPOLLIN)]
    bell.silence()
    assert poller.poll(0) == []
    poller.close()


def test_an_executed_program_does_not_inherit_it_unasked(bell: Doorbell) -> None:
    assert not os.get_inheritable(bell.descriptor)
    assert not os.get_blocking(bell.descriptor)


def test_a_forked_child_rings_the_same_bell(bell: Doorbell) -> None:
    other = Doorbell(os.dup(bell.descriptor))  # what a fork does to a descriptor
    other.ring()
    other.close()
    assert bell.wait(0)
