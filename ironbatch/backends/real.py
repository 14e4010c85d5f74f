"""The real backend: a model server behind a URL computes, one upstream stream for each scheduled sequence.

Who runs, in which order, how many at once and how long is Ironbatch's affair; the block tables are its accounting of
that, and mean nothing to the server. docs/model-server.md says what the operator and the clients see.
"""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends.base import (
    Backend,
    BatchLimits,
    BatchPlan,
    EngineLimits,
    KVGeometry,
    SequenceRequest,
    StepOutput,
    finish_error,
)
from ironbatch.backends.retries import RetryPolicy
from ironbatch.backends.stream import Stream, StreamEnd
from ironbatch.backends.stream_pool import StreamPool
from ironbatch.backends.upstream_watch import problem_code
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.named_files import read_api_key
from ironbatch.processes import StopRequested
from ironbatch.shm.wakeup import Doorbell
from ironbatch.upstream.client import UpstreamClient
from ironbatch.upstream.find import described, shown_model
from ironbatch.upstream.problems import UpstreamMisset, UpstreamProblem
from ironbatch.upstream.types import CompletionRequest, Found, Prompt

_log = logging.getLogger("ironbatch.scheduler")

MOST_PIECES = 64
"""Pieces that one sequence may get in one step; what else is there waits for the next."""

FILLER_TOKEN_ID = 100
"""A prompt of which only the length is known is sent as so many of these."""

NO_ROW = -1
LOOK_S = 0.5
BEAT_S = 0.05
SWITCH_INTERVAL_S = 0.0005
"""Python lets a thread that wants to run wait for so long; its own 5 ms would stand in every time to first token."""


class RealBackend(Backend):
    """Hands sequences to a `StreamPool`, and its pieces to the scheduler.

    Args:
        config: `backend_url` names the server.
    """

    paged_kv = False  # its KV is the server's own
    reserves_output = True  # a stream can't be stopped and taken up again

    def __init__(self, config: Config) -> None:
        self._config = config
        self.resumable = config.backend_continue
        self.news = Doorbell.create()
        self._streams: dict[int, Stream] = {}
        self._pool: StreamPool | None = None

    def connect(self) -> None:
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        client = UpstreamClient(
            config.backend_url,
            self._api_key(),
            silence_s=float(config.backend_timeout_s),
            connections=config.running_limit + 2,
        )
        policy = RetryPolicy(config.backend_retries, float(config.backend_wait_s), config.backend_continue)
        assert self.news is not None
        self._pool = StreamPool(client, policy, config.backend_model, self.news, self.tell_problem)
        self._pool.open()
        found = self._find(self._pool)
        places = self._places(found) if isinstance(found, Found) else self.predecessor_running
        self.batch_limits = BatchLimits(max_sequences=places, max_tokens_per_step=MOST_PIECES)
        self._pool.serve(found, places, is_fixed=config.backend_slots > 0)
        if isinstance(found, Found):
            self.tell_problem(layout.BACKEND_WELL)
            self._tell_found(found)

    def _tell_found(self, found: Found) -> None:
        """For the operator: what is there, and what of it does not fit."""
        config = self._config
        _log.info("%s serves %s", config.backend_url, described(found))
        if not found.is_listed:
            _log.warning("the model server does not list the model %s (--backend-model)", shown_model(found.model))
        if 0 < found.context_tokens < config.max_request_tokens:
            _log.warning(
                "a request may have %d tokens here, and the model server takes %d: it will refuse longer ones; use"
                " --max-model-len %d",
                *(config.max_request_tokens, found.context_tokens, found.context_tokens),
            )

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        self._has_stream = np.zeros(limits.num_sequences, np.bool_)
        self._row_of = np.zeros(limits.num_sequences, np.int32)

    def execute(self, plan: BatchPlan) -> StepOutput:
        assert self._pool is not None
        rows, output, count = plan.rows, plan.output, plan.count
        sequences = rows["sequence"]
        output.counts[:count] = 0
        fresh = sequences[(rows["emits"] != 0) & ~self._has_stream[sequences]]
        if len(fresh):
            self._begin(plan, fresh.tolist())
        told = self._pool.take()
        if told:
            self._row_of[[stream.sequence for stream in told]] = NO_ROW
            self._row_of[sequences] = np.arange(count, dtype=np.int32)
            self._take(self._pool, output, told)
        return output

    def forget(self, sequences: NDArray[np.int32]) -> None:
        assert self._pool is not None
        gone = [stream for s in sequences.tolist() if (stream := self._streams.pop(s, None)) is not None]
        self._has_stream[sequences] = False
        open_ones = [stream for stream in gone if stream.end is None]
        for stream in gone:
            stream.is_cancelled = True
        if open_ones:
            self._pool.cancel(open_ones)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # -------------------------------------------------------------------------------------------------------- a step

    def _begin(self, plan: BatchPlan, sequences: list[int]) -> None:
        """Streams for sequences that are to emit and have none."""
        assert self._pool is not None
        begun = []
        for sequence in sequences:
            request, row = plan.request(sequence), plan.text_row(sequence)
            pieces, place = row.read(row.first_piece, len(request.output_ids))
            asked = upstream_request(request, pieces)
            stream = Stream(sequence, asked, row, place, can_continue=self._config.backend_continue)
            self._streams[sequence] = stream
            self._has_stream[sequence] = True
            if stream.can_continue or not pieces:
                begun.append(stream)
            else:  # a scheduler has died, and what its client has cannot be told to the server
                stream.finish(StreamEnd(finish_error(layout.ERROR_LOST)))
                self._pool.tell(stream)
        self._pool.begin(begun)

    def _take(self, pool: StreamPool, output: StepOutput, told: list[Stream]) -> None:
        """Hand on what has come, in the order of the plan's rows."""
        token_ids: list[int] = []
        row_of = self._row_of
        for stream in sorted(told, key=lambda stream: row_of[stream.sequence]):
            row = int(row_of[stream.sequence])
            if row == NO_ROW:
                pool.tell(stream)
                continue
            end = stream.end  # before the pieces: none comes after it
            unread = stream.unread
            taken = min(len(unread), MOST_PIECES)
            for _ in range(taken):
                text, token_id = unread.popleft()
                stream.place = stream.row.append(stream.place, text)
                token_ids.append(token_id)
            output.counts[row] = taken
            if unread:
                pool.tell(stream)
            elif end is not None:
                self._end(stream, end)
                output.finish_reasons[row] = end.finish_reason
        output.token_ids[: len(token_ids)] = token_ids

    def _end(self, stream: Stream, end: StreamEnd) -> None:
        stream.row.write_usage(end.usage)
        if end.note:
            stream.row.write_note(end.note)

    # ------------------------------------------------------------------------------------------------------- a start

    def _api_key(self) -> str:
        try:
            return read_api_key(self._config.backend_api_key_file)
        except ValueError as problem:
            raise StartError(f"--backend-api-key-file: {problem}") from None

    def _find(self, pool: StreamPool) -> Found | UpstreamProblem:
        """Wait for the server; a successor takes over without it, for there are sequences that wait for an answer.

        Raises:
            StartError: it is not there in time, or does not answer as one should.
        """
        config = self._config
        until_s = time.monotonic() + config.backend_wait_s
        told = ""
        while True:
            try:
                return self._result(pool.find())
            except UpstreamProblem as problem:
                if self.predecessor_running:
                    return problem
                if isinstance(problem, UpstreamMisset):
                    raise StartError(problem.message) from None
                self.tell_problem(problem_code(problem))
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise StartError(
                        f"no model server at {config.backend_url} within {config.backend_wait_s} s (--backend-wait-s):"
                        f" {problem.message}"
                    ) from None
                if problem.message != told:
                    told = problem.message
                    _log.info("waiting up to %.0f s for the model server at %s: %s", left_s, config.backend_url, told)
            self._pause(min(LOOK_S, left_s))

    def _result(self, future: Future[Found]) -> Found:
        while True:
            try:
                return future.result(BEAT_S)
            except TimeoutError:
                self._pause(0.0)

    def _pause(self, seconds: float) -> None:
        """Sleep, alive; give up if the scheduler is to stop."""
        until_s = time.monotonic() + seconds
        while True:
            self.beat()
            if self.is_stopping():
                raise StopRequested
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(BEAT_S, left_s))

    def _places(self, found: Found) -> int:
        """How many streams the server gets at once."""
        wanted, limit = self._config.backend_slots, self._config.running_limit
        if wanted > found.slots > 0:
            _log.warning(
                "--backend-slots is %d, and the model server says that it takes %d streams at once: it will queue the"
                " others, behind the back of this engine's own queue",
                *(wanted, found.slots),
            )
        if not wanted and not found.slots:
            _log.warning(
                "the model server does not say how many streams it takes at once; it is sent up to %d"
                " (--max-running-seqs), and may queue some of them: --backend-slots says how many it is to get",
                limit,
            )
        return wanted or found.slots or limit


def upstream_request(request: SequenceRequest, pieces: list[bytes]) -> CompletionRequest:
    """What to ask for: all of a sequence, or, where its client has `pieces` of it, the rest."""
    if request.prompt_text is not None:
        prompt = Prompt((request.prompt_text + b"".join(pieces)).decode(errors="replace"), None)
    elif request.prompt_ids is not None:
        prompt = Prompt(None, request.prompt_ids.tolist() + request.output_ids.tolist())
    else:
        prompt = Prompt(None, [FILLER_TOKEN_ID] * request.prompt_tokens + request.output_ids.tolist())
    return CompletionRequest(
        prompt=prompt,
        max_tokens=request.max_new_tokens - len(pieces),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )
