"""How long a scheduler's heart has been silent, as far as the supervisor was there to hear it."""

from __future__ import annotations

from typing import Any

LOOKS_PER_TIMEOUT = 10
MIN_LOOK_S = 0.05
MAX_LOOK_S = 1.0


class HeartWatch:
    """Adds up silence in small pieces.

    The time since the last beat alone would say nothing: if this process was stopped or had no processor, so may the
    scheduler have been. So of the time between two looks only so much counts as lies between two that are in time.

    Args:
        header: the segment's.
        timeout_s: the silence that somebody will act on; it decides how often to look.
    """

    def __init__(self, header: Any, timeout_s: float) -> None:
        self._header = header
        self._last_beat_ns = 0
        self._last_look_s = 0.0
        self._silent_s = 0.0
        self.look_every_s = min(max(timeout_s / LOOKS_PER_TIMEOUT, MIN_LOOK_S), MAX_LOOK_S)

    def restart(self, now_s: float) -> None:
        """Forget the silence so far."""
        self._last_look_s = now_s
        self._silent_s = 0.0

    def look(self, now_s: float) -> float:
        """Seconds of silence that this watch has witnessed, without a beat in between."""
        beat_ns = int(self._header["heartbeat_ns"])
        if beat_ns != self._last_beat_ns:
            self._last_beat_ns = beat_ns
            self.restart(now_s)
        self._silent_s += min(now_s - self._last_look_s, 2 * self.look_every_s)
        self._last_look_s = now_s
        return self._silent_s
