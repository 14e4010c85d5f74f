"""The open loop: requests are sent when they arrive, however long those before them take.

Real callers do not wait for each other. A closed loop does, so a slow server is asked less, and the time that its
callers would have waited is in no figure (coordinated omission). Here arrivals are laid down before the run; a request
is measured from the time it was meant to be sent, also when this client is late; and one that would be over the
cap fails at once instead of waiting unseen.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.load import send
from ironbatch.bench.measure import Failure
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Arrival
from ironbatch.clock import Clock
from ironbatch.errors import IronbatchError

OVER_CAP: Final = "over the cap of requests in flight"

SleepUntil = Callable[[Clock, int], Awaitable[None]]


async def sleep_until(clock: Clock, due_ns: int) -> None:
    """Return at `due_ns` or as soon after it as the event loop can; lets others run in any case."""
    await asyncio.sleep(max(due_ns - clock.now_ns(), 0) / 1e9)
    while (left_ns := due_ns - clock.now_ns()) > 0:  # noqa: ASYNC110 - a timer may be early by its resolution
        await asyncio.sleep(left_ns / 1e9)


async def open_loop(
    client: GenerateClient,
    arrivals: Iterator[Arrival],
    window: Window,
    clock: Clock,
    *,
    most_in_flight: int,
    sleep: SleepUntil = sleep_until,
) -> None:
    """Send each request at its time until the window ends, and wait for the answers.

    Raises Unreachable, and ConfigError for a trace that can't be read on.
    """
    over_cap = Failure(OVER_CAP, f"{most_in_flight} requests were waiting for their answers; raise --concurrency")
    in_flight = 0
    window.open(clock.now_ns())

    def ended(_: object) -> None:
        nonlocal in_flight
        in_flight -= 1

    try:
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                intended_ns = window.start_ns + arrival.at_ns
                measurements = window.admit(intended_ns)
                if measurements is None:
                    if window.end_ns is not None and intended_ns >= window.end_ns:
                        await sleep(clock, window.end_ns)  # the last gap belongs to the time that is measured
                    break
                await sleep(clock, intended_ns)
                if in_flight >= most_in_flight:
                    measurements.record_failure(over_cap, intended_ns)
                    continue
                in_flight += 1
                sending = send(client, arrival.shape, measurements, intended_ns=intended_ns)
                group.create_task(sending).add_done_callback(ended)
            window.close(clock.now_ns())
    except* IronbatchError as errors:
        problem = errors.exceptions[0]  # the others say the same
    else:
        return
    raise problem from None
