"""One request over HTTP: sent, its stream checked and timed, its failure named."""

from typing import Final

import msgspec

from ironbatch.bench.connection import ConnectError, Connection, ConnectionLost, NoProgress, Target
from ironbatch.bench.http import Answer, BadAnswer
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.stream import (
    MAX_LABEL_CHARS,
    TRUNCATED,
    ErrorObject,
    ExpectedStream,
    StreamChecker,
    StreamFault,
    shown,
)
from ironbatch.clock import Clock

CONNECTION_LOST: Final = "connection lost"
TIMED_OUT: Final = "timed out"
BAD_HTTP: Final = "bad HTTP answer"

MAX_ERROR_BODY_BYTES: Final = 65_536
STATUS_OK: Final = 200


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


_ERROR_DECODER: Final = msgspec.json.Decoder(_ErrorBody)


class GenerateClient:
    """Sends POST /generate of one shape to `target`. Proxies, cookies and redirects play no part."""

    def __init__(
        self, target: Target, clock: Clock, measurements: Measurements, *, prompt_tokens: int, max_new_tokens: int
    ) -> None:
        self.url = target.url
        self.measurements = measurements
        self._target = target
        self._clock = clock
        self._expected = ExpectedStream(max_new_tokens)
        body = b'{"prompt_tokens":%d,"max_new_tokens":%d}' % (prompt_tokens, max_new_tokens)
        head = (
            f"POST {target.path}/generate HTTP/1.1\r\nhost: {target.host_header}\r\nuser-agent: ironbatch-bench\r\n"
            f"accept-encoding: identity\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode("ascii") + body

    def connection(self) -> Connection:
        """One to the target, for requests that follow each other. To be left with `with`."""
        return Connection(self._target)

    async def generate(self, connection: Connection) -> Failure | None:
        """Do one request, measure it, and return why it failed, if it did."""
        measurements = self.measurements
        stream = _MeasuredStream(self._expected, self._clock, measurements)
        failure = await self._exchange(connection, stream)
        if failure is None:
            measurements.succeeded += 1
            measurements.ended_early += stream.ended_early
        else:
            measurements.tokens_of_failed += stream.tokens
            measurements.record_failure(failure)
        return failure

    async def _exchange(self, connection: Connection, stream: "_MeasuredStream") -> Failure | None:
        try:
            await connection.exchange(self._request, stream)
        except ConnectError as error:
            return Failure(error.name, shown(error.detail), unreachable=not self._target.was_reached)
        except StreamFault as fault:
            return Failure(fault.name, fault.detail)
        except BadAnswer as error:
            return Failure(BAD_HTTP, shown(str(error)))
        except NoProgress as error:
            return Failure(TIMED_OUT, f"{stream.tokens} tokens, then {error}")
        except ConnectionLost as error:
            return Failure(CONNECTION_LOST, shown(str(error)))
        return stream.failure()


class _MeasuredStream:
    """Takes the answer to one request, from its sending on, and measures it as it arrives."""

    def __init__(self, expected: ExpectedStream, clock: Clock, measurements: Measurements) -> None:
        self._answer = Answer()
        self._checker = StreamChecker(expected)
        self._clock = clock
        self._measurements = measurements
        self._error_body = b""
        self._sent_ns = self._last_ns = clock.now_ns()

    @property
    def tokens(self) -> int:
        """Tokens received in order so far."""
        return self._checker.tokens

    @property
    def ended_early(self) -> bool:
        """Whether the stream was complete with fewer tokens than asked for."""
        return self._checker.ended_early

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another request."""
        return self._answer.is_complete and self._answer.keeps_alive

    def receive(self, data: bytes) -> bool:
        """Take what has come. Raises BadAnswer, StreamFault."""
        arrived_ns = self._clock.now_ns()
        answer = self._answer
        body = answer.feed(data)
        if answer.status == STATUS_OK:
            if body:
                self._read_lines(body, arrived_ns)
            if answer.is_complete:
                self._end_stream(arrived_ns)
            return answer.is_complete
        self._error_body += body
        return answer.is_complete or len(self._error_body) > MAX_ERROR_BODY_BYTES

    def receive_end(self, reason: str) -> None:
        """The connection is closed. Raises ConnectionLost, StreamFault."""
        is_complete = self._answer.end()
        if self._answer.status == 0:
            raise ConnectionLost(reason)
        if self._answer.status != STATUS_OK:
            return  # the status names the failure, also if the body breaks off
        if not is_complete:
            raise StreamFault(TRUNCATED, f"{self.tokens} tokens, then {shown(reason)}")
        self._end_stream(self._clock.now_ns())

    def failure(self) -> Failure | None:
        """What a complete answer says of the request: None if all is well.

        Named by its status, the error type in its body, and whether it asks to come back later.
        """
        answer = self._answer
        if answer.status == STATUS_OK:
            return None
        name, detail = f"HTTP {answer.status}", answer.reason
        try:
            error = _ERROR_DECODER.decode(self._error_body).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            detail = self._error_body.decode("utf-8", "replace") or detail  # some proxy's answer, not Ironbatch's
        else:
            name, detail = f"{name}: {shown(error.type, MAX_LABEL_CHARS)}", error.message or detail
        retry_after = answer.headers.get("retry-after")
        if retry_after is not None:
            name, detail = f"{name}, Retry-After", f"{detail} (Retry-After: {retry_after})"
        return Failure(name, shown(detail))

    def _read_lines(self, body: bytes, arrived_ns: int) -> None:
        """Measure the lines that have come together, as `Measurements` says."""
        checker, measurements = self._checker, self._measurements
        tokens_before = checker.tokens
        try:
            lines = checker.feed(body)
        finally:  # those before a fault have arrived, too
            measurements.tokens += checker.tokens - tokens_before
        if lines == 0:
            return
        if checker.lines == lines:
            measurements.ttft.record(arrived_ns - self._sent_ns)
            measurements.inter_token.record(0, lines - 1)
        else:
            measurements.inter_token.record((arrived_ns - self._last_ns) // lines, lines)
        self._last_ns = arrived_ns

    def _end_stream(self, ended_ns: int) -> None:
        self._checker.finish()
        self._measurements.end_to_end.record(ended_ns - self._sent_ns)
