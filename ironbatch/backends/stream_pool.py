"""The upstream streams of all sequences, on an event loop in a thread of their own.

The scheduler's thread hands streams over and takes what has come; it never waits here but in `find`. How a stream that
fails is tried again is `StreamPool._complete`; whether there is a server to ask is `upstream_watch.py`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from ironbatch import layout
from ironbatch.backends.base import FINISH_LENGTH, FINISH_STOP, finish_error
from ironbatch.backends.places import Places
from ironbatch.backends.retries import RetryPolicy, failed, pause_before
from ironbatch.backends.stream import Stream, StreamEnd, StreamFailed
from ironbatch.backends.upstream_watch import UpstreamWatch
from ironbatch.shm.wakeup import Doorbell
from ironbatch.text_rows import NO_USAGE, TokenUsage
from ironbatch.upstream.client import UpstreamClient
from ironbatch.upstream.find import described
from ironbatch.upstream.problems import (
    UpstreamAway,
    UpstreamBroken,
    UpstreamBusy,
    UpstreamProblem,
    UpstreamRefused,
)
from ironbatch.upstream.types import UNKNOWN_USAGE, Finish, Found, Piece

_log = logging.getLogger("ironbatch.scheduler")

FINISH_WAIT_S = 1.0
"""How long a stream that has all its pieces may take to say that it is over."""

FREE_SLOT_S = 0.05
"""What a server is given to notice that a stream was closed, before its place is another's. llama.cpp: 15-32 ms."""

CLOSE_S = 2.0
REPEAT_LOG_S = 10.0

_END_REASONS = {"stop": FINISH_STOP, "length": FINISH_LENGTH}
Result = TypeVar("Result")


ROW_IS_FULL = UpstreamProblem(
    "the text is longer than this engine keeps of a request; ask for less, or give it a higher --max-model-len"
)


class StreamPool:
    """Made in the scheduler's thread, which alone calls its public methods.

    Args:
        client: not open yet.
        policy: what becomes of streams that fail.
        wanted_model: the model's name, or empty.
        news: rung when there is something to take.
        tell_problem: as of `Backend`.
    """

    def __init__(
        self,
        client: UpstreamClient,
        policy: RetryPolicy,
        wanted_model: str,
        news: Doorbell,
        tell_problem: Callable[[int], None],
    ) -> None:
        self._client = client
        self._policy = policy
        self._news = news
        self._places = Places()
        self._wanted_model = wanted_model
        self._most_places = 0
        self._is_fixed = False
        self._wrong_setting = ""  # the newest that was logged
        self._next_wrong_setting_s = 0.0
        self._server: Found | None = None
        self._watch = UpstreamWatch(client, wanted_model, tell_problem, self._found)
        self._told: deque[Stream] = deque()
        self._begun: deque[Stream] = deque()
        self._cancelled: deque[Stream] = deque()
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._is_ringing = False
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="upstream", daemon=True)

    # ------------------------------------------------------------------------------------------ the scheduler's thread

    def open(self) -> None:
        """Start the loop."""
        self._thread.start()
        self.call(self._client.open()).result()

    def find(self) -> Future[Found]:
        """Begin to ask the server what it is; its problem is the future's exception."""
        return self.call(self._client.find(self._wanted_model))

    def serve(self, found: Found | UpstreamProblem, most_places: int, *, is_fixed: bool) -> None:
        """From now on streams may begin: so many at once at most; unless it is fixed, what the server says later.

        Instead of what was found it may be the problem with finding it: then they wait until it is back.
        """
        self._most_places = most_places
        self._is_fixed = is_fixed
        self.call(self._start(found)).result()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def begin(self, streams: Iterable[Stream]) -> None:
        """Ask upstream for these."""
        self._begun.extend(streams)
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self, streams: Iterable[Stream]) -> None:
        """Close these, whose sequences are gone."""
        self._cancelled.extend(streams)
        self._loop.call_soon_threadsafe(self._cancel)

    def tell(self, stream: Stream) -> None:
        """Have `take` return this one again."""
        stream.has_told = True
        self._told.append(stream)

    def take(self) -> list[Stream]:
        """The streams that have something unread, or have ended, since the last call; each once."""
        streams = set()  # both threads may have told of one
        for _ in range(len(self._told)):
            stream = self._told.popleft()
            stream.has_told = False  # before it is read: what comes from now on is told anew
            if not stream.is_cancelled:
                streams.add(stream)
        return list(streams)

    def close(self) -> None:
        """End all streams and the loop."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    # ---------------------------------------------------------------------------------------------- the loop's thread

    def _run_loop(self) -> None:
        # Signals are the scheduler thread's: it sleeps in a call that only a signal of its own would end.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_all())
        finally:
            self._loop.close()

    async def _end_all(self) -> None:
        self._watch.stop()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.close()

    async def _start(self, found: Found | UpstreamProblem) -> None:
        if isinstance(found, Found):
            self._found(found)
        self._watch.start(found)

    def _found(self, found: Found) -> None:
        """What to ask, and how many places it has: maybe fewer than at the start, never more than the engine knows."""
        if self._server is not None:
            _log.warning("the model server is another than before: %s", described(found))
        self._server = found
        told = 0 if self._is_fixed else found.slots
        self._places.resize(min(self._most_places, told or self._most_places))

    def _begin(self) -> None:
        while self._begun:
            stream = self._begun.popleft()
            task = self._tasks[stream] = self._loop.create_task(self._run(stream))
            task.add_done_callback(functools.partial(self._forget, stream))

    def _forget(self, stream: Stream, task: asyncio.Task[None]) -> None:
        del self._tasks[stream]

    def _cancel(self) -> None:
        while self._cancelled:
            if task := self._tasks.get(self._cancelled.popleft()):
                task.cancel()

    async def _run(self, stream: Stream) -> None:
        """Bring a stream to its end, whatever happens, and say so."""
        try:
            finish = await self._complete(stream)
            usage = TokenUsage(*finish.usage) if stream.is_whole else NO_USAGE
            stream.finish(StreamEnd(_END_REASONS.get(finish.reason, FINISH_STOP), usage))
        except StreamFailed as failure:
            stream.finish(failure.end)
        except Exception as problem:  # one stream's fault must not hold up the others
            _log.exception("an upstream stream has failed", exc_info=problem)
            stream.finish(StreamEnd(finish_error(layout.ERROR_BACKEND)))
        self._tell(stream)

    async def _complete(self, stream: Stream) -> Finish:
        """Ask upstream, again where that may help.

        Raises:
            StreamFailed: it does not.
        """
        away_until_s = self._loop.time() + self._policy.wait_s
        failures = 0
        has_looked = False
        while True:
            received = stream.received_count
            try:
                await self._watch.wait_until_back(away_until_s)
                return await self._ask(stream)
            except UpstreamRefused as problem:
                raise failed(layout.ERROR_REQUEST, problem) from None
            except UpstreamAway as problem:
                self._watch.is_away(problem)
                self._check_may_ask_again(stream, problem)
                if self._loop.time() >= away_until_s:  # that it is away is in the log; its address is not the client's
                    raise StreamFailed(StreamEnd(finish_error(layout.ERROR_UNAVAILABLE))) from None
            except (UpstreamBusy, UpstreamBroken) as problem:
                self._check_may_ask_again(stream, problem)
                away_until_s = self._loop.time() + self._policy.wait_s  # it has been there until now
                # What has brought a piece has helped, and pieces are counted.
                failures = failures + 1 if stream.received_count == received else 0
                if failures > self._policy.retries:
                    code = layout.ERROR_UNAVAILABLE if isinstance(problem, UpstreamBusy) else layout.ERROR_BACKEND
                    raise failed(code, problem) from None
                pause_s = pause_before(failures, problem)
                _log.warning("sequence %d: %s; asked again in %.1f s", stream.sequence, problem.message, pause_s)
                await asyncio.sleep(pause_s)
            except UpstreamProblem as problem:  # a wrong setting, unless the server has become another meanwhile
                self._check_may_ask_again(stream, problem)
                if has_looked or not await self._watch.has_changed():
                    self._log_wrong_setting(problem)
                    raise StreamFailed(StreamEnd(finish_error(layout.ERROR_BACKEND))) from None
                has_looked = True

    def _log_wrong_setting(self, problem: UpstreamProblem) -> None:
        """Every request meets it; the operator need not read of it so often."""
        now_s = self._loop.time()
        if problem.message != self._wrong_setting or now_s >= self._next_wrong_setting_s:
            self._wrong_setting, self._next_wrong_setting_s = problem.message, now_s + REPEAT_LOG_S
            _log.error("%s", problem.message)

    async def _ask(self, stream: Stream) -> Finish:
        """One try. Its place is kept a little longer if the stream was closed before its end: upstream must notice."""
        assert self._server is not None
        await self._places.take()
        keep_s = FREE_SLOT_S
        try:
            async with asyncio.timeout(None) as deadline:
                deliver = functools.partial(self._deliver, stream, deadline)
                finish = await self._client.complete(self._server, stream.request_now(), deliver)
            keep_s = FREE_SLOT_S if finish.is_cut else 0.0
        except TimeoutError:  # all that was asked for is there
            finish = Finish("length", UNKNOWN_USAGE, is_cut=True)
        finally:
            self._loop.call_later(keep_s, self._places.release)
        if stream.is_full:
            raise failed(layout.ERROR_BACKEND, ROW_IS_FULL)
        return finish

    def _deliver(self, stream: Stream, deadline: asyncio.Timeout, piece: Piece) -> None:
        if stream.deliver(piece):
            self._tell(stream)
        elif stream.is_complete:
            deadline.reschedule(self._loop.time() + FINISH_WAIT_S)
        self._watch.heard()

    def _check_may_ask_again(self, stream: Stream, problem: UpstreamProblem) -> None:
        """Raise StreamFailed for one whose client has seen a beginning that need not fit to what would come now."""
        if stream.is_complete:
            raise StreamFailed(StreamEnd(FINISH_LENGTH))
        if stream.has_begun and not stream.can_continue:
            told = f"the model server broke off: {problem.message}"
            raise StreamFailed(StreamEnd(finish_error(layout.ERROR_BACKEND), note=told))

    def _tell(self, stream: Stream) -> None:
        """Have the scheduler take what is there, with all that this turn of the loop still brings."""
        if stream.has_told:
            return
        stream.has_told = True
        self._told.append(stream)
        if not self._is_ringing:
            self._is_ringing = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._is_ringing = False
        self._news.ring()
