"""The keeper of schedulers: the next only after the last was reaped, and ever more slowly when they die young."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time as real_time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends.base import Backend
from ironbatch.backends.mock import MockBackend
from ironbatch.config import Config
from ironbatch.driver import mount as mount_module
from ironbatch.errors import DeviceUnavailable
from ironbatch.health import health_problem
from ironbatch.scheduler import keeper as keeper_module
from ironbatch.scheduler import process as process_module
from ironbatch.scheduler.keeper import BACKOFF_FIRST_S, BACKOFF_MAX_S, STEADY_S, SchedulerKeeper, restart_delay_s
from ironbatch.scheduler.process import EXIT_START_FAILED, STOP_SIGNAL, fork_scheduler
from ironbatch.shm.engine import Engine
from tests.support import FakeWorker, small_config, wait_until


class FakeTime:
    """In the place of the keeper's `time`: stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        real_time.sleep(min(seconds, 0.001))  # for whoever dies meanwhile


def fork(in_child: Callable[[], int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: this process may have threads
        pid = os.fork()
    if pid == 0:
        status = 99
        with contextlib.suppress(BaseException):
            status = in_child()
        os._exit(status)
    return pid


def wait_for_a_signal(*ignored: int) -> Callable[[], int]:
    """What a stub scheduler does: nothing, until a signal ends it."""

    def in_child() -> int:
        signal.signal(STOP_SIGNAL, signal.SIG_IGN if STOP_SIGNAL in ignored else signal.SIG_DFL)
        while True:
            signal.pause()

    return in_child


def is_reaped(pid: int) -> bool:
    """Whether nothing is left of a child of ours, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Stubs:
    """Stands in for `fork_scheduler`: forks processes that wait, and asserts that there is only one at a time."""

    def __init__(self) -> None:
        self.in_child = wait_for_a_signal()
        self.pids: list[int] = []

    def fork_scheduler(self, config: object, engine: object, clock: object) -> int:
        assert all(is_reaped(pid) for pid in self.pids), "two schedulers at once"
        self.pids.append(fork(self.in_child))
        return self.pids[-1]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Let the present one die; it is a zombie afterwards."""
        os.kill(self.pids[-1], number)
        self.await_death()

    def await_death(self) -> None:
        os.waitid(os.P_PID, self.pids[-1], os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        for pid in self.pids:
            if not is_reaped(pid):
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    found = FakeTime()
    monkeypatch.setattr(keeper_module, "time", found)
    return found


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubs]:
    found = Stubs()
    monkeypatch.setattr(process_module, "fork_scheduler", found.fork_scheduler)
    yield found
    found.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine.create(small_config(), 0)
    yield found
    found.close()


@pytest.fixture
def keeper(engine: Engine, stubs: Stubs, time: FakeTime) -> SchedulerKeeper:
    return SchedulerKeeper(small_config(scheduler_timeout_s=0), engine)


# ----------------------------------------------------------------------------------------------------------- delays


def test_the_first_death_is_followed_at_once_and_the_others_ever_more_slowly() -> None:
    delays = [restart_delay_s(count) for count in range(60)]
    assert delays[:5] == [0.0, 0.0, BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert delays == sorted(delays)
    assert max(delays) == delays[20] == delays[-1] == BACKOFF_MAX_S


@pytest.mark.parametrize("count", [10**3, 10**6, 10**18])
def test_however_many_have_died(count: int) -> None:
    assert restart_delay_s(count) == BACKOFF_MAX_S


# ---------------------------------------------------------------------------------------------------------- restart


def test_a_start_counts_an_epoch(keeper: SchedulerKeeper, stubs: Stubs, engine: Engine) -> None:
    keeper.start()
    assert engine.segment.header["epoch"] == 1
    assert len(stubs.pids) == 1
    assert keeper.due_in_s() is None
    keeper.look()
    assert len(stubs.pids) == 1, "it lives"
    keeper.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_dies_is_reaped_and_followed_at_once(
    keeper: SchedulerKeeper, stubs: Stubs, engine: Engine, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.start()
    stubs.kill(number)
    keeper.look()
    assert len(stubs.pids) == 2
    assert is_reaped(stubs.pids[0])
    assert engine.segment.header["epoch"] == 2
    assert f"signal {signal.Signals(number).name}" in caplog.text
    keeper.stop()
    assert is_reaped(stubs.pids[1])


def test_those_that_die_young_are_followed_ever_more_slowly(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime
) -> None:
    keeper.start()
    for deaths in range(1, 9):
        stubs.kill()
        keeper.look()
        delay_s = restart_delay_s(deaths)
        if delay_s > 0:
            assert len(stubs.pids) == deaths, "not yet"
            due_s = keeper.due_in_s()
            assert due_s == pytest.approx(delay_s)
            time.now_s += delay_s - 0.001
            keeper.look()
            assert len(stubs.pids) == deaths, "still not"
            time.now_s += 0.002
            assert keeper.due_in_s() == 0.0
            keeper.look()
        assert len(stubs.pids) == deaths + 1
        assert keeper.due_in_s() is None
    keeper.stop()


def test_one_death_is_nobodys_business_but_a_storm_is_told(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, engine: Engine
) -> None:
    header = engine.segment.header
    keeper.start()
    for must_tell in (False, False, False, True):
        header["scheduler_ready"] = 1  # as the scheduler does
        stubs.kill()
        keeper.look()
        assert bool(header["scheduler_ready"]) is not must_tell
        time.sleep(BACKOFF_MAX_S)
        keeper.look()
    assert not keeper.cannot_start


def test_a_fork_that_fails_is_tried_again(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.start()
    stubs.kill()

    def no_fork(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(process_module, "fork_scheduler", no_fork)
        keeper.look()
    assert len(stubs.pids) == 1
    assert keeper.due_in_s() == BACKOFF_MAX_S
    time.sleep(BACKOFF_MAX_S)
    keeper.look()
    assert len(stubs.pids) == 2


def test_one_that_lived_long_is_followed_at_once_whatever_was_before(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime
) -> None:
    keeper.start()
    for _ in range(4):
        stubs.kill()
        keeper.look()
        time.now_s += BACKOFF_MAX_S
        keeper.look()
    assert len(stubs.pids) == 5
    time.now_s += STEADY_S
    stubs.kill()
    keeper.look()
    assert len(stubs.pids) == 6
    stubs.kill()
    keeper.look()
    assert len(stubs.pids) == 7, "and the next counts as the first again"
    keeper.stop()


def test_never_two_at_once_whenever_it_looks(keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime) -> None:
    """`Stubs.fork_scheduler` asserts it; here with deaths that are noticed late and looks that find nothing."""
    keeper.start()
    for round_ in range(12):
        if round_ % 3:
            os.kill(stubs.pids[-1], signal.SIGKILL)
            keeper.look()  # the kernel may not be done with it
            if not is_reaped(stubs.pids[-1]):
                stubs.await_death()
        keeper.look()
        keeper.look()
        time.now_s += BACKOFF_MAX_S / 2
        keeper.look()
        time.now_s += BACKOFF_MAX_S
        keeper.look()
        assert sum(not is_reaped(pid) for pid in stubs.pids) == 1
    keeper.stop()


def test_one_that_is_stopped_is_not_dead(keeper: SchedulerKeeper, stubs: Stubs) -> None:
    keeper.start()
    os.kill(stubs.pids[0], signal.SIGSTOP)
    wait_until(lambda: os.waitid(os.P_PID, stubs.pids[0], os.WSTOPPED | os.WNOWAIT | os.WNOHANG), what="the stop")
    keeper.look()
    assert len(stubs.pids) == 1
    assert not is_reaped(stubs.pids[0])
    os.kill(stubs.pids[0], signal.SIGCONT)
    keeper.stop()


def test_it_is_starting_until_its_first_step(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, engine: Engine
) -> None:
    header = engine.segment.header

    def step() -> None:
        header["step_started_ns"] = real_time.monotonic_ns()  # as the scheduler does, idle or not

    assert keeper.is_starting, "there is none yet"
    keeper.start()
    header["scheduler_ready"] = 1
    assert keeper.is_starting
    step()
    assert not keeper.is_starting
    stubs.kill()
    keeper.look()
    assert len(stubs.pids) == 2
    assert keeper.is_starting, "the step was its predecessor's"
    stubs.kill()
    keeper.look()
    assert keeper.due_in_s(), "the next one has to wait"
    step()
    assert keeper.is_starting, "nobody is there"
    time.sleep(BACKOFF_MAX_S)
    keeper.look()
    step()
    assert not keeper.is_starting
    keeper.stop()


def test_deaths_that_convict_a_sequence_make_no_storm(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, engine: Engine
) -> None:
    """Three in company, two alone; and the same once more for another, with one in company, as it is then."""
    header = engine.segment.header
    keeper.start()
    for alone in (0, 0, 0, 1, 1, 0, 1, 1):
        header["scheduler_ready"], header["in_device_call"], header["in_quarantine"] = 1, 1, alone
        count = len(stubs.pids)
        stubs.kill()
        keeper.look()
        assert header["scheduler_ready"] == 1
        assert len(stubs.pids) == count + 1 or not alone, "that one is followed at once"
        time.sleep(BACKOFF_MAX_S)
        keeper.look()
    keeper.stop()


@pytest.mark.parametrize(("in_device_call", "in_quarantine"), [(0, 0), (1, 0), (0, 1)])
def test_all_other_deaths_do(
    keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, engine: Engine, in_device_call: int, in_quarantine: int
) -> None:
    header = engine.segment.header
    keeper.start()
    for _ in range(4):
        header["scheduler_ready"] = 1
        header["in_device_call"], header["in_quarantine"] = in_device_call, in_quarantine
        stubs.kill()
        keeper.look()
        time.sleep(BACKOFF_MAX_S)
        keeper.look()
    assert header["scheduler_ready"] == 0
    keeper.stop()


# ------------------------------------------------------------------------------------------------------ that hangs

TIMEOUT_S = 4
LOOK_S = TIMEOUT_S / 10


@pytest.fixture
def watchful(engine: Engine, stubs: Stubs, time: FakeTime) -> Iterator[SchedulerKeeper]:
    """A keeper whose scheduler has begun to step."""
    found = SchedulerKeeper(small_config(scheduler_timeout_s=TIMEOUT_S), engine)
    found.start()
    engine.segment.header["scheduler_ready"] = 1
    engine.segment.header["step_started_ns"] = real_time.monotonic_ns()
    yield found
    found.stop()


def look_for(keeper: SchedulerKeeper, time: FakeTime, seconds: float, every_s: float = LOOK_S) -> None:
    """Look as often as a supervisor does that has nothing else to do."""
    end_s = time.now_s + seconds
    while time.now_s < end_s:
        time.now_s += every_s
        keeper.look()


def is_killed(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def test_one_without_progress_is_killed_and_reaped_before_the_next(
    watchful: SchedulerKeeper, stubs: Stubs, time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    """`Stubs.fork_scheduler` asserts that it is reaped."""
    assert watchful.due_in_s() == pytest.approx(LOOK_S)
    look_for(watchful, time, TIMEOUT_S - LOOK_S)
    assert "killed" not in caplog.text
    look_for(watchful, time, 3 * LOOK_S)
    assert "has made no progress for 4." in caplog.text
    assert watchful.due_in_s() is not None
    wait_until(lambda: (watchful.look(), len(stubs.pids) == 2)[1], what="the next")
    assert is_reaped(stubs.pids[0])


def test_one_that_is_stopped_too_and_nothing_can_continue_it(
    watchful: SchedulerKeeper, stubs: Stubs, time: FakeTime
) -> None:
    os.kill(stubs.pids[0], signal.SIGSTOP)
    look_for(watchful, time, TIMEOUT_S + 2 * LOOK_S)
    wait_until(lambda: (watchful.look(), len(stubs.pids) == 2)[1], what="the next")
    with pytest.raises(ProcessLookupError):
        os.kill(stubs.pids[0], signal.SIGCONT)


def test_a_long_step_is_not_a_hang(
    watchful: SchedulerKeeper, stubs: Stubs, time: FakeTime, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.segment.header["longest_step_ns"] = 60 * 10**9
    engine.segment.header["in_device_call"] = 1
    look_for(watchful, time, 60 + TIMEOUT_S - LOOK_S)
    assert "killed" not in caplog.text
    look_for(watchful, time, 3 * LOOK_S)
    assert "in a call to its backend; it is killed" in caplog.text


def test_whoever_beats_lives(watchful: SchedulerKeeper, time: FakeTime, engine: Engine, stubs: Stubs) -> None:
    for beat in range(100):
        engine.segment.header["heartbeat_ns"] = beat
        look_for(watchful, time, 0.9 * TIMEOUT_S)
    assert len(stubs.pids) == 1
    assert not is_killed(stubs.pids[0])


def test_silence_that_nobody_was_there_to_hear_does_not_count(
    watchful: SchedulerKeeper, time: FakeTime, stubs: Stubs
) -> None:
    """The supervisor was stopped, or had no processor; so may the scheduler have been."""
    for _ in range(3):
        time.now_s += 1_000_000
        watchful.look()
        look_for(watchful, time, LOOK_S / 2, every_s=LOOK_S / 2)
    assert not is_killed(stubs.pids[0])
    look_for(watchful, time, TIMEOUT_S)
    wait_until(lambda: is_reaped(stubs.pids[0]) or is_killed(stubs.pids[0]), what="its end")


@pytest.mark.parametrize("what", ["starts", "opens its backend anew", "waits to open its backend anew"])
def test_one_that_starts_may_take_its_time_unless_it_is_stopped(
    watchful: SchedulerKeeper, time: FakeTime, engine: Engine, stubs: Stubs, what: str
) -> None:
    if what == "starts":
        engine.segment.header["step_started_ns"] = 1
    elif what == "opens its backend anew":
        engine.segment.header["in_device_call"] = layout.CALL_OPENING
    else:
        engine.segment.header["scheduler_ready"] = 0
    look_for(watchful, time, 20 * TIMEOUT_S)
    assert not is_killed(stubs.pids[0])
    os.kill(stubs.pids[0], signal.SIGSTOP)
    wait_until(lambda: state_of(stubs.pids[0]) == "T", what="the stop")
    look_for(watchful, time, TIMEOUT_S + 2 * LOOK_S)
    wait_until(lambda: is_reaped(stubs.pids[0]) or is_killed(stubs.pids[0]), what="its end")


@pytest.mark.parametrize("when", ["it starts", "it steps", "it opens its backend anew", "it is about to be killed"])
def test_one_that_dies_while_it_is_looked_at_is_reaped_at_the_next_look(
    watchful: SchedulerKeeper,
    stubs: Stubs,
    time: FakeTime,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """Just after the look has found it alive."""
    if when == "it starts":
        engine.segment.header["step_started_ns"] = 1
    elif when == "it opens its backend anew":
        engine.segment.header["in_device_call"] = layout.CALL_OPENING
    elif when == "it is about to be killed":
        look_for(watchful, time, TIMEOUT_S - LOOK_S)

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        found = os.waitpid(pid, options)
        stubs.kill()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "os", SimpleNamespace(**{**vars(os), "waitpid": waitpid}))
        time.now_s += 2 * LOOK_S
        watchful.look()
    assert len(stubs.pids) == 1, "it had not ended when it was looked for"
    watchful.look()
    assert is_reaped(stubs.pids[0])
    assert len(stubs.pids) == 2


def test_without_a_timeout_nobody_is_killed(
    engine: Engine, stubs: Stubs, time: FakeTime, keeper: SchedulerKeeper
) -> None:
    keeper.start()
    engine.segment.header["scheduler_ready"] = 1
    engine.segment.header["step_started_ns"] = real_time.monotonic_ns()
    look_for(keeper, time, 1_000, every_s=1)
    assert keeper.due_in_s() is None
    assert not is_killed(stubs.pids[0])
    keeper.stop()


def test_one_that_does_not_even_die_is_told_and_waited_for_by_nobody(
    watchful: SchedulerKeeper,
    stubs: Stubs,
    time: FakeTime,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a system call that cannot be interrupted: it cannot be reaped."""
    header = engine.segment.header
    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "os", SimpleNamespace(**{**vars(os), "waitpid": lambda pid, options: (0, 0)}))
        look_for(watchful, time, 1_000, every_s=1)
        assert header["device_hung"] == 1
        assert len(stubs.pids) == 1, "no other beside it"
        problem = health_problem(header, real_time.monotonic_ns())
        assert problem is not None
        assert problem.startswith("device hung: ")
        assert caplog.text.count("does not end: its device hangs") == 1
        before_s = time.now_s
        watchful.stop()
        assert time.now_s - before_s < 2 * keeper_module.STOP_S + 1
        watchful._pid = stubs.pids[0]  # as if it had not been told to stop
    wait_until(lambda: (watchful.look(), len(stubs.pids) == 2)[1], what="the next")
    assert header["device_hung"] == 0


class StuckDevice:
    """A device whose scheduler does not end when it is killed, until its node's connection is aborted."""

    def __init__(self, patch: pytest.MonkeyPatch, *, verdict: bool | Exception) -> None:
        self.aborted: list[str] = []
        self._verdict = verdict
        self._is_stuck = True
        patch.setattr(mount_module, "abort_connection", self._abort)
        patch.setattr(keeper_module, "os", SimpleNamespace(**{**vars(os), "waitpid": self._waitpid}))

    def _abort(self, path: str) -> bool:
        self.aborted.append(path)
        if isinstance(self._verdict, Exception):
            raise self._verdict
        self._is_stuck = not self._verdict
        return self._verdict

    def _waitpid(self, pid: int, options: int) -> tuple[int, int]:
        return (0, 0) if self._is_stuck else os.waitpid(pid, options)


ON_A_NODE = {"backend": "device", "device": "/run/x/device0", "scheduler_timeout_s": TIMEOUT_S}


def let_it_hang(keeper: SchedulerKeeper, engine: Engine, time: FakeTime) -> None:
    """It has served, and is killed as hung."""
    header = engine.segment.header
    keeper.start()
    header["scheduler_ready"] = header["in_device_call"] = 1
    header["heartbeat_ns"] = header["step_started_ns"] = real_time.monotonic_ns()
    while keeper._killed_at_s is None:
        look_for(keeper, time, LOOK_S)


def test_connection_of_a_hung_node_is_aborted_so_that_its_scheduler_can_be_reaped(
    stubs: Stubs,
    time: FakeTime,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = StuckDevice(monkeypatch, verdict=True)
    keeper = SchedulerKeeper(small_config(**ON_A_NODE), engine)
    let_it_hang(keeper, engine, time)
    assert device.aborted == [], "it may still end by itself"
    look_for(keeper, time, 3 * keeper_module.HUNG_S)
    wait_until(lambda: (keeper.look(), len(stubs.pids) == 2)[1], what="the next")
    assert device.aborted == ["/run/x/device0"]
    assert "the connection of the device /run/x/device0 was aborted" in caplog.text
    assert engine.segment.header["device_hung"] == 0
    keeper.stop()


@pytest.mark.parametrize(
    ("options", "verdict", "told"),
    [
        ({}, False, "/run/x/device0 is no FUSE node"),
        ({}, DeviceUnavailable("the connection can't be aborted: as root, end the server"), "as root, end the server"),
        ({"device": "software"}, True, None),
        ({"backend": "mock", "device": ""}, True, None),
    ],
)
def test_what_cannot_be_aborted_is_told_once_and_waited_for(
    stubs: Stubs,
    time: FakeTime,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    *,
    verdict: bool | Exception,
    told: str | None,
) -> None:
    with monkeypatch.context() as patch:
        device = StuckDevice(patch, verdict=verdict)
        keeper = SchedulerKeeper(small_config(**(ON_A_NODE | options)), engine)
        let_it_hang(keeper, engine, time)
        look_for(keeper, time, 10)
        assert engine.segment.header["device_hung"] == 1
        assert len(device.aborted) == (told is not None)
        assert told is None or caplog.text.count(told) == 1
        assert len(stubs.pids) == 1
        problem = health_problem(engine.segment.header, real_time.monotonic_ns())
        assert problem is not None
        assert problem.startswith("device hung: ")
    keeper.stop()


def test_stop_frees_a_scheduler_that_is_stuck_in_its_device(
    stubs: Stubs, time: FakeTime, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = StuckDevice(monkeypatch, verdict=True)
    keeper = SchedulerKeeper(small_config(**ON_A_NODE), engine)
    keeper.start()
    keeper.stop()
    assert device.aborted == ["/run/x/device0"]
    assert is_reaped(stubs.pids[0])
    assert "does not end" not in caplog.text


def test_device_that_is_away_after_it_was_there_is_tried_again_and_again(
    stubs: Stubs, time: FakeTime, engine: Engine
) -> None:
    """The next schedulers find a dead node. The server lives on, and /health never says that all is well."""
    keeper = SchedulerKeeper(small_config(**ON_A_NODE), engine)
    let_it_hang(keeper, engine, time)
    stubs.in_child = lambda: EXIT_START_FAILED
    wait_until(lambda: (keeper.look(), len(stubs.pids) == 2)[1], what="the next")
    before_s = time.now_s
    for failures in range(1, 8):
        stubs.await_death()
        if failures == 7:
            stubs.in_child = wait_for_a_signal()  # the device is back
        keeper.look()
        assert not keeper.cannot_start
        assert health_problem(engine.segment.header, real_time.monotonic_ns()) is not None
        time.now_s += keeper.due_in_s() or 0.0
        keeper.look()
        assert len(stubs.pids) == 2 + failures
    assert time.now_s - before_s > 2 * BACKOFF_MAX_S
    keeper.stop()


# ------------------------------------------------------------------------------------------------- that cannot start


@pytest.mark.parametrize(
    ("code", "was_ready", "cannot_start"),
    [(EXIT_START_FAILED, 0, True), (EXIT_START_FAILED, 1, False), (1, 0, False), (0, 0, False), (0, 1, False)],
)
def test_whether_a_restart_would_help(
    keeper: SchedulerKeeper, stubs: Stubs, engine: Engine, code: int, was_ready: int, *, cannot_start: bool
) -> None:
    stubs.in_child = lambda: code
    engine.segment.header["scheduler_ready"] = was_ready
    keeper.start()
    stubs.await_death()
    stubs.in_child = wait_for_a_signal()
    keeper.look()
    assert keeper.cannot_start == cannot_start
    assert len(stubs.pids) == (1 if cannot_start else 2)
    assert is_reaped(stubs.pids[0])
    keeper.stop()


# ------------------------------------------------------------------------------------------------------------- stop


def test_stop_before_any_start(keeper: SchedulerKeeper) -> None:
    keeper.stop()
    keeper.look()


def test_stop_asks_first(keeper: SchedulerKeeper, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "time", real_time)
    monkeypatch.setattr(keeper_module, "STOP_S", 20.0)
    reader, writer = os.pipe()

    def in_child() -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
        os.write(writer, b"!")
        signal.sigwait({STOP_SIGNAL})
        os.write(writer, b"asked")
        return 0

    stubs.in_child = in_child
    keeper.start()
    assert os.read(reader, 1) == b"!"
    keeper.stop()
    os.close(writer)
    assert os.read(reader, 16) == b"asked"
    os.close(reader)
    assert is_reaped(stubs.pids[0])
    keeper.stop()
    keeper.look()
    assert len(stubs.pids) == 1, "and nothing follows"


@pytest.mark.parametrize("hang", ["ignores the signal", "is stopped"])
def test_one_that_does_not_listen_is_killed(keeper: SchedulerKeeper, stubs: Stubs, time: FakeTime, hang: str) -> None:
    if hang == "ignores the signal":
        reader, writer = os.pipe()

        def in_child() -> int:
            signal.signal(STOP_SIGNAL, signal.SIG_IGN)
            os.write(writer, b"!")
            return wait_for_a_signal(STOP_SIGNAL)()

        stubs.in_child = in_child
        keeper.start()
        assert os.read(reader, 1) == b"!"
        os.close(reader)
        os.close(writer)
    else:
        keeper.start()
        os.kill(stubs.pids[0], signal.SIGSTOP)
        wait_until(lambda: state_of(stubs.pids[0]) == "T", what="the stop")
    before_s = time.now_s
    keeper.stop()
    assert is_reaped(stubs.pids[0])
    assert keeper_module.STOP_S <= time.now_s - before_s < 2 * keeper_module.STOP_S


def test_stop_finds_one_that_has_died_meanwhile(keeper: SchedulerKeeper, stubs: Stubs) -> None:
    keeper.start()
    stubs.kill()
    keeper.stop()
    assert is_reaped(stubs.pids[0])


# -------------------------------------------------------------------------------------------------- the real process


@pytest.fixture
def quiet_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, in a test's process that may have threads."""

    def quiet(*arguments: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return fork_scheduler(*arguments)

    monkeypatch.setattr(process_module, "fork_scheduler", quiet)


def test_a_real_scheduler_is_killed_followed_and_stopped(engine: Engine, quiet_fork: None) -> None:
    header = engine.segment.header
    keeper = SchedulerKeeper(small_config(mock_token_latency_us=2000), engine)
    keeper.warm_up()
    worker = FakeWorker(engine.segment, 0)
    stream = worker.submit(2, 40)
    keeper.start()
    try:
        wait_until(lambda: (worker.collect(), stream.token_ids)[1], what="the first token")
        first = int(header["scheduler_pid"])
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: (keeper.look(), header["epoch"] == 2)[1], what="the restart")
        assert is_reaped(first)
        wait_until(lambda: engine.segment.metrics[0]["scheduler_starts"] == 2, what="the second scheduler")
        second = int(header["scheduler_pid"])
        assert second != first
        wait_until(lambda: (worker.collect(), stream.is_over)[1], what="the stream's end")
        assert stream.token_ids == stream.expected_token_ids(40)
    finally:
        keeper.stop()
    assert is_reaped(second)
    assert keeper.due_in_s() is None


def test_a_real_one_asleep_is_stopped_at_once(
    engine: Engine, quiet_fork: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps in 500 ms; the stop signal wakes it. Killed would be what `stop` does after 2 s."""
    header = engine.segment.header
    keeper = SchedulerKeeper(small_config(), engine)
    keeper.start()
    pid = int(keeper._pid)
    wait_until(lambda: header["scheduler_sleeping"], what="its sleep")
    wait_until(lambda: state_of(pid) == "S", what="its sleep")
    statuses: list[int] = []
    real = os.waitpid

    def waitpid(which: int, options: int) -> tuple[int, int]:
        found, status = real(which, options)
        if found:
            statuses.append(os.waitstatus_to_exitcode(status))
        return found, status

    monkeypatch.setattr(keeper_module, "os", SimpleNamespace(**{**vars(os), "waitpid": waitpid}))
    keeper.stop()
    assert statuses == [0], "it ended by itself"


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_stop_signal_during_the_start_is_not_lost(
    engine: Engine, quiet_fork: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_child, to_child = os.pipe(), os.pipe()

    def create_backend_slowly(config: Config) -> Backend:
        os.write(from_child[1], b"!")
        os.read(to_child[0], 1)
        return MockBackend(config)

    monkeypatch.setattr(process_module, "create_backend", create_backend_slowly)
    before = signal.signal(STOP_SIGNAL, lambda number, frame: None)  # as `processes.signal_pipe` has it
    keeper = SchedulerKeeper(small_config(), engine)
    try:
        keeper.start()
        pid = keeper._pid
        assert os.read(from_child[0], 1) == b"!"
        os.kill(pid, STOP_SIGNAL)
        with contextlib.suppress(BrokenPipeError):
            os.write(to_child[1], b"!")
        wait_until(lambda: is_over(pid) or engine.segment.header["scheduler_sleeping"], what="its end")
        wait_until(lambda: is_over(pid), timeout_s=0.5, what="its end")
    finally:
        signal.signal(STOP_SIGNAL, before)
        keeper.stop()
        for descriptor in (*from_child, *to_child):
            os.close(descriptor)


def is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
