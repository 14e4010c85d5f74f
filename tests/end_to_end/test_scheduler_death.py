"""Schedulers that are killed, that kill themselves, that hang; and whole instances that are killed at once.

Whoever still has a socket gets every token, none twice; one that kills the scheduler gets an error, and nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.server import (
    FORMS,
    RawStream,
    Server,
    generate_all,
    is_alive,
    post,
    running,
    segments,
    wait_until,
    without_stats,
)

pytestmark = pytest.mark.end_to_end

POISON_AT_ONCE = 661  # prompt tokens
POISON_LATER = 662  # once it has POISON_TOKENS
POISON_TOKENS = 20

PLUG_IN = f'''\
"""The mock, which kills its process for some prompts, and never returns once when the file $DEADLY_HANG is there."""

import os
import signal
import time

from ironbatch.backends.mock import MockBackend


class DeadlyBackend(MockBackend):
    def execute(self, plan):
        for row in plan.rows:
            is_later = row["prompt_tokens"] == {POISON_LATER} and row["produced_tokens"] >= {POISON_TOKENS}
            if row["prompt_tokens"] == {POISON_AT_ONCE} or is_later:
                os.kill(os.getpid(), signal.SIGKILL)
        hang = os.environ["DEADLY_HANG"]
        if os.path.exists(hang):
            os.rename(hang, hang + ".hangs")
            while True:
                time.sleep(1)
        return super().execute(plan)
'''
METADATA = "Metadata-Version: 2.1\nName: ironbatch-deadly\nVersion: 1\n"
ENTRY_POINTS = "[ironbatch.backends]\ndeadly = deadly:DeadlyBackend\n"

BODIES: list[dict[str, Any]] = [
    {"prompt_tokens": 20 + k, "max_new_tokens": 150 + k, "seed": k, "details": True} for k in range(48)
]
STEP = {"mock_token_latency_us": 10_000}  # so that all of this falls into the streams, however busy the machine


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The plug-in is on the path of the servers of this module; when this file is there, its next step hangs."""
    folder = tmp_path_factory.mktemp("deadly")
    info = folder / "installed" / "ironbatch_deadly-1.dist-info"
    info.mkdir(parents=True)
    (folder / "installed" / "deadly.py").write_text(PLUG_IN)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(folder / "installed"), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("DEADLY_HANG", str(folder / "hang"))
        yield folder / "hang"


class Clients:
    """All bodies at once, on threads."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self._answers: list[bytes] = []
        self._thread = threading.Thread(target=lambda: self._answers.extend(generate_all(server.port, bodies)))
        self._thread.start()

    def answers(self) -> list[bytes]:
        """What they have got, whole, without what differs from run to run."""
        self._thread.join()
        return list(map(without_stats, self._answers))


@contextlib.contextmanager
def streaming(server: Server, bodies: list[dict[str, Any]] = BODIES) -> Iterator[Clients]:
    """All bodies, whose streams have begun; joined at the end."""
    before = server.scheduler_tokens()
    clients = Clients(server, bodies)
    try:
        wait_until(lambda: server.scheduler_tokens() > before + 5 * len(bodies), "the first tokens")
        yield clients
    finally:
        clients.answers()


def undisturbed(server: Server, bodies: list[dict[str, Any]] = BODIES) -> list[bytes]:
    """The answers when nothing happens."""
    return Clients(server, bodies).answers()


def flows_again_s(server: Server, since_s: float) -> float:
    """Seconds from then until there are more tokens than now."""
    tokens = server.scheduler_tokens()
    deadline_s = time.monotonic() + 60
    while server.scheduler_tokens() == tokens:
        assert time.monotonic() < deadline_s, "streams do not flow again"
    return time.monotonic() - since_s


def kill_at_once(server: Server, old_pid: int) -> int:
    """SIGKILL the next scheduler as soon as it says its pid, which is while it starts and rebuilds. Returns the pid."""
    header = server.header()
    deadline_s = time.monotonic() + 30
    while (pid := int(header["scheduler_pid"])) == old_pid:
        assert time.monotonic() < deadline_s, "no next scheduler"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


def unhealthy(server: Server) -> str | None:
    """What /health says, unless it is well."""
    status, answer = server.get("/health")
    return str(answer["reason"]) if status == 503 else None


def told(server: Server, pattern: str) -> list[str]:
    return [line for line in server.output if re.search(pattern, line)]


# -------------------------------------------------------------------------------------------------- killed from outside


@pytest.mark.parametrize("form", FORMS)
def test_killed_twice_within_a_second_and_in_the_middle_of_a_rebuild(form: str) -> None:
    """Within a second, if the machine lets us: in a step, while the next one starts, and then its successor."""
    with running(form, **STEP) as server:
        expected = undisturbed(server)
        server.wait_idle()
        with streaming(server) as clients:
            pid = server.scheduler().pid
            start_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            pid = kill_at_once(server, pid)
            gap_s = flows_again_s(server, time.monotonic())
            print(f"flows again {gap_s:.3f} s after the second kill, which came {time.monotonic() - start_s:.3f} s ago")
            last = int(server.header()["scheduler_pid"])
            os.kill(last, signal.SIGKILL)
            gap_s = flows_again_s(server, time.monotonic())
            print(f"flows again {gap_s:.3f} s after the third")
        assert clients.answers() == expected
        metrics = server.wait_idle()
        assert metrics["requests_completed"] == 2 * len(BODIES)
        assert metrics["requests_failed"] == 0
        assert not told(server, "runs alone"), "nobody is suspected"
        assert gap_s < 20


@pytest.mark.parametrize("form", FORMS)
def test_streams_flow_again_soon_after_one_kill(form: str) -> None:
    """Half a second is the claim, measured where nothing else runs; the bound here is for a machine that is busy."""
    with running(form, **STEP) as server, streaming(server):
        for _ in range(3):
            pid = server.scheduler().pid
            start_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            gap_s = flows_again_s(server, start_s)
            print(f"flows again after {gap_s:.3f} s")
            assert server.is_healthy()
            assert gap_s < 20


@pytest.mark.parametrize("form", FORMS)
def test_a_storm_of_deaths_is_told_and_weathered(form: str) -> None:
    with running(form, **STEP) as server:
        expected = undisturbed(server)
        server.wait_idle()
        stop = threading.Event()

        def storm() -> None:
            """Whatever scheduler there is, as soon as it is there."""
            pid = 0
            header = server.header()
            while not stop.is_set():
                if int(header["scheduler_pid"]) != pid:
                    pid = int(header["scheduler_pid"])
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                stop.wait(0.001)

        with streaming(server) as clients:
            killer = threading.Thread(target=storm)
            killer.start()
            try:
                problem = wait_until(lambda: unhealthy(server), "/health to tell of the storm", 60)
                assert "the scheduler is starting" in problem
                wait_until(lambda: len(told(server, r"the next starts in [12]\.\d s")) > 1, "ever slower restarts", 60)
            finally:
                stop.set()
                killer.join()
            wait_until(server.is_healthy, "recovery", 60)
        assert clients.answers() == expected
        metrics = server.wait_idle()
        assert metrics["requests_failed"] == 0


# --------------------------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "prompts",
    [[POISON_AT_ONCE], [POISON_LATER], [POISON_AT_ONCE, POISON_LATER]],
    ids=["at its first step", "in the middle of its stream", "two at once"],
)
def test_poison_ends_alone(form: str, prompts: list[int], hang: Path) -> None:
    with running(form, backend="deadly", **STEP) as server:
        expected = undisturbed(server)
        server.wait_idle()
        ends: dict[int, tuple[int, bytes]] = {}

        def ask(prompt: int) -> None:
            ends[prompt] = post(server, {"prompt_tokens": prompt, "max_new_tokens": 90, "seed": 5, "details": True})

        with streaming(server) as clients:
            threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: server.metrics()["running"] > 0, "the others, which should outlast it")
        assert clients.answers() == expected
        for prompt in prompts:
            status, answer = ends[prompt]
            lines = list(map(json.loads, answer.splitlines()))
            if prompt == POISON_AT_ONCE:
                assert status == 500
                assert lines[0]["error"]["type"] == "scheduler_killed"
            else:
                assert status == 200
                assert [line["token_index"] for line in lines] == list(range(POISON_TOKENS + 1))
                assert lines[-1]["error"]["type"] == "scheduler_killed"
        metrics = server.wait_idle()
        assert metrics["sequences_failed"] == metrics["requests_failed"] == len(prompts)
        wait_until(lambda: len(told(server, "a sequence ended with an error")) == len(prompts), "the log lines")
        if len(prompts) == 1:
            assert not told(server, r"the next starts in 0\.[3-9]"), "what it takes to find one is no storm"
        assert server.is_healthy()
        assert undisturbed(server) == expected


# ----------------------------------------------------------------------------------------------------------------- hung


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["stopped", "a backend that never returns", "stopped while it is idle"])
def test_one_that_hangs_is_told_and_replaced(form: str, how: str, hang: Path) -> None:
    options = {"backend": "deadly", "scheduler_timeout_s": 4, **STEP}
    with running(form, **options) as server:
        expected = undisturbed(server)
        server.wait_idle()
        old = server.scheduler()
        if how == "stopped while it is idle":
            old.suspend()
            assert_told_and_replaced(server, old)
            assert undisturbed(server) == expected
            return
        with streaming(server) as clients:
            if how == "stopped":
                old.suspend()
            else:
                hang.touch()
                wait_until(hang.with_name("hang.hangs").exists, "the call that never returns")
                hang.with_name("hang.hangs").unlink()
            assert_told_and_replaced(server, old)
        assert clients.answers() == expected
        metrics = server.wait_idle()
        assert metrics["requests_completed"] == 2 * len(BODIES)
        assert metrics["requests_failed"] == 0


def assert_told_and_replaced(server: Server, old: psutil.Process) -> None:
    """/health says 503 while it hangs; then it is dead and reaped before the next is there, and cannot come back."""
    start_s = time.monotonic()
    problem = wait_until(lambda: unhealthy(server), "503")
    print(f"/health says 503 after {time.monotonic() - start_s:.2f} s: {problem}")
    assert "the scheduler has made no progress for" in problem
    wait_until(lambda: server.header()["scheduler_pid"] != old.pid, "the next scheduler", 60)
    print(f"replaced after {time.monotonic() - start_s:.2f} s")
    assert not psutil.pid_exists(old.pid) or not old.is_running(), "reaped before the next one writes"
    with pytest.raises(psutil.NoSuchProcess):
        old.resume()
    wait_until(server.is_healthy, "health")
    wait_until(lambda: told(server, "it is killed"), "the log line")
    assert len(told(server, "it is killed")) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_supervisor_that_was_stopped_kills_nobody(form: str) -> None:
    """It has not seen a beat for longer than the time-out, but it was not there to see one."""
    with running(form, scheduler_timeout_s=2, **STEP) as server:
        (supervisor,) = server.processes("supervisor")
        pid = server.scheduler().pid
        with streaming(server) as clients:
            supervisor.suspend()
            beat_ns = int(server.header()["heartbeat_ns"])
            wait_until(lambda: server.header()["heartbeat_ns"] > beat_ns + 5 * 10**9, "five seconds of steps", 60)
            supervisor.resume()
        assert clients.answers()
        assert server.scheduler().pid == pid
        assert not told(server, "it is killed")


@pytest.mark.parametrize("form", FORMS)
def test_a_server_whose_scheduler_hangs_stops_in_time(form: str) -> None:
    with running(form, scheduler_timeout_s=0) as server:
        server.scheduler().suspend()
        start_s = time.monotonic()
        assert server.stop() == 0
        print(f"stopped after {time.monotonic() - start_s:.1f} s")
        server.assert_nothing_left()


# ------------------------------------------------------------------------------------------------- worker and scheduler


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
def test_worker_and_scheduler_die_in_the_same_second(form: str, order: str) -> None:
    body = {"prompt_tokens": 40, "max_new_tokens": 400, "details": True}
    with running(form, workers=2, **STEP) as server:
        bodies = [body | {"seed": k} for k in range(12)]
        expected = undisturbed(server, bodies)
        server.wait_idle()
        streams = [RawStream(server.port, body) for body in bodies]
        begun = [stream.read_chunk() for stream in streams]
        victim, _ = server.processes("web worker")
        kills: list[Callable[[], None]] = [victim.kill, server.scheduler().kill]
        for kill in kills if order == "worker first" else reversed(kills):
            kill()
        lost = 0
        for stream, first, whole in zip(streams, begun, expected, strict=True):
            try:
                rest = stream.read_all()
            except (AssertionError, OSError):
                lost += 1
            else:
                assert without_stats(first + rest) == whole
            finally:
                stream.close()
        metrics = server.wait_idle()
        assert metrics["requests_lost"] == lost
        assert metrics["requests_completed"] == 2 * len(bodies) - lost
        wait_until(lambda: len(server.processes("web worker")) == 2, "a new worker", 30)
        assert undisturbed(server, bodies) == expected


@pytest.mark.parametrize("form", FORMS)
def test_the_dead_workers_blocks_are_free_while_the_others_stream(form: str) -> None:
    """Within a second of the scheduler's return, where nothing else runs."""
    with running(form, workers=2, **STEP) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 40, "max_new_tokens": 8000}) for _ in range(12)]
        for stream in streams:
            stream.read_chunk()
        workers = {worker.pid: worker for worker in server.processes("web worker")}
        victim = next(iter(workers.values()))
        held = sum(served_by(stream, victim) for stream in streams)
        old = server.scheduler()
        victim.kill()
        old.kill()
        start_s = time.monotonic()
        wait_until(lambda: server.header()["scheduler_pid"] != old.pid, "the next scheduler")
        wait_until(lambda: gauge(server, "running") == len(streams) - held, "the dead one's sequences to be gone")
        print(f"free after {time.monotonic() - start_s:.3f} s")
        for stream in streams:
            stream.close()
        server.wait_idle()


def served_by(stream: RawStream, worker: psutil.Process) -> bool:
    """Whether the other end of the stream's connection is that worker's."""
    own = stream._socket.getsockname()
    return any(found.raddr == own for found in worker.net_connections("tcp"))


def gauge(server: Server, name: str) -> int:
    return server.metrics()[name]


# ------------------------------------------------------------------------------------------------------ whole instances


@pytest.mark.alone
@pytest.mark.parametrize("form", FORMS)
def test_the_next_start_after_the_main_process_was_killed(form: str) -> None:
    """SIGKILL of the supervisor, or of the arbiter, in mid-stream: nothing is left, and nothing is in the way."""
    with running(form, **STEP) as server:
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 5000})
        stream.read_chunk()
        server.remember_family()
        server.process.kill()
        server.process.wait(10)
        server.assert_nothing_left(5)
        stream.close()
    with running(form, addr=f"127.0.0.1:{server.port}") as following:
        assert post(following, {"prompt_tokens": 1, "max_new_tokens": 3})[0] == 200
        assert not told(following, "left behind"), "there was nothing to sweep"


@pytest.mark.alone
@pytest.mark.parametrize("form", FORMS)
def test_what_a_power_cut_leaves_is_swept_by_the_next_start_and_a_living_instances_is_not(form: str) -> None:
    """All processes at once, those included that would clean up."""
    with running("serve" if form == "gunicorn" else "gunicorn") as living:
        with running(form) as server:
            left = server.segment
            cut_power(server)
            assert left in segments(), "or there is nothing to sweep"
            with running(form) as following:
                assert left not in segments()
                wait_until(lambda: len(told(following, f"removed /dev/shm/{left}")) == 1, "the log line")
                assert following.segment in segments()
                assert post(following, {"prompt_tokens": 1, "max_new_tokens": 3})[0] == 200
        assert living.segment in segments()
        assert post(living, {"prompt_tokens": 1, "max_new_tokens": 3})[0] == 200


def cut_power(server: Server) -> None:
    """SIGKILL to all of an instance, none of which can do anything more before it: stopped first."""
    server.remember_family()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in server.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(10)
    wait_until(lambda: not [process for process in server.family if is_alive(process)], "the end of all")
