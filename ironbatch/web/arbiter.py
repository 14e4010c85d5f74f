"""What gunicorn's arbiter does otherwise here when workers are to go: at a stop, at a reload, at TTOU.

- A stop is announced in the segment first, so that workers refuse what is new and know when their streams end.
- While a reload waits for the old workers' end, gunicorn hears no signal and looks for no hung worker. Here SIGTERM,
  SIGINT and SIGQUIT are heeded, or a stop could take twice its time, and hung workers are killed as at other times.
- A worker that has been told to go, and whose streams may still run for long, counts as a worker in gunicorn's sum, and
  one that dies meanwhile would not be replaced. Here it is.
- Each worker needs a lane, of which there is a fixed number. TTIN is refused where the next reload would run short.
"""

from __future__ import annotations

import queue
import signal
from typing import Any

from ironbatch.clock import MonotonicClock
from ironbatch.draining import announce_drain


def adapt(server: Any, header: Any, drain_timeout_s: int, most_workers: int) -> None:
    """Change the arbiter's methods.

    Args:
        server: the arbiter, before it has a worker.
        header: the segment's.
        drain_timeout_s: how long streams may go on at a stop.
        most_workers: that TTIN may lead to.
    """
    Adapted(server, header, drain_timeout_s, most_workers)


class Adapted:
    """Holds the arbiter's own methods, and stands in for them."""

    def __init__(self, server: Any, header: Any, drain_timeout_s: int, most_workers: int) -> None:
        self._server = server
        self._header = header
        self._drain_timeout_s = drain_timeout_s
        self._most_workers = most_workers
        self._clock = MonotonicClock()
        self._is_reloading = False
        self._leaving: set[Any] = set()  # workers that were told to go
        names = ("stop", "reload", "reap_workers", "manage_workers", "handle_ttin")
        self._theirs = {name: getattr(server, name) for name in names}
        self._kill_worker = server.kill_worker
        server.stop = self._stop
        server.reload = self._reload
        server.reap_workers = self._reap_workers
        server.manage_workers = self._manage_workers
        server.handle_ttin = self._one_more
        server.kill_worker = self._note_and_kill

    def _stop(self, graceful: bool = True) -> None:  # noqa: FBT001, FBT002 - gunicorn's signature
        self._is_reloading = False
        if not graceful:
            announce_drain(self._header, self._clock.now_ns(), 0)
        elif not self._header["draining"]:  # or the supervisor has said more exactly
            announce_drain(self._header, self._clock.now_ns(), self._drain_timeout_s)
        self._theirs["stop"](graceful)

    def _reload(self) -> None:
        self._is_reloading = True
        try:
            self._theirs["reload"]()
        finally:
            self._is_reloading = False

    def _reap_workers(self) -> None:
        """Called at each death, and ten times a second while a reload or a stop waits for workers."""
        self._theirs["reap_workers"]()
        if self._is_reloading:
            self._server.murder_workers()
            self._replace_missing()
            self._heed_stop()

    def _one_more(self) -> None:
        if self._server.num_workers < self._most_workers:
            self._theirs["handle_ttin"]()
        else:
            self._server.log.error(
                "TTIN is refused: %d web workers are as many as this engine has room for; start it with more --workers",
                self._server.num_workers,
            )

    def _manage_workers(self) -> None:
        self._theirs["manage_workers"]()
        self._replace_missing()

    def _note_and_kill(self, pid: int, number: int) -> None:
        worker = self._server.WORKERS.get(pid)
        if worker is not None and number == signal.SIGTERM:
            self._leaving.add(worker)
        self._kill_worker(pid, number)

    def _replace_missing(self) -> None:
        workers = set(self._server.WORKERS.values())
        self._leaving &= workers
        for _ in range(self._server.num_workers - len(workers - self._leaving)):
            self._server.spawn_worker()

    def _heed_stop(self) -> None:
        others = []
        handlers = {
            signal.SIGTERM: self._server.handle_term,
            signal.SIGINT: self._server.handle_int,
            signal.SIGQUIT: self._server.handle_quit,
        }
        while True:
            try:
                number = self._server.SIG_QUEUE.get_nowait()
            except queue.Empty:
                break
            if number in handlers:
                handlers[number]()  # raises what ends the arbiter's main loop
            others.append(number)
        for number in others:
            self._server.SIG_QUEUE.put_nowait(number)
