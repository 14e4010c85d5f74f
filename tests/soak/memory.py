"""What each process holds in memory, sampled through the run; and whether that is flat."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from tests.end_to_end.server import Server

MIB = 1 << 20

SETTLING_S = 15.0  # of a process's life that do not count: it imports, and fills what it keeps
SHORTEST_S = 60.0  # that a series must span to be judged
ALLOWED_BYTES = 2 * MIB
ALLOWED_SHARE = 0.02
"""Flat: the line fitted to a series (least squares) rises by at most ALLOWED_BYTES and ALLOWED_SHARE of its median over
the time that is judged. A leak of 1 KiB a request shows within a minute at 50 requests a second."""


@dataclass
class Series:
    """One process's resident memory."""

    role: str
    born_s: float
    times_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)

    def judged(self, from_s: float, until_s: float) -> dict[str, Any] | None:
        """Its part between two times, as the report shows it; None if that is too short to be judged."""
        start_s = max(from_s, self.born_s + SETTLING_S)
        points = [(t, rss) for t, rss in zip(self.times_s, self.rss_bytes, strict=True) if start_s <= t <= until_s]
        if len(points) < 3 or points[-1][0] - points[0][0] < SHORTEST_S:
            return None
        times, values = np.array(points, float).T
        slope = float(np.polyfit(times - times[0], values, 1)[0])
        rise, median = slope * (times[-1] - times[0]), float(np.median(values))
        return {
            "role": self.role,
            "seconds": round(times[-1] - times[0]),
            "first_mib": round(values[0] / MIB, 2),
            "last_mib": round(values[-1] / MIB, 2),
            "median_mib": round(median / MIB, 2),
            "rise_mib": round(rise / MIB, 3),
            "is_flat": bool(rise <= ALLOWED_BYTES + ALLOWED_SHARE * median),
        }


class Memory(threading.Thread):
    """Samples all processes of a server until it is told to stop."""

    def __init__(self, server: Server, every_s: float = 1.0) -> None:
        super().__init__(name="memory", daemon=True)
        self._server, self._every_s = server, every_s
        self._is_over = threading.Event()
        self.series: dict[int, Series] = {}

    def finish(self) -> list[Series]:
        """Stop; the series of all processes, also of those that have ended."""
        self._is_over.set()
        self.join()
        return list(self.series.values())

    def run(self) -> None:
        while not self._is_over.wait(self._every_s):
            with contextlib.suppress(psutil.Error):
                main = psutil.Process(self._server.process.pid)
                for process in (main, *main.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        now_s = time.monotonic()
        rss = process.memory_info().rss
        if not rss:  # a zombie
            return
        role = role_of(process)
        series = self.series.get(process.pid)
        if series is None or series.role != role:  # a fork has its parent's name for a moment
            series = self.series[process.pid] = Series(role, now_s)
        series.times_s.append(now_s)
        series.rss_bytes.append(rss)


def role_of(process: psutil.Process) -> str:
    """What a process is: supervisor, scheduler, web worker, arbiter, or a helper of Python's."""
    title = " ".join(process.cmdline())
    for role in ("supervisor", "scheduler", "web worker"):
        if f"ironbatch: {role}" in title:
            return role
    return "arbiter" if "gunicorn: master" in title else "helper"


def summary(series: list[Series], from_s: float, until_s: float) -> list[dict[str, Any]]:
    """What there is to say of the second half: one entry a process that was there for long enough."""
    found = [one.judged(from_s, until_s) for one in series]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry["role"], entry["seconds"]))
