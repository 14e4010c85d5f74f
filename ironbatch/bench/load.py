"""When requests are sent. The closed loop: each worker sends its next request when its last one is over."""

import asyncio

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.measure import Measurements
from ironbatch.errors import IronbatchError


class Unreachable(IronbatchError):
    """No connection to the server has ever come about: more requests would only say so again."""


async def closed_loop(
    client: GenerateClient, measurements: Measurements, *, concurrency: int, total_requests: int
) -> None:
    """Send `total_requests`, at most `concurrency` at a time; nothing is tried twice. Raises Unreachable."""
    tickets = iter(range(total_requests))

    async def worker() -> None:
        for _ in tickets:  # shared by all workers
            failure = await client.generate(measurements)
            if failure is not None and failure.unreachable and not measurements.server_answered:
                raise Unreachable(f"{failure.name}: {failure.detail}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, total_requests)):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others say the same
