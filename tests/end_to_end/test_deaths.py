"""SIGKILL, to each process in turn. Whoever still has a socket gets every token, none twice."""

from __future__ import annotations

import contextlib
import threading

import psutil
import pytest

from tests.end_to_end.server import (
    FORMS,
    RawStream,
    Server,
    generate_all,
    plain_body,
    running,
    wait_until,
    without_stats,
)

pytestmark = pytest.mark.end_to_end

BODIES = [
    {"prompt_tokens": 20 + k, "max_new_tokens": 150 + k, "seed": k, "details": True, "priority": k % 3 - 1}
    for k in range(48)
]


def kill_scheduler_when(server: Server, tokens: int) -> None:
    """SIGKILL the scheduler once `tokens` more tokens are generated than now."""
    old = server.scheduler()
    before = server.scheduler_tokens()
    wait_until(lambda: server.scheduler_tokens() >= before + tokens, "the moment to kill")
    old.kill()
    wait_until(lambda: server.processes("scheduler") and server.scheduler().pid != old.pid, "the next scheduler")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",  # each step slow enough that three deaths fall into the streams, however busy the machine
    [
        {"mock_token_latency_us": 12_000},
        {"mock_token_latency_us": 2_000, "total_kv_blocks": 64, "mock_kv": True},  # recomputed contexts are read back
    ],
    ids=["roomy", "preempting"],
)
def test_streams_survive_the_schedulers_death_byte_for_byte(form: str, options: dict[str, int]) -> None:
    with running(form, **options) as server:
        undisturbed = generate_all(server.port, BODIES)
        server.wait_idle()
        results: list[list[bytes]] = []
        clients = threading.Thread(target=lambda: results.append(generate_all(server.port, BODIES)))
        clients.start()
        for _ in range(3):
            kill_scheduler_when(server, 500)
        clients.join()
        (disturbed,) = results
        assert list(map(without_stats, disturbed)) == list(map(without_stats, undisturbed))
        metrics = server.wait_idle()
        assert metrics["scheduler_starts"] >= 4
        assert metrics["requests_completed"] == 2 * len(BODIES)
        assert metrics["requests_failed"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_worker_takes_only_its_own_streams(form: str) -> None:
    with running(form, workers=2, mock_token_latency_us=10_000) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 300}) for _ in range(12)]
        for stream in streams:
            stream.read_chunk()
        victim, _ = server.processes("web worker")
        victim.kill()
        outcomes = [outcome(stream) for stream in streams]
        lost = outcomes.count("cut")
        assert outcomes.count("whole") + lost == len(streams)
        wait_until(lambda: len(server.processes("web worker")) == 2, "a new worker", 30)
        wait_until(server.is_healthy, "health")
        metrics = server.wait_idle()
        assert metrics["sequences_aborted"] == metrics["requests_lost"] == lost
        ends = ("completed", "cancelled", "failed", "rejected", "unavailable", "lost")
        assert metrics["requests_received"] == sum(metrics[f"requests_{end}"] for end in ends)
        assert metrics["requests_completed"] == len(streams) - lost


def outcome(stream: RawStream) -> str:
    """`whole` when the stream ends as it should, `cut` when its connection does."""
    try:
        rest = stream.read_all()
    except (AssertionError, OSError):
        return "cut"
    finally:
        stream.close()
    return "whole" if rest.endswith(b'{"token_index":299,"done":true}\n') else "wrong"


def test_workers_that_found_no_lane_make_room_for_others() -> None:
    """Killed again and again while a long step keeps the scheduler from reaping their lanes."""
    with running("serve", workers=2, mock_token_latency_us=6_000_000) as server:
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 2})
        wait_until(lambda: server.metrics()["running"] or server.header()["in_device_call"], "a long step")
        for _ in range(4):
            pids = {worker.pid for worker in server.processes("web worker")}
            for worker in server.processes("web worker"):
                worker.kill()
            wait_until(
                lambda pids=pids: (
                    "no lane is free" in "".join(server.output)
                    or len({worker.pid for worker in server.processes("web worker")} - pids) == 2
                ),
                "new workers",
                30,
            )
        stream.close()
        wait_until(lambda: "no lane is free" in "".join(server.output), "a worker without a lane")

        def serves() -> bool:
            return len(server.processes("web worker")) == 2 and all(server.is_healthy() for _ in range(6))

        wait_until(serves, "workers with lanes", 40)


def has_client(worker: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_ESTABLISHED for connection in worker.net_connections("tcp"))


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_that_cannot_be_started_is_tried_again_and_costs_no_stream(form: str) -> None:
    """The arbiter has no descriptor left when a worker dies: no reason to end the one that lives."""
    with running(form, workers=2, mock_token_latency_us=5_000) as server:
        streams: list[RawStream] = []
        victim, living = server.processes("web worker")
        while not (has_client(victim) and has_client(living)) or len(streams) < 12:  # the kernel deals them out
            streams.append(RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 400}))
            assert len(streams) < 200
        begun = [stream.read_chunk() for stream in streams]
        arbiter = psutil.Process(victim.ppid())
        limits = arbiter.rlimit(psutil.RLIMIT_NOFILE)
        arbiter.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        victim.kill()
        wait_until(lambda: "".join(server.output).count("cannot start a web worker") > 1, "two attempts")
        assert living.is_running()
        arbiter.rlimit(psutil.RLIMIT_NOFILE, limits)
        whole = 0
        for stream, first in zip(streams, begun, strict=True):
            with contextlib.suppress(AssertionError, OSError):  # those of the one that was killed
                whole += first + stream.read_all() == plain_body(400)
            stream.close()
        assert whole == server.wait_idle()["requests_completed"] > 0
        wait_until(lambda: len(server.processes("web worker")) == 2, "the successor")
        assert server.is_healthy()
        assert "Traceback" not in "".join(server.output)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_outlives_the_main_process(form: str) -> None:
    with running(form) as server:
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 5000})
        stream.read_chunk()
        server.remember_family()
        server.process.kill()
        server.process.wait(10)
        server.assert_nothing_left()
        stream.close()


def test_gunicorns_end_ends_serve() -> None:
    with running("serve") as server:
        server.remember_family()
        arbiter = next(p for p in server.family if "gunicorn" in " ".join(p.cmdline()))
        arbiter.kill()
        assert server.process.wait(20) == 1
        server.assert_nothing_left()


def test_the_engines_supervisor_is_missed_by_gunicorn() -> None:
    """The gunicorn form: when the process that keeps the scheduler dies, the system must not answer 200 for ever."""
    with running("gunicorn") as server:
        (supervisor,) = server.processes("supervisor")
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 8000})
        stream.read_chunk()
        server.remember_family()
        supervisor.kill()
        assert server.process.wait(10) != 0  # not the 30 s that a stream would get which can go on
        stream.close()
        server.assert_nothing_left()
