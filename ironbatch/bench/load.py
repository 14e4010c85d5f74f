"""When requests are sent: the closed loop, and what both loops share.

Closed loop: each worker sends its next request when its last one is over, so a slow server is asked less.
"""

import asyncio
from collections.abc import Iterator

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.measure import Measurements
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Shape
from ironbatch.clock import Clock
from ironbatch.errors import IronbatchError


class Unreachable(IronbatchError):
    """No connection to the server has ever come about: more requests would only say so again."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"can't reach {url}: {reason}; is the server up, and --url right?")


async def send(
    client: GenerateClient, shape: Shape, measurements: Measurements, *, intended_ns: int | None = None
) -> None:
    """Do one request. Raises Unreachable."""
    failure = await client.generate(shape, measurements, intended_ns=intended_ns)
    if failure is not None and failure.unreachable:
        raise Unreachable(client.url, f"{failure.name}: {failure.detail}")


async def closed_loop(
    client: GenerateClient, shapes: Iterator[Shape], window: Window, clock: Clock, *, concurrency: int
) -> None:
    """Send until the window ends, `concurrency` at a time; nothing is tried twice. Raises Unreachable."""
    window.open(clock.now_ns())

    async def worker() -> None:
        while (measurements := window.admit(clock.now_ns())) is not None:
            await send(client, next(shapes), measurements)
        # A worker that was busy at the end finds out late, but has sent nothing since.
        now_ns, end_ns = clock.now_ns(), window.end_ns
        window.close(now_ns if end_ns is None else min(now_ns, end_ns))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except* IronbatchError as errors:
        problem = errors.exceptions[0]  # the others say the same
    else:
        return
    raise problem from None
