"""Clients that go: queued, prefilling, decoding or blocked in a write, by three ways to hang up, alone and by hundreds.

Their blocks are free within 100 ms and one step. The figures are printed; what a test insists on is LIMIT_S, which a
loaded machine keeps too, and which is well below the 3 s that gunicorn by itself would let a stream go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gunicorn.asgi.protocol import HIGH_WATER_LIMIT

from ironbatch import layout
from tests.end_to_end.observer import Observer, observed, seconds_until
from tests.end_to_end.server import FORMS, RawStream, Server, running, wait_until
from tests.mock_answers import Mock, judge

pytestmark = pytest.mark.end_to_end

LIMIT_S = 2.0

OPTIONS = {
    "max_running_seqs": 32,
    "max_queued_requests": 64,
    "max_batch_tokens": 64,
    "max_model_len": 32_768,
    "total_kv_blocks": 16_384,
    "mock_token_latency_us": 1_000,
    "mock_prefill_token_latency_ns": 200_000,  # a chunk takes 14 ms, 8,000 tokens take 1.7 s
    "audit_every": 64,
}
MOCKS = {"serve": Mock(keeps_kv=True), "gunicorn": Mock(keeps_kv=False)}

VICTIM = 28_000  # tokens asked for: more than can be generated while a test lasts
OCCUPANT = 29_000
DETAILED_LINE_BYTES = 44  # at least
SMALL_BUFFERS = {"receive_buffer_bytes": 4096, "segment_bytes": 536}


def close_after_half(stream: RawStream) -> None:
    stream.half_close()
    stream.close()


WAYS: dict[str, Callable[[RawStream], None]] = {
    "close": RawStream.close,
    "reset": RawStream.reset,
    "half-close": close_after_half,
}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(form: str) -> Iterator[Server]:
    with running(form, workers=2, mock_kv=MOCKS[form].keeps_kv, **OPTIONS) as server:
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
        assert "Traceback" not in "".join(server.output)


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[Observer]:
    with observed(server) as engine:
        yield engine


class Bystander(threading.Thread):
    """Asks for one short answer after the other, each of which must be whole and the right one."""

    def __init__(self, server: Server, mock: Mock, seed: int) -> None:
        super().__init__(daemon=True)
        self._port, self._mock = server.port, mock
        self._body = {"prompt_token_ids": [seed, 2, 3], "max_new_tokens": 150, "details": True, "priority": -1}
        self._is_over = threading.Event()
        self.answers = 0
        self.problem: object = None

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                body = self._body | {"seed": self.answers}
                stream = RawStream(self._port, body)
                verdict = judge(body, stream.read_all(), self._mock)
                stream.close()
                assert verdict.is_whole, verdict
                assert not verdict.errors, verdict
                assert verdict.problem is None, verdict
                self.answers += 1
        except Exception as problem:  # reported by the test, not by the thread
            self.problem = problem

    def finish(self) -> None:
        self._is_over.set()
        self.join()
        assert self.problem is None, self.problem
        assert self.answers > 0


@pytest.fixture
def bystanders(server: Server, form: str) -> Iterator[list[Bystander]]:
    """Two whose answers must not change whatever the others do. Their answers have begun."""
    found = [Bystander(server, MOCKS[form], seed) for seed in (1, 2)]
    for bystander in found:
        bystander.start()
    wait_until(lambda: server.metrics()["tokens_generated"] > 10, "the bystanders' tokens")
    yield found
    for bystander in found:
        bystander.finish()


def body_of(n: int, prompt_tokens: int, mark: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt_tokens, "max_new_tokens": mark, "n": n, "seed": mark, "details": True}


def all_are(engine: Observer, state: Callable[[Any], Any], count: int, *marks: int) -> bool:
    slots = engine.of(*marks)
    return len(slots) == count and bool(np.all(state(slots)))


def measure(engine: Observer, mark: int, leave: Callable[[], object], what: str) -> None:
    """The clients of all requests with this mark go; their blocks and their slots come back in time."""
    slots = engine.of(mark)
    generations = engine.slots["generation"][slots]
    assert not engine.reasons(slots).any(), "one has ended before its client goes"
    start_s = time.perf_counter()
    leave()
    left_s = time.perf_counter() - start_s
    # The end is published once the blocks are free; the slot is given back when its worker has seen that.
    blocks_s = seconds_until(lambda: np.all(engine.reasons(slots) == layout.FINISH_CANCELLED), f"{what}: ends", LIMIT_S)
    slots_s = seconds_until(lambda: not len(engine.of(mark)), f"{what}: slots", LIMIT_S)
    assert np.array_equal(engine.slots["generation"][slots], generations), "a slot was given away meanwhile"
    print(f"{what}: blocks after {(left_s + blocks_s) * 1e3:.1f} ms, slots {slots_s * 1e3:.1f} ms later")


def assert_accounted(server: Server, engine: Observer, before: dict[str, int], cancelled: int) -> None:
    """Each of those who went counts as cancelled, once, and as nothing else."""
    wait_until(engine.is_idle, "an idle engine")
    wait_until(lambda: engine.unaccounted() == 0, "the last counters")
    now = server.metrics()
    gained = {end: now[f"requests_{end}"] - before[f"requests_{end}"] for end in ("cancelled", "failed", "lost")}
    assert gained == {"cancelled": cancelled, "failed": 0, "lost": 0}
    assert now["audit_failures"] == now["sequences_failed"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_queued(server: Server, engine: Observer, form: str, n: int, bystanders: list[Bystander]) -> None:
    before = server.metrics()
    occupants = [RawStream(server.port, {"prompt_tokens": 3_000, "max_new_tokens": OCCUPANT}) for _ in range(8)]
    wait_until(lambda: len(engine.of(OCCUPANT)) == len(occupants), "prefills ahead of the queue")
    for way, leave in WAYS.items():
        victims = [RawStream(server.port, body_of(n, 50, VICTIM)) for _ in range(3)]
        wait_until(lambda: all_are(engine, engine.are_queued, 3 * n, VICTIM), "a queue")
        go = partial(leave_all, victims, leave)
        measure(engine, VICTIM, go, f"{form}, queued, n {n}, {way}")
    leave_all(occupants, RawStream.close)
    for bystander in bystanders:
        bystander.finish()
    assert_accounted(server, engine, before, len(WAYS) * 3 + len(occupants))


@pytest.mark.parametrize("n", [1, 3])
def test_prefilling(server: Server, engine: Observer, form: str, n: int, bystanders: list[Bystander]) -> None:
    before = server.metrics()
    for way, leave in WAYS.items():
        computed = int(engine.gauges["prefill_tokens"])
        victim = RawStream(server.port, body_of(n, 4_000, VICTIM))
        wait_until(lambda: all_are(engine, engine.are_prefilling, n, VICTIM), "its prefill")
        wait_until(lambda computed=computed: engine.gauges["prefill_tokens"] > computed + 300, "some chunks of it")
        assert all_are(engine, engine.are_prefilling, n, VICTIM), "the whole prompt is computed already"
        measure(engine, VICTIM, partial(leave, victim), f"{form}, prefilling, n {n}, {way}")
    for bystander in bystanders:
        bystander.finish()
    assert_accounted(server, engine, before, len(WAYS))


@pytest.mark.parametrize("n", [1, 3])
def test_decoding(server: Server, engine: Observer, form: str, n: int, bystanders: list[Bystander]) -> None:
    before = server.metrics()
    for way, leave in WAYS.items():
        victims = [RawStream(server.port, body_of(n, 20, VICTIM)) for _ in range(3)]
        wait_until(lambda: all_are(engine, engine.are_decoding, 3 * n, VICTIM), "their tokens")
        go = partial(leave_all, victims, leave)
        measure(engine, VICTIM, go, f"{form}, decoding, n {n}, {way}")
    for bystander in bystanders:
        bystander.finish()
    assert_accounted(server, engine, before, len(WAYS) * 3)


@pytest.mark.parametrize("n", [1, 3])
def test_blocked_in_a_write(server: Server, engine: Observer, form: str, n: int, bystanders: list[Bystander]) -> None:
    """All buffers on the way to the client are full, and its sequence goes on."""
    before = server.metrics()
    marks = {way: VICTIM + index for index, way in enumerate(WAYS)}
    victims = {way: RawStream(server.port, body_of(n, 20, mark), **SMALL_BUFFERS) for way, mark in marks.items()}
    wait_until(lambda: all_are(engine, engine.are_decoding, n * len(victims), *marks.values()), "their tokens")
    for way, victim in victims.items():
        wait_until(partial(is_blocked, engine, server, victim, marks[way]), "a write that waits", 60)
        assert all_are(engine, engine.are_decoding, n, marks[way])
        measure(engine, marks[way], partial(WAYS[way], victim), f"{form}, blocked, n {n}, {way}")
    for bystander in bystanders:
        bystander.finish()
    assert_accounted(server, engine, before, len(victims))


def leave_all(streams: list[RawStream], leave: Callable[[RawStream], None]) -> None:
    for stream in streams:
        leave(stream)


def is_blocked(engine: Observer, server: Server, stream: RawStream, mark: int) -> bool:
    """Whether more was generated for the client than the kernel holds for it, the worker's own buffer included."""
    in_kernel = sum(queued_bytes(server.port, stream.local_port))
    written = int(engine.produced(engine.of(mark)).sum()) * DETAILED_LINE_BYTES
    return in_kernel > 0 and written > in_kernel + 2 * HIGH_WATER_LIMIT


def queued_bytes(port: int, client_port: int) -> tuple[int, int]:
    """What of a local connection is unsent at the server, and unread at the client; see proc(5), /proc/net/tcp."""
    at_server = at_client = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        ports = int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)
        if ports == (port, client_port):
            at_server = int(queues.partition(":")[0], 16)
        elif ports == (client_port, port):
            at_client = int(queues.partition(":")[2], 16)
    return at_server, at_client


@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_at_once(form: str) -> None:
    """In all states but blocked, of all ways, some of them groups."""
    mock = MOCKS[form]
    options = OPTIONS | {"max_running_seqs": 128, "max_queued_requests": 300, "max_model_len": 8_192}
    with running(form, mock_kv=mock.keeps_kv, **options) as server, observed(server) as engine:
        bystander = Bystander(server, mock, 5)
        bystander.start()
        victims = []
        for index in range(200):
            body = {"prompt_tokens": 1 + 7 * (index % 20), "max_new_tokens": 8_000, "n": 1 + (index % 8 == 0)}
            victims.append(RawStream(server.port, body | {"seed": index}))
        wait_until(lambda: len(engine.of(8_000)) == 225, "all of them")
        wait_until(lambda: engine.are_decoding(engine.of(8_000)).sum() > 40, "tokens of many", 60)
        slots = engine.of(8_000)
        states = {
            "queued": int(engine.are_queued(slots).sum()),
            "prefilling": int(engine.are_prefilling(slots).sum()),
            "decoding": int(engine.are_decoding(slots).sum()),
        }
        ways = list(WAYS.values())

        def leave() -> None:
            for index, victim in enumerate(victims):
                ways[index % len(ways)](victim)

        measure(engine, 8_000, leave, f"{form}, 200 at once, {states}")
        bystander.finish()
        wait_until(engine.is_idle, "an idle engine")
        wait_until(lambda: engine.unaccounted() == 0, "the last counters")
        now = server.metrics()
        assert now["requests_cancelled"] == 200
        assert now["requests_failed"] == now["requests_lost"] == now["audit_failures"] == 0
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.output)
