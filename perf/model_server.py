"""What Ironbatch in front of a model server adds: time to first token, and CPU time for each line that it hands on.

    python perf/model_server.py [--output FILE] [--fast]

`ttft/...`: a request's first token comes 5 ms after it has reached the model server (perf/model_steps.py); asked by
Ironbatch, and directly, in turns, over kept connections. What is added is the difference of the two medians.
`1-stream`: nothing else goes on. `8-streams`: seven others run. `8-at-once`: eight requests are sent one behind the
other, and wait for each other in every process that they pass.

`cpu/...`: streams whose tokens come in steps of 20 ms, all of a step at once; the CPU time of the web worker and of the
scheduler, its upstream thread included, for each line that reached the client. All of it is added: a client that asks
directly has no such processes. Every line is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyperf
from http_client import CpuClock
from http_servers import Ironbatch, ironbatch
from http_stream import public_metadata
from model_steps import word
from yardsticks import REPOSITORY

STEPS = str(Path(__file__).with_name("model_steps.py"))
TTFT_CASES = ("1-stream", "8-streams", "8-at-once")
CPU_STREAMS = (1, 8, 64)
MANY = 8
ROUNDS_A_TURN = 10
SIDES = ("direct", "ironbatch")
READ_BYTES = 1 << 18
TIMEOUT_S = 30.0
REST_S = 0.03  # between two rounds: everybody has gone to sleep
ENDLESS = 4000  # tokens; no stream lives to see its end
OPTIONS: dict[str, object] = {
    "backend": "real",
    "backend_slots": max(CPU_STREAMS),  # the model server does not tell
    "max_running_seqs": max(CPU_STREAMS),
    "max_queued_requests": 16,
    "total_kv_blocks": max(CPU_STREAMS) * 512,
}
TEXTS = re.compile(rb'"text":"([^"]*)"')


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    ttft_turns: int
    cpu_windows: int
    warm_s: float = 0.3
    window_s: float = 1.5


DEFAULT = Plan(ttft_turns=15, cpu_windows=7)
FAST = Plan(ttft_turns=1, cpu_windows=1, window_s=0.5)


@dataclass(frozen=True)
class Target:
    """One of the two that are asked."""

    port: int
    path: str
    fields: dict[str, Any]  # of a request, but for its length
    length_field: str

    def post(self, tokens: int) -> bytes:
        """A request for so many tokens."""
        body = json.dumps({**self.fields, self.length_field: tokens}, separators=(",", ":")).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: perf\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def targets(steps_port: int, server: Ironbatch) -> dict[str, Target]:
    """Both sides, asked for the same."""
    direct = {"model": "steps", "prompt": "Once upon a time", "stream": True, "temperature": 0}
    return {
        "direct": Target(steps_port, "/v1/completions", direct, "max_tokens"),
        "ironbatch": Target(server.port, "/generate", {"prompt": "Once upon a time"}, "max_new_tokens"),
    }


class Crowd:
    """Kept connections to one target, read as fast as they fill."""

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._sockets = [socket.create_connection(("127.0.0.1", target.port), TIMEOUT_S) for _ in range(count)]
        self._poller = select.epoll(count)
        self._index = {connection.fileno(): k for k, connection in enumerate(self._sockets)}
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poller.register(connection, select.EPOLLIN)
        self.received = [bytearray() for _ in self._sockets]
        self.lines = 0

    def close(self) -> None:
        """Hang up."""
        for connection in self._sockets:
            connection.close()
        self._poller.close()

    def ask(self, tokens: int, asking: Sequence[int]) -> dict[int, float]:
        """Send a request on these connections; returns when, by time.perf_counter()."""
        request, sent_s = self._target.post(tokens), {}
        for k in asking:
            self.received[k].clear()
            sent_s[k] = time.perf_counter()
            self._sockets[k].sendall(request)
        return sent_s

    def read(self, until_s: float) -> list[int]:
        """Read what comes next, unless nothing does until then; which connections had something."""
        found = []
        for descriptor, _ in self._poller.poll(max(until_s - time.perf_counter(), 0)):
            k = self._index[descriptor]
            data = self._sockets[k].recv(READ_BYTES)
            assert data, "the server has hung up"
            self.received[k] += data
            self.lines += data.count(b'"text"')
            found.append(k)
        return found

    def read_for(self, seconds: float) -> None:
        """Read all that comes in that time."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self.read(until_s)

    def first_tokens(self, asking: Sequence[int]) -> list[float]:
        """Ask for two tokens, and wait for the ends; seconds from each request to its first token."""
        sent_s = self.ask(2, asking)
        taken_s: dict[int, float] = {}
        deadline_s = time.perf_counter() + TIMEOUT_S
        while not all(self.received[k].endswith(b"0\r\n\r\n") for k in asking):
            assert time.perf_counter() < deadline_s, "an answer has no end"
            for k in self.read(deadline_s):
                if k in sent_s and k not in taken_s and b'"text"' in self.received[k]:
                    taken_s[k] = time.perf_counter() - sent_s[k]
        self.check()
        return list(taken_s.values())

    def run(self, streams: Sequence[int]) -> None:
        """Have these connections carry endless streams, and wait until all have begun."""
        self.ask(ENDLESS, streams)
        deadline_s = time.perf_counter() + TIMEOUT_S
        while not all(b'"text"' in self.received[k] for k in streams):
            assert time.perf_counter() < deadline_s, "a stream has not begun"
            self.read(deadline_s)

    def check(self) -> None:
        """Whether every token is there, in its order, in what came so far."""
        for received in self.received:
            texts = TEXTS.findall(received)
            assert texts == [word(k).encode() for k in range(len(texts))], "a token is missing, twice there, or wrong"


@contextlib.contextmanager
def crowd(target: Target, count: int) -> Iterator[Crowd]:
    """A crowd; it hangs up at the end."""
    found = Crowd(target, count)
    try:
        yield found
    finally:
        found.close()


def ttft_turn(target: Target, case: str) -> list[float]:
    """Seconds to the first tokens of some rounds of a case."""
    count = 1 if case == "1-stream" else MANY
    asking = range(count - 1, count) if case == "8-streams" else range(count)
    found = []
    with crowd(target, count) as clients:
        clients.run(range(asking.start))
        clients.first_tokens(asking)  # its connections are new
        for _ in range(ROUNDS_A_TURN):
            clients.read_for(REST_S)
            found += clients.first_tokens(asking)
    return found


def measure_ttft(both: dict[str, Target], server: Ironbatch, turns: int) -> dict[str, list[float]]:
    """Seconds to first tokens, by case and side, in turns."""
    found: dict[str, list[float]] = {f"ttft/{case}/{side}": [] for case in TTFT_CASES for side in SIDES}
    for _ in range(turns):
        for case in TTFT_CASES:
            for side in SIDES:
                found[f"ttft/{case}/{side}"] += ttft_turn(both[side], case)
                server.wait_idle()
    return found


def cpu_per_line(target: Target, count: int, clocks: list[CpuClock], plan: Plan) -> float:
    """Seconds of CPU for each line of `count` streams."""
    with crowd(target, count) as clients:
        clients.run(range(count))
        clients.read_for(plan.warm_s)
        clients.lines = 0
        cpu_ns = sum(clock.now_ns() for clock in clocks)
        clients.read_for(plan.window_s)
        cpu_ns = sum(clock.now_ns() for clock in clocks) - cpu_ns
        clients.check()
        return cpu_ns / 1e9 / clients.lines


def cpu_name(count: int) -> str:
    """Of a benchmark."""
    return f"cpu/{count}-stream{'s' if count > 1 else ''}"


@contextlib.contextmanager
def model_steps() -> Iterator[int]:
    """The model server; its port."""
    words = [sys.executable, STEPS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def measure(plan: Plan) -> dict[str, list[float]]:
    """All values, by name."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(model_steps())
        options = OPTIONS | {"backend_url": f"http://127.0.0.1:{port}/v1"}
        server = stack.enter_context(ironbatch(options, str(REPOSITORY)))
        both = targets(port, server)
        found = measure_ttft(both, server, plan.ttft_turns)
        clocks = [server.clock, server.scheduler_clock]
        for _ in range(plan.cpu_windows):
            for count in CPU_STREAMS:
                server.wait_idle()
                taken_s = cpu_per_line(both["ironbatch"], count, clocks, plan)
                found.setdefault(cpu_name(count), []).append(taken_s)
        return found


def suite(found: dict[str, list[float]]) -> pyperf.BenchmarkSuite:
    """One benchmark a name; its values are seconds."""
    machine = public_metadata()
    return pyperf.BenchmarkSuite(
        [
            pyperf.Benchmark(
                [pyperf.Run(values, metadata=machine | {"name": name, "unit": "second"}, collect_metadata=False)]
            )
            for name, values in found.items()
        ]
    )


def table(found: dict[str, list[float]]) -> str:
    """Medians for people."""
    medians_us = {name: 1e6 * statistics.median(values) for name, values in found.items()}
    lines = []
    for case in TTFT_CASES:
        direct, ours = (medians_us[f"ttft/{case}/{side}"] for side in SIDES)
        lines.append(f"TTFT us, {case:10} {direct:6.0f} directly, {ours:6.0f}, added {ours - direct:5.0f}")
    lines += [f"CPU us a line, {count:2} streams: {medians_us[cpu_name(count)]:6.1f}" for count in CPU_STREAMS]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a pyperf suite")
    parser.add_argument("--fast", action="store_true", help="a quick look: fewer and shorter")
    arguments = parser.parse_args()
    found = measure(FAST if arguments.fast else DEFAULT)
    print(table(found))
    if arguments.output is not None:
        suite(found).dump(str(arguments.output), replace=True)


if __name__ == "__main__":
    main()
