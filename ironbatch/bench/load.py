"""When requests are sent. The closed loop: each worker sends its next request when its last one is over."""

import asyncio

from ironbatch.bench.client import GenerateClient
from ironbatch.errors import IronbatchError


class Unreachable(IronbatchError):
    """No connection to the server has ever come about: more requests would only say so again."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"can't reach {url}: {reason}; is the server up, and --url right?")


async def closed_loop(client: GenerateClient, *, concurrency: int, total_requests: int) -> None:
    """Send `total_requests`, at most `concurrency` at a time; nothing is tried twice. Raises Unreachable."""
    tickets = iter(range(total_requests))

    async def worker() -> None:
        for _ in tickets:  # shared by all workers
            failure = await client.generate()
            if failure is not None and failure.unreachable:
                raise Unreachable(client.url, f"{failure.name}: {failure.detail}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, total_requests)):
                group.create_task(worker())
    except* Unreachable as errors:
        problem = errors.exceptions[0]  # the others say the same
    else:
        return
    raise problem from None
