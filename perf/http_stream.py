"""CPU time of a web worker per streamed line, beside a bare uvloop protocol that writes the same bytes.

    python perf/http_stream.py [--output FILE] [--cases TEXT] [--fast]

Cases: 1, 64 and 256 streams. `one-line`: a step takes 20 ms and brings every stream a line. `eight-lines`: it brings
eight. `flat-out`: a step takes 20 us and 1 us a token: the worker is always behind and writes what has gathered.
`one-token`: requests for one token, one after the other on each of 64 connections; the figures are per request.

Both servers live through the whole run and are measured in turn, so that the machine's moods meet both. The CPU time is
that of the serving process alone; nothing counts of the first moments of a turn. The bare server writes as many lines a
send, as often, as Ironbatch was seen to in the turn before. The client checks every byte that it reads.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyperf
from http_client import Requests, Streams, Timing, Window, response_head
from http_servers import PACE_BACKEND, Bare, Ironbatch, bare, install_pace, ironbatch

STEP_US = 20_000
ROOM: dict[str, object] = {
    "total_kv_blocks": 131_072,
    "max_queued_requests": 16,
    "max_model_len": 131_072,
}  # no stream ends or waits
SERVERS: dict[str, dict[str, object]] = {
    "one-line": ROOM | {"mock_token_latency_us": STEP_US},
    "eight-lines": ROOM | {"mock_token_latency_us": STEP_US, "backend": PACE_BACKEND},
    "flat-out": ROOM | {"mock_token_latency_us": 20, "mock_sequence_latency_ns": 1_000},
}
SIDES = ("ironbatch", "bare")
PUBLIC_METADATA = ("cpu_count", "cpu_freq", "cpu_model_name", "date", "load_avg_1min", "perf_version", "python_version")


@dataclass(frozen=True)
class Case:
    """What is measured: streams at a pace, or requests."""

    count: int
    pace: str

    @property
    def name(self) -> str:
        kind = "connections" if self.is_requests else "streams"
        return f"http_stream/{self.count}-{kind if self.count > 1 else kind[:-1]}/{self.pace}"

    @property
    def is_requests(self) -> bool:
        return self.pace == "one-token"

    @property
    def server(self) -> str:
        """Which of SERVERS serves it."""
        return "flat-out" if self.is_requests else self.pace


CASES = [*(Case(count, pace) for pace in SERVERS for count in (1, 64, 256)), Case(64, "one-token")]

ROUNDS, FAST_ROUNDS = 5, 2
DEFAULT = Timing(warm_s=0.25, window_s=1.0)
FAST = Timing(warm_s=0.1, window_s=0.3)


class Bench:
    """The servers that the cases need, and one turn of a case on each."""

    def __init__(self, servers: dict[str, Ironbatch], bare_server: Bare, head: bytes, timing: Timing) -> None:
        self._servers = servers
        self._bare = bare_server
        self._head = head
        self._timing = timing

    def turn(self, case: Case) -> dict[str, Window]:
        """Measure the case on one server, then on the other."""
        server = self._servers[case.server]
        client = Requests if case.is_requests else Streams
        seen = client(server.port, case.count, server.clock, self._head).measure(self._timing)
        server.wait_idle()
        lines = max(round(seen.items_per_send), 1)
        if not case.is_requests:
            self._bare.pace(lines * case.count * seen.wall_s / seen.items, lines)
        other = client(self._bare.port, case.count, self._bare.clock, self._head).measure(self._timing)
        self._bare.pace(0, 0)
        return dict(zip(SIDES, (seen, other), strict=True))


@contextlib.contextmanager
def started(cases: list[Case], timing: Timing) -> Iterator[Bench]:
    """Everything that the cases need; all of it is ended."""
    with contextlib.ExitStack() as stack:
        path = install_pace(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = {
            name: stack.enter_context(ironbatch(SERVERS[name], path))
            for name in SERVERS
            if any(case.server == name for case in cases)
        }
        head = response_head(next(iter(servers.values())).port)
        yield Bench(servers, stack.enter_context(bare(head)), head, timing)


def measure(cases: list[Case], timing: Timing, rounds: int) -> dict[Case, dict[str, list[Window]]]:
    """All windows of all cases, by side."""
    windows: dict[Case, dict[str, list[Window]]] = {case: {side: [] for side in SIDES} for case in cases}
    with started(cases, timing) as bench:
        for _ in range(rounds):
            for case in cases:
                for side, window in bench.turn(case).items():
                    windows[case][side].append(window)
    return windows


def public_metadata() -> dict[str, object]:
    """What pyperf knows of the machine, without what names it or shows a path."""
    known = pyperf.Run([1.0]).get_metadata()
    return {name: known[name] for name in PUBLIC_METADATA if name in known}


def suite(windows: dict[Case, dict[str, list[Window]]]) -> pyperf.BenchmarkSuite:
    """One benchmark a case and side; its values are seconds of CPU a line, or a request."""
    machine = public_metadata()
    benchmarks = []
    for case, sides in windows.items():
        for side, seen in sides.items():
            metadata = machine | {
                "name": f"{case.name}/{side}",
                "unit": "second",
                "description": f"CPU time of the serving process per {'request' if case.is_requests else 'line'}",
                "lines_per_send": round(statistics.median(window.items_per_send for window in seen), 2),
                "lines_per_second": round(statistics.median(window.items / window.wall_s for window in seen)),
            }
            run = pyperf.Run([window.cpu_s_per_item for window in seen], metadata=metadata, collect_metadata=False)
            benchmarks.append(pyperf.Benchmark([run]))
    return pyperf.BenchmarkSuite(benchmarks)


def table(windows: dict[Case, dict[str, list[Window]]]) -> str:
    """Medians for people, in us."""
    rows = [f"{'CPU us a line, or a request':42} {'ironbatch':>10} {'bare':>10} {'ratio':>7} {'lines a send':>14}"]
    for case, sides in windows.items():
        ours, bare_us = (statistics.median(window.cpu_s_per_item for window in sides[side]) * 1e6 for side in SIDES)
        lines = [statistics.median(window.items_per_send for window in sides[side]) for side in SIDES]
        sent = f"{lines[0]:.1f}, {lines[1]:.1f}"
        rows.append(f"{case.name:42} {ours:10.2f} {bare_us:10.2f} {ours / bare_us:7.2f} {sent:>14}")
    return "\n".join(rows)


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a pyperf suite")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name has TEXT in it")
    parser.add_argument("--fast", action="store_true", help="a quick look: fewer and shorter windows")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.cases in case.name]
    if not cases:
        parser.error(f"no case has {arguments.cases!r} in its name; they are {', '.join(case.name for case in CASES)}")
    windows = measure(cases, FAST, FAST_ROUNDS) if arguments.fast else measure(cases, DEFAULT, ROUNDS)
    print(table(windows))
    if arguments.output is not None:
        suite(windows).dump(str(arguments.output), replace=True)


if __name__ == "__main__":
    main()
