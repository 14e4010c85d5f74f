"""Doorbells: eventfds that wake a sleeping process. 11 us one way, and they cannot fill (eventfd(2)).

Who publishes rings only if the other side has said that it sleeps, since a ring costs its sender 3 us.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from functools import cached_property


class Doorbell:
    """One eventfd. Whoever inherits the descriptor may ring; one process waits."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> Doorbell:
        """A new doorbell, close-on-exec, that nobody has rung."""
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wake the waiting process, or let its next wait return at once."""
        try:  # noqa: SIM105  contextlib.suppress would cost more than the call
            os.eventfd_write(self.descriptor, 1)
        except BlockingIOError:  # 2**64 - 2 rings unheard: it is awake by now
            pass

    def silence(self) -> None:
        """Forget all rings so far."""
        try:  # noqa: SIM105  as in `ring`
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    @cached_property
    def _poller(self) -> select.poll:
        """Of the one process that waits."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return poller

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until somebody rings or the time is over. Returns whether somebody rang; silences it."""
        if not self._poller.poll(timeout_ms):
            return False
        self.silence()
        return True

    def close(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)


class Alarm:
    """Several doorbells that wake one sleeper."""

    def __init__(self, bells: Iterable[Doorbell]) -> None:
        self._bells = {bell.descriptor: bell for bell in bells}
        self._poller = select.poll()
        for descriptor in self._bells:
            self._poller.register(descriptor, select.POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until somebody rings or the time is over. Returns whether somebody rang; silences who did."""
        rung = self._poller.poll(timeout_ms)
        for descriptor, _ in rung:
            self._bells[descriptor].silence()
        return bool(rung)
