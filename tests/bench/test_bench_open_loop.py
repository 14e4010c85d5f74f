"""The open loop and the window: arrivals wait for nobody, and latencies count from the intended time."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.load import Unreachable
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.open_loop import OVER_CAP, open_loop, sleep_until
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Arrival, Shape
from ironbatch.clock import FakeClock, MonotonicClock
from tests.bench.server import Exchange, good, make_client, serving, until

SHAPE = Shape(8, 4)
S = 1_000_000_000


def every_ns(gap_ns: int) -> Iterator[Arrival]:
    """Arrivals at 0, gap, 2 gap, ..."""
    return (Arrival(index * gap_ns, SHAPE) for index in itertools.count())


class FakeServer:
    """Stands for the client and its server: answers at once, or only when it is told to."""

    url = "http://fake"

    def __init__(self, clock: FakeClock, *, answers: bool = True) -> None:
        self.sent: list[tuple[int, int | None]] = []
        self.clock = clock
        self.release = asyncio.Event()
        if answers:
            self.release.set()

    async def generate(self, _: Shape, measurements: Measurements, *, intended_ns: int | None = None) -> Failure | None:
        self.sent.append((self.clock.now_ns(), intended_ns))
        await self.release.wait()
        measurements.succeeded += 1
        return None


async def jump(clock: FakeClock, due_ns: int) -> None:
    """Everybody gets a turn; then time passes at once."""
    for _ in range(3):
        await asyncio.sleep(0)
    clock.set_ns(max(due_ns, clock.now_ns()))


def run_fake(window: Window, arrivals: Iterator[Arrival], most_in_flight: int = 100) -> list[tuple[int, int | None]]:
    async def scenario() -> list[tuple[int, int | None]]:
        clock = FakeClock(7 * S)
        server = FakeServer(clock)
        await open_loop(server, arrivals, window, clock, most_in_flight=most_in_flight, sleep=jump)
        return server.sent

    return asyncio.run(scenario())


@given(
    gap_ns=st.integers(1, S), warm_up_ms=st.integers(0, 2000), duration_ms=st.integers(100, 2000) | st.none(),
    total=st.integers(1, 50) | st.none(),
)  # fmt: skip
def test_who_is_sent_and_who_is_measured(
    gap_ns: int, warm_up_ms: int, duration_ms: int | None, total: int | None
) -> None:
    gap_ns += 50_000_000
    if duration_ms is None and total is None:
        total = 10
    measured = Measurements()
    duration_s = None if duration_ms is None else duration_ms / 1e3
    window = Window(measured, warm_up_s=warm_up_ms / 1e3, duration_s=duration_s, total_requests=total)
    sent = run_fake(window, every_ns(gap_ns))
    warm_up = [index for index in range(200) if index * gap_ns < warm_up_ms * 1_000_000]
    after = list(range(len(warm_up), 200))
    if duration_ms is not None:
        after = [index for index in after if index * gap_ns < (warm_up_ms + duration_ms) * 1_000_000]
    after = after[:total]
    assert sent == [(7 * S + index * gap_ns, 7 * S + index * gap_ns) for index in (*warm_up, *after)]
    assert (measured.succeeded, window.warm_up.succeeded) == (len(after), len(warm_up))
    assert window.closed_ns is not None
    ended_by_time = duration_ms is not None and (total is None or len(after) < total)
    if ended_by_time:
        assert window.closed_ns == window.end_ns


def test_a_trace_that_ends_ends_the_run() -> None:
    window = Window(Measurements(), duration_s=100.0)
    assert len(run_fake(window, iter(list(itertools.islice(every_ns(S), 3))))) == 3
    assert window.closed_ns == 9 * S


def test_a_server_that_never_answers_slows_no_arrival() -> None:
    async def scenario() -> None:
        clock, window = FakeClock(), Window(Measurements(), total_requests=50)
        server = FakeServer(clock, answers=False)
        loop = asyncio.ensure_future(open_loop(server, every_ns(S), window, clock, most_in_flight=100, sleep=jump))
        await until(lambda: len(server.sent) == 50)
        assert window.measured.requests == 0
        assert [at_ns for at_ns, _ in server.sent] == [index * S for index in range(50)]
        server.release.set()
        await loop
        assert window.measured.succeeded == 50

    asyncio.run(scenario())


def test_an_arrival_over_the_cap_fails_and_is_not_sent_later() -> None:
    async def scenario() -> None:
        clock, window = FakeClock(), Window(Measurements(), total_requests=10)
        server = FakeServer(clock, answers=False)
        loop = asyncio.ensure_future(open_loop(server, every_ns(S), window, clock, most_in_flight=4, sleep=jump))
        await until(lambda: window.measured.failed == 6)
        server.release.set()
        await loop
        assert (len(server.sent), window.measured.succeeded) == (4, 4)
        failures = window.measured.failures[OVER_CAP]
        assert (failures.count, failures.example) == (
            6, "4 requests were waiting for their answers; raise --concurrency",
        )  # fmt: skip

    asyncio.run(scenario())


def test_a_place_under_the_cap_is_free_again_after_its_answer() -> None:
    window = Window(Measurements(), total_requests=10)
    assert len(run_fake(window, every_ns(S), most_in_flight=1)) == 10
    assert window.measured.failed == 0


def test_a_late_client_hides_nothing() -> None:
    """The clock has passed many arrivals: all are sent at once, and measured from the time they were meant for."""

    async def scenario() -> None:
        clock, window = FakeClock(), Window(Measurements(), total_requests=10)
        server = FakeServer(clock)

        async def stall(clock: FakeClock, _: int) -> None:
            await jump(clock, 20 * S)

        await open_loop(server, every_ns(S), window, clock, most_in_flight=100, sleep=stall)
        assert server.sent == [(20 * S, index * S) for index in range(10)]

    asyncio.run(scenario())


def test_latencies_count_from_the_intended_time() -> None:
    clock = FakeClock(500)

    async def timed(exchange: Exchange) -> None:
        clock.set_ns(1200)
        await good(exchange)

    async def scenario() -> None:
        async with serving(timed) as (url, _), make_client(url, clock=clock) as client:
            measured = client.measurements
            assert await client.generate(SHAPE, measured, intended_ns=100) is None
        assert (measured.lag.max_ns, measured.ttft.max_ns, measured.end_to_end.max_ns) == (400, 1100, 1100)

    asyncio.run(scenario())


def test_open_loop_over_http_needs_no_answer_to_go_on() -> None:
    """The server answers nobody before all have come: a closed loop of less than 40 would wait for ever."""

    async def scenario() -> None:
        all_here = asyncio.Event()

        async def patient(exchange: Exchange) -> None:
            if server.requests == 40:
                all_here.set()
            await all_here.wait()
            await good(exchange)

        async with serving(patient) as (url, server), make_client(url) as client:
            window = Window(client.measurements, total_requests=40)
            await open_loop(client, every_ns(S // 500), window, MonotonicClock(), most_in_flight=100)
        assert (client.measurements.succeeded, client.measurements.lag.count) == (40, 40)

    asyncio.run(scenario())


def test_unreachable_server_ends_it() -> None:
    async def scenario() -> None:
        async with make_client("http://a..b") as client:
            window = Window(client.measurements)
            with pytest.raises(Unreachable, match="can't reach"):
                await open_loop(client, every_ns(S // 100), window, MonotonicClock(), most_in_flight=100)

    asyncio.run(scenario())


def test_sleep_is_never_short_and_lets_others_run() -> None:
    async def scenario() -> None:
        clock = MonotonicClock()
        for wait_ns in (-S, 0, 1, 300_000, 1_600_000):
            others = []
            asyncio.get_running_loop().call_soon(others.append, "ran")
            due_ns = clock.now_ns() + wait_ns
            await sleep_until(clock, due_ns)
            assert clock.now_ns() >= due_ns
            assert others == ["ran"]

    asyncio.run(scenario())


def test_closed_loop_ends_with_the_time_and_does_not_measure_the_warm_up() -> None:
    clock = FakeClock()

    async def a_second_later(exchange: Exchange) -> None:
        clock.advance_ns(S)
        await good(exchange)

    async def scenario() -> None:
        async with serving(a_second_later) as (url, _), make_client(url, clock=clock) as client:
            window = Window(client.measurements, warm_up_s=3.0, duration_s=5.0)
            await client.closed_loop_in(window, concurrency=1)
        assert (window.warm_up.succeeded, client.measurements.succeeded) == (3, 5)
        assert (window.closed_ns, window.measured_from_ns) == (8 * S, 3 * S)

    asyncio.run(scenario())


def test_late_client_says_how_long_it_has_been_sending() -> None:
    async def scenario() -> None:
        clock, window = FakeClock(), Window(Measurements(), duration_s=3.0)
        server = FakeServer(clock)

        async def slow(clock: FakeClock, _: int) -> None:
            await jump(clock, clock.now_ns() + 2 * S)

        await open_loop(server, every_ns(S), window, clock, most_in_flight=100, sleep=slow)
        assert len(server.sent) == 3
        assert window.end_ns == 3 * S
        assert window.closed_ns == 8 * S

    asyncio.run(scenario())


def test_worker_that_is_busy_at_the_end_has_sent_nothing_after_it() -> None:
    clock = FakeClock()

    async def seven_seconds_later(exchange: Exchange) -> None:
        clock.advance_ns(7 * S)
        await good(exchange)

    async def scenario() -> None:
        async with serving(seven_seconds_later) as (url, _), make_client(url, clock=clock) as client:
            window = Window(client.measurements, duration_s=3.0)
            await client.closed_loop_in(window, concurrency=1)
        assert (client.measurements.succeeded, window.closed_ns) == (1, 3 * S)

    asyncio.run(scenario())
