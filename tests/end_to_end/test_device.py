"""Whole servers on the device backend: on a software device, and on a real node that dies, hangs and comes back.

Whoever has a socket gets every token that its request gives, none twice, whatever becomes of the device.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.driver.node_process import NodeProcess, end_node, needs_node, running_node, start_node
from tests.end_to_end.server import FORMS, Server, generate_all, run_to_end, running, wait_until
from tests.mock_answers import Mock, judge

pytestmark = pytest.mark.end_to_end

STEP_US = 10_000  # so that all of a test falls into the streams, however busy the machine
BODIES: list[dict[str, Any]] = [
    {"prompt_token_ids": list(range(5, 20 + k)), "max_new_tokens": 100 + k, "seed": k, "details": True}
    for k in range(46)
] + [
    {"prompt_tokens": 30, "max_new_tokens": 60, "seed": 46, "n": 3, "details": True},
    {"prompt_token_ids": list(range(5, 60)), "max_new_tokens": 90, "seed": 47, "details": True},
]
RECOVERY_S = 20.0
"""A bound for a busy machine; what it takes is printed."""


class Clients:
    """All bodies at once, on threads."""

    def __init__(self, server: Server) -> None:
        self._answers: list[bytes] = []
        self._thread = threading.Thread(target=lambda: self._answers.extend(generate_all(server.port, BODIES)))
        self._thread.start()

    def assert_all_served(self) -> None:
        """Each stream is what its request alone gives, up to its end."""
        self._thread.join()
        assert len(self._answers) == len(BODIES)
        for body, received in zip(BODIES, self._answers, strict=True):
            verdict = judge(body, received, Mock(keeps_kv=True))
            assert verdict.problem is None
            assert verdict.errors == []
            assert verdict.is_whole


@contextmanager
def streaming(server: Server) -> Iterator[Clients]:
    """All bodies, whose streams have begun; joined at the end."""
    before = server.scheduler_tokens()
    clients = Clients(server)
    try:
        wait_until(lambda: server.scheduler_tokens() > before + 5 * len(BODIES), "the first tokens", 60)
        yield clients
    finally:
        clients._thread.join()


def flows_again_s(server: Server, since_s: float) -> float:
    """Seconds from then until there are more tokens than now."""
    tokens = server.scheduler_tokens()
    wait_until(lambda: server.scheduler_tokens() > tokens, "streams that flow again", 60)
    return time.monotonic() - since_s


def assert_all_free(server: Server) -> None:
    metrics = server.wait_idle()
    assert metrics["requests_completed"] == len(BODIES)
    assert metrics["requests_failed"] == 0
    assert server.is_healthy()


def unhealthy(server: Server) -> str | None:
    """What /health says, unless it is well."""
    status, answer = server.get("/health")
    return str(answer["reason"]) if status == 503 else None


@contextmanager
def serving_on_a_node(folder: Path, form: str = "serve", **options: Any) -> Iterator[tuple[Server, NodeProcess]]:
    """A server, and the node that it runs on."""
    with (
        running_node(folder, "--step-latency-us", str(STEP_US)) as node,
        running(form, backend="device", device=node.path, **options) as server,
    ):
        yield server, node


@contextmanager
def another_node(path: str) -> Iterator[NodeProcess]:
    """At the place of one that has died."""
    node = start_node(path, "--step-latency-us", str(STEP_US))
    try:
        yield node
    finally:
        end_node(node)


# ------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("form", FORMS)
def test_a_software_device_serves_every_stream(form: str) -> None:
    with running(form, backend="device", device="software", total_kv_blocks=96, audit_every=16) as server:
        Clients(server).assert_all_served()
        assert_all_free(server)
        assert server.metrics()["preemptions"] > 0
        assert server.metrics()["audit_failures"] == 0


@needs_node
def test_a_node_serves_every_stream(tmp_path: Path) -> None:
    with serving_on_a_node(tmp_path, "gunicorn", max_batch_tokens=64, audit_every=16) as (server, _):
        Clients(server).assert_all_served()
        assert_all_free(server)
        assert server.metrics()["audit_failures"] == 0


# ------------------------------------------------------------------------------------------------------------- failures


@needs_node
@pytest.mark.parametrize("form", FORMS)
def test_streams_go_on_once_a_killed_node_is_back(form: str, tmp_path: Path) -> None:
    with serving_on_a_node(tmp_path, form) as (server, node), streaming(server) as clients:
        scheduler = server.scheduler().pid
        node.kill()
        problem = wait_until(lambda: unhealthy(server), "/health to tell of it", 60)
        assert "opens its backend" in problem
        wait_until(lambda: "cannot be reopened" in "".join(server.output), "the reason in the log", 60)
        start_s = time.monotonic()
        with another_node(node.path):
            serves_s = time.monotonic()
            gap_s = flows_again_s(server, serves_s)
            print(f"flows again {gap_s:.3f} s after the new node serves, {serves_s - start_s:.3f} s after its start")
            clients.assert_all_served()
            assert server.scheduler().pid == scheduler, "it lives on"
            assert gap_s < RECOVERY_S
            assert_all_free(server)


@needs_node
def test_a_node_that_hangs_is_told_and_given_up(tmp_path: Path) -> None:
    """Mostly its scheduler can't be killed before the connection is aborted; if it can, the next one is stuck."""
    with serving_on_a_node(tmp_path, scheduler_timeout_s=3) as (server, node), streaming(server) as clients:
        old = server.scheduler()
        start_s = time.monotonic()
        node.freeze()
        problem = wait_until(lambda: unhealthy(server), "/health to tell of it", 60)
        print(f"/health says 503 after {time.monotonic() - start_s:.2f} s: {problem}")
        assert problem.startswith("device hung: the scheduler has made no progress for ")
        wait_until(lambda: server.header()["scheduler_pid"] != old.pid, "the next scheduler", 60)
        print(f"replaced after {time.monotonic() - start_s:.2f} s")
        assert not old.is_running()
        assert "it is killed" in "".join(server.output)
        for told in (r"connection (of the device \S+ )?was aborted", "its server has died; start it again"):
            wait_until(lambda text=told: re.search(text, "".join(server.output)), "what the log tells", 60)
        starts = "the scheduler is starting, or opens its backend"
        wait_until(lambda: starts in (unhealthy(server) or ""), "/health to tell of the start that fails", 60)
        node.kill()
        with another_node(node.path):
            gap_s = flows_again_s(server, time.monotonic())
            print(f"flows again {gap_s:.3f} s after a new node serves")
            clients.assert_all_served()
            assert gap_s < RECOVERY_S
            wait_until(server.is_healthy, "health")
            assert_all_free(server)


@needs_node
def test_a_node_that_hangs_before_it_is_asked_is_given_up_too(tmp_path: Path) -> None:
    """Its scheduler can be killed, but the next one would be stuck in open(2), where no one looks for progress."""
    with serving_on_a_node(tmp_path, scheduler_timeout_s=1) as (server, node):
        node.freeze()
        clients = Clients(server)
        told = f"{node.path} has not answered for 1 s: its connection was aborted; start it again"
        wait_until(lambda: told in "".join(server.output), "the abort", 60)
        with another_node(node.path):
            os.kill(node.process.pid, signal.SIGCONT)  # the old one ends, and leaves the new one's mount alone
            node.process.wait(20)
            clients.assert_all_served()
            assert_all_free(server)


@needs_node
def test_streams_survive_the_schedulers_death_on_a_node(tmp_path: Path) -> None:
    """The node has given back what the dead one held before the next one asks for it."""
    blocks = 4096  # all of the node's
    with serving_on_a_node(tmp_path, total_kv_blocks=blocks) as (server, _):
        with streaming(server) as clients:
            for _ in range(2):
                start_s = time.monotonic()
                os.kill(server.scheduler().pid, signal.SIGKILL)
                gap_s = flows_again_s(server, start_s)
                print(f"flows again after {gap_s:.3f} s")
                assert gap_s < RECOVERY_S
            clients.assert_all_served()
        assert_all_free(server)


# ------------------------------------------------------------------------------------------------------ a clear refusal


@pytest.mark.parametrize("form", FORMS)
def test_without_its_node_a_server_does_not_start(form: str, tmp_path: Path) -> None:
    path = tmp_path / "device0"
    code, output = run_to_end(form, backend="device", device=path)
    assert code == 1
    lines = [line for line in output.splitlines() if str(path) in line and "can't be opened" in line]
    assert len(lines) == 1, output
    assert "there is no such node" in lines[0]
    assert "Traceback" not in output


@needs_node
def test_a_node_of_another_block_size_is_one_clear_line(tmp_path: Path) -> None:
    with running_node(tmp_path, "--block-bytes", "128") as node:
        code, output = run_to_end("serve", backend="device", device=node.path)
    assert code == 1
    assert re.search(r"--kv-block-size is 16, and a block of \S+ holds 32 tokens; use --kv-block-size 32", output)
    assert "Traceback" not in output
