"""What the requests of a run are, and when they arrive: the same for the same options, however fast the server is."""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from ironbatch.bench.arrivals import arrivals_ns
from ironbatch.bench.flags import MAX_NEW_TOKENS, PROMPT_TOKENS
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.trace import Trace, TraceRow


class Shape(NamedTuple):
    """How long one request's prompt is, and how many tokens it asks for."""

    prompt_tokens: int
    max_new_tokens: int


class Arrival(NamedTuple):
    """One request of the open loop, and when it is meant to be sent, in nanoseconds from the start."""

    at_ns: int
    shape: Shape


class Workload:
    """Makes the requests of a run, from the beginning each time it is asked.

    Arrivals, prompt lengths and output lengths are drawn by generators of their own: another rate leaves the
    lengths as they were.
    """

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        self._trace = None if options.trace is None else Trace(options.trace, PROMPT_TOKENS, MAX_NEW_TOKENS)

    @property
    def raised_prompts(self) -> int:
        """Prompts of 0 tokens that the trace has given since `check`; they are sent as prompts of one."""
        return 0 if self._trace is None else self._trace.raised_prompts

    def check(self) -> None:
        """Walk the part of the trace that the run will use, so that no run ends at a bad line. Raises ConfigError."""
        if self._trace is None:
            return
        rows: Iterator[TraceRow] = self._trace.rows()
        if self._options.replays_trace:
            rows = itertools.takewhile(self._is_in_time, self._trace.rows())
        for _ in itertools.islice(rows, self._most_requests()):
            pass
        self._trace.raised_prompts = 0

    def _is_in_time(self, row: TraceRow) -> bool:
        options = self._options
        if options.duration_s is None:
            return True
        return row.arrival_ns / options.time_scale <= (options.warm_up_s + options.duration_s) * 1e9

    def _most_requests(self) -> int | None:
        """More requests than the run will send; None if only the trace can tell."""
        options = self._options
        if options.total_requests is not None and not options.warm_up_s:
            return options.total_requests
        rate = options.rate if options.ramp is None else options.ramp.high
        if rate is None or options.duration_s is None:
            return None
        expected = rate * (options.warm_up_s + options.duration_s)
        return round(2 * expected) + 1000  # beyond any chance, but for wild bursts

    def shapes(self) -> Iterator[Shape]:
        """Yield the lengths of one request after the other, without an end; a trace begins again after its last."""
        if self._trace is not None:
            while True:
                for row in self._trace.rows():
                    yield Shape(row.prompt_tokens, row.max_new_tokens)
        prompt_tokens, max_new_tokens = self._options.prompt_tokens, self._options.max_new_tokens
        prompt_generator, output_generator = self._generator("prompt tokens"), self._generator("output tokens")
        while True:
            yield Shape(prompt_tokens.sample(prompt_generator), max_new_tokens.sample(output_generator))

    def arrivals(self, rate: float | None) -> Iterator[Arrival]:
        """Yield the open loop's requests, at `rate` a second and without an end; None: when the trace has them."""
        if rate is None:
            assert self._trace is not None
            for row in self._trace.rows():
                at_ns = round(row.arrival_ns / self._options.time_scale)
                yield Arrival(at_ns, Shape(row.prompt_tokens, row.max_new_tokens))
            return
        times = arrivals_ns(rate, self._options.burstiness, self._generator("arrivals"))
        for at_ns, shape in zip(times, self.shapes(), strict=False):
            yield Arrival(at_ns, shape)

    def _generator(self, purpose: str) -> random.Random:
        # Seeded by a hash that every Python shares; nothing here is secret.
        return random.Random(f"{self._options.seed}: {purpose}")  # noqa: S311
