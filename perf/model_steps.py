"""The model server of perf/model_server.py: it computes nothing, and sends the tokens of all streams in steps.

    python perf/model_steps.py [--step-ms 20] [--prefill-ms 5]

It speaks as much of OpenAI's API as Ironbatch asks for, in events as long as vLLM's. A stream's first token comes
--prefill-ms after its request, whatever else goes on, so that two ways to ask can be compared; all others come with the
steps, those of all streams one after the other, as from a server that batches. It prints its port, and ends with its
standard input. A bare protocol on uvloop: the machine's two cores are for what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import uvloop

SERVED = b'{"object":"list","data":[{"id":"steps","object":"model","owned_by":"perf"}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def word(index: int) -> str:
    """A stream's token: its number."""
    return f" {index}"


def event(data: str) -> bytes:
    """One server-sent event, as one chunk."""
    return chunk(f"data: {data}\n\n".encode())


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def completion(text: str, finish_reason: str | None, **more: object) -> str:
    """An event's JSON."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_760_000_000, "model": "steps"}
    return json.dumps({**head, "choices": [choice], **more}, separators=(",", ":"))


class Stream:
    """One completion under way."""

    def __init__(self, transport: asyncio.Transport, prompt_tokens: int, max_tokens: int) -> None:
        self._transport = transport
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._sent = 0

    def send(self) -> bool:
        """Send the next token, and the end behind the last one. Returns whether there are more."""
        index, self._sent = self._sent, self._sent + 1
        if self._sent < self._max_tokens:
            self._transport.write(event(completion(word(index), None)))
            return True
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._max_tokens}
        end = event(completion(word(index), "length")) + event(json.dumps({"choices": [], "usage": usage}))
        self._transport.write(end + event("[DONE]") + LAST_CHUNK)
        return False


class Steps:
    """All streams."""

    def __init__(self, step_s: float, prefill_s: float) -> None:
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._running: dict[asyncio.Transport, Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time()
        self._step()

    def begin(self, transport: asyncio.Transport, stream: Stream) -> None:
        """The first token is computed."""
        self._loop.call_later(self._prefill_s, self._first, transport, stream)

    def end(self, transport: asyncio.Transport) -> None:
        """The client has gone."""
        self._running.pop(transport, None)

    def _first(self, transport: asyncio.Transport, stream: Stream) -> None:
        if not transport.is_closing() and stream.send():
            self._running[transport] = stream

    def _step(self) -> None:
        self._next_s = max(self._next_s + self._step_s, self._loop.time())
        self._loop.call_at(self._next_s, self._step)
        for transport, stream in list(self._running.items()):
            if not stream.send():
                del self._running[transport]


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.end(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        size = content_length(head)
        if not found or len(body) < size:
            return
        self._received = body[size:]
        self._answer(head.split(b" ", 2)[1], body[:size])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path.endswith(b"/models"):
            self._write_whole(b"200 OK", SERVED)
        elif path.endswith(b"/completions"):
            asked = json.loads(body)
            self._transport.write(HEAD)
            self._steps.begin(self._transport, Stream(self._transport, len(asked["prompt"]), asked["max_tokens"]))
        else:
            self._write_whole(b"404 Not Found", b"{}")

    def _write_whole(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


def content_length(head: bytes) -> int:
    """Of a request."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve(step_s: float, prefill_s: float) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    steps = Steps(step_s, prefill_s)
    server = await loop.create_server(lambda: Connection(steps), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Read the options, and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--prefill-ms", type=float, default=5)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.step_ms / 1000, arguments.prefill_ms / 1000))


if __name__ == "__main__":
    main()
