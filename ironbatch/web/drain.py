"""The last part of a worker's life: what is new is refused or sent elsewhere, and streams come to an end.

Two occasions. The engine stops: whoever stops it says so in the segment, and until when streams may run (draining.py).
Or this worker alone leaves, in a reload or since there are to be fewer: the arbiter sends it SIGTERM, and others serve.

gunicorn's own way would be to wait with its heart stopped, to cut what runs on at the end, and to close kept-alive
connections under their clients' next requests. So its handlers are called only once nothing is left to lose:

    SIGTERM -> leave: listen no more ; answers say "Connection: close" ; streams end ... ; gunicorn's handler
    SIGQUIT -> streams end with an error line now ; gunicorn's handler
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Any

from ironbatch.clock import Clock
from ironbatch.draining import ERROR_LINE_S
from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.web.collector import TokenCollector

if TYPE_CHECKING:
    from ironbatch.web.connection_book import ConnectionBook

_log = logging.getLogger("ironbatch.web")

WORKER_KEY = "ironbatch.worker"
"""Where gunicorn's worker stands in the lifespan's state."""

SHUTTING_DOWN = "shutting_down"
LOOK_S = 0.2
LISTEN_ON_S = 1.0
"""A worker that leaves goes on accepting for so long: its successor may need a moment until it listens."""

QUIET_S = 0.5
"""Whoever has just got an answer on a kept-alive connection may send the next request before it learns of the end."""

FAREWELL_S = 0.1
"""For the error lines to leave, before gunicorn cancels all tasks."""

NS_PER_S = 1_000_000_000


class Drain:
    """Of one worker. Everything runs on its event loop.

    Args:
        collector: of this worker.
        header: the segment's.
        clock: where "now" comes from.
        timeout_s: how long streams may go on when this worker alone leaves (--drain-timeout-s).

    Whoever serves requests counts them: `begun` and `ended`.
    """

    def __init__(self, collector: TokenCollector, header: Any, clock: Clock, timeout_s: int) -> None:
        self.begun = 0
        self.ended = 0
        self._collector = collector
        self._header = header
        self._clock = clock
        self._timeout_s = timeout_s
        self._worker: Any = None
        self._book: ConnectionBook | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._ends_ns: int | None = None  # when streams are ended
        self._is_leaving = False
        self._is_cutting = False
        self._listens = True
        self._last_begun = 0
        self._quiet_since_ns = 0

    def start(self, loop: asyncio.AbstractEventLoop, worker: Any | None) -> None:
        """Watch for the engine's drain, and take over the signals of gunicorn's `worker`, if it is one."""
        self._loop = loop
        self._look_timer = loop.call_later(LOOK_S, self._look)
        if worker is None:
            return
        self._worker = worker
        self._book = getattr(worker, "connections", None)  # none without our guard of connections (web/worker.py)
        if self._book is not None:
            self._book.must_close = self.must_close
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_signal_handler(signal.SIGQUIT, self._quit)
        loop.add_signal_handler(signal.SIGINT, self._quit)

    def stop(self) -> None:
        """The event loop ends."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

    def must_close(self) -> bool:
        """Whether an answer that begins now is to be the last on its connection."""
        return self._is_leaving or bool(self._header["draining"])

    # ------------------------------------------------------------------------------------------------------ signals

    def _leave(self) -> None:
        """SIGTERM; gunicorn's arbiter may send it again and again."""
        if self._is_leaving:
            return
        self._is_leaving = True
        self._ends_ns = self._clock.now_ns() + self._timeout_s * NS_PER_S
        if self._header["draining"]:
            self._listen_no_more()
        else:
            self._loop.call_later(LISTEN_ON_S, self._listen_no_more)
        self._look()

    def _listen_no_more(self) -> None:
        self._listens = False
        for server in self._worker.servers:
            server.close()

    def _quit(self) -> None:
        """SIGQUIT or SIGINT: at once."""
        self._end_streams("is shutting down")
        self._loop.call_later(FAREWELL_S, self._worker.handle_quit_signal)

    # --------------------------------------------------------------------------------------------------------- looks

    def _look(self) -> None:
        """See what is due, now and in LOOK_S again."""
        self.stop()
        self._look_timer = self._loop.call_later(LOOK_S, self._look)
        now_ns = self._clock.now_ns()
        open_requests = self.begun - self.ended
        if open_requests or self.begun != self._last_begun:
            self._last_begun = self.begun
            self._quiet_since_ns = now_ns
        if self._header["draining"]:
            ends_ns = int(self._header["streams_end_ns"])
            self._ends_ns = ends_ns if self._ends_ns is None else min(self._ends_ns, ends_ns)
            if not open_requests:
                self._collector.say_drained()
        if self._ends_ns is None:
            return
        if now_ns >= self._ends_ns:
            self._end_streams("is shutting down" if self._header["draining"] else "replaces this web worker")
        if self._is_leaving:
            self._hand_over(now_ns - self._ends_ns, open_requests)

    def _hand_over(self, late_ns: int, open_requests: int) -> None:
        """Let gunicorn end the worker if nothing is left to lose, or if it is too late for that."""
        if late_ns >= ERROR_LINE_S * NS_PER_S:
            if not self._is_cutting:
                self._is_cutting = True
                if open_requests:
                    _log.warning("%d requests are cut: their clients do not read, or do not send", open_requests)
                self._worker.handle_quit_signal()
        elif not open_requests and not self._listens and self._is_quiet() and not self._is_sending():
            self._worker.handle_exit_signal()

    def _is_quiet(self) -> bool:
        """Whether nobody who got an answer may still have the next request under way.

        While others serve nobody is in a hurry, and gunicorn closes idle connections itself in its own time.
        """
        if self._worker.nr_conns == 0:
            return True
        quiet_s = QUIET_S if self._header["draining"] else self._worker.cfg.keepalive + QUIET_S
        return self._clock.now_ns() - self._quiet_since_ns >= quiet_s * NS_PER_S

    def _is_sending(self) -> bool:
        """Whether a client has still to take the end of an answer. Idle connections the worker closes at its end."""
        return self._book is not None and self._book.is_sending

    def _end_streams(self, who: str) -> None:
        message = (
            f"the server {who} and does not wait for this request any longer (--drain-timeout-s says how long it waits,"
            " where it was not told to stop at once); send it again"
        )
        problem = RequestRejected(SHUTTING_DOWN, message, status=503, retry_after_s=RETRY_AFTER_S)
        if count := self._collector.end_all(problem):
            _log.warning("%d streams are ended with an error line: the server %s", count, who)
