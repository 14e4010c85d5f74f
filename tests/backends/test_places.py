"""Places are handed out first come, first served, and none is ever lost, whoever is cancelled when."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ironbatch.backends.places import Places


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_first_come_first_served() -> None:
    async def run() -> list[int]:
        places, order = Places(1), []

        async def one(number: int) -> None:
            await places.take()
            order.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await settled()
        assert order == [0]
        tasks[2].cancel()
        for _ in range(2):
            places.release()
            await settled()
        assert places.taken == 1
        return order

    assert asyncio.run(run()) == [0, 1, 3]


def test_a_newcomer_does_not_overtake() -> None:
    async def run() -> None:
        places = Places(1)
        await places.take()
        waiting = asyncio.create_task(places.take())
        await settled()
        places.release()  # it is the waiting one's from now on
        late = asyncio.create_task(places.take())
        await settled()
        assert waiting.done()
        assert not late.done()
        late.cancel()

    asyncio.run(run())


@given(st.builds(Random, st.integers(0, 2**32)))
def test_any_order_of_events(rng: Random) -> None:
    async def run() -> None:
        limit = rng.randint(0, 3)
        places = Places(limit)
        tasks: list[asyncio.Task[None]] = []
        holding: set[asyncio.Task[None]] = set()
        for _ in range(60):
            event = rng.random()
            if event < 0.4:
                tasks.append(asyncio.create_task(places.take()))
            elif event < 0.6 and tasks:
                rng.choice(tasks).cancel()
            elif event < 0.9 and holding:
                holding.remove(rng.choice(sorted(holding, key=tasks.index)))
                places.release()
            elif event < 0.95:
                limit = rng.randint(0, 3)
                places.resize(limit)
            if rng.random() < 0.7:
                await settled()
                holding |= {task for task in tasks if task.done() and not task.cancelled()} - known
                known.update(holding)
                assert places.taken == len(holding)
        places.resize(len(tasks))
        await settled()
        assert all(task.done() for task in tasks), "somebody waits for ever"

    known: set[asyncio.Task[None]] = set()
    asyncio.run(run())
