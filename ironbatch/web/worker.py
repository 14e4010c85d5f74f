"""The web worker: gunicorn's ASGI worker, with a guard for every connection (`web/connection.py`)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from gunicorn.workers.gasgi import ASGIWorker

from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.web.connection import Connection
from ironbatch.web.connection_book import ConnectionBook, HttpTimes


class Worker(ASGIWorker):  # type: ignore[misc]
    """See the module; for the gunicorn that `web/wire.py` knows."""

    connections: ConnectionBook

    def _setup_event_loop(self) -> None:
        super()._setup_event_loop()
        config = Config.load({}, os.environ)
        self.connections = ConnectionBook(HttpTimes.of(config), config.max_connections, MonotonicClock(), self.log)
        create_server = self.loop.create_server

        def create_guarded_server(factory: Any, **options: Any) -> Any:
            """In place of the protocol that gunicorn has built in."""
            return create_server(lambda: Connection(self), **options)

        self.loop.create_server = create_guarded_server

    async def _serve(self) -> None:
        self.connections.start(asyncio.get_running_loop())
        try:
            await super()._serve()
        finally:
            self.connections.stop()

    async def _shutdown(self) -> None:
        for server in self.servers:
            server.close()
        self.connections.end()
        await super()._shutdown()
