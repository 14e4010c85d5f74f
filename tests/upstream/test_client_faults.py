"""Each fault of a model server, as the problem that the client makes of it, and what was delivered before."""

from __future__ import annotations

import errno
import os
import time

import aiohttp
import pytest

from ironbatch.upstream.events import MAX_EVENT_BYTES
from ironbatch.upstream.faults import problem_before_head
from ironbatch.upstream.problems import (
    UpstreamAway,
    UpstreamBroken,
    UpstreamBusy,
    UpstreamMisset,
    UpstreamProblem,
    UpstreamRefused,
)
from ironbatch.upstream.types import Piece, Usage
from tests.upstream.conftest import PROMPT, ask
from tests.upstream.scripted import OPENAI, Ending, Script, ScriptedServer, refusal
from tests.upstream.tokens import expected_pieces

SILENCE_S = 0.3


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (refusal(400, "the context is exceeded"), UpstreamRefused, "^the context is exceeded$"),
        (refusal(413, "too large"), UpstreamRefused, "^too large$"),
        (refusal(422, "no such field"), UpstreamRefused, "^no such field$"),
        (Script(400, body="plain words"), UpstreamRefused, "^plain words$"),
        (refusal(401, "who?"), UpstreamMisset, '401: "who.".*--backend-api-key-file'),
        (refusal(404, "no such model"), UpstreamMisset, '404: "no such model".*--backend-model'),
        (Script(302, {"Location": "http://elsewhere/v1"}), UpstreamMisset, 'redirects.*"http://elsewhere/v1"'),
        (Script(body={"choices": []}), UpstreamMisset, "application/json"),
        (Script(body="<html>", content_type="text/html"), UpstreamMisset, "text/html"),
        (Script(content_type="application/x-ndjson"), UpstreamMisset, "ndjson"),
        (refusal(500, "out of memory"), UpstreamBroken, '500: "out of memory"'),
        (refusal(503, "Loading model"), UpstreamAway, "Loading model"),
        (Script(before_head=Ending.CLOSE), UpstreamBroken, "closed the connection before it answered"),
        (Script(before_head=Ending.RESET), UpstreamBroken, "closed the connection before it answered"),
    ],
)
def test_answers_that_are_no_stream(
    server: ScriptedServer, script: Script, kind: type[UpstreamProblem], words: str
) -> None:
    pieces: list[Piece] = []
    server.script(script, script)  # a kept connection that breaks is tried again
    with pytest.raises(kind, match=words):
        ask(server, pieces=pieces)
    assert not pieces


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "seconds"), [("2", 2.0), ("9999", 60.0), ("-3", None), ("soon", None), (None, None)]
)
def test_busy(openai: ScriptedServer, status: int, header: str | None, seconds: float | None) -> None:
    openai.script(refusal(status, "slow down", **({} if header is None else {"Retry_After": header})))
    with pytest.raises(UpstreamBusy, match=r"slow down") as caught:
        ask(openai)
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(pieces=2, ending=Ending.NO_REASON), "without a finish reason"),
        (Script(pieces=2, ending=Ending.END), "without a finish reason"),
        (Script(pieces=2, ending=Ending.CLOSE), "broke in the middle"),
        (Script(pieces=2, ending=Ending.RESET), "broke in the middle"),
        (Script(pieces=2, ending=Ending.HANG), "silent for 0.3 s"),
        (Script(pieces=2, ending=Ending.PINGS), "silent for 0.3 s"),
        (Script(raw={2: b"data: junk\n\n"}), 'can\'t be read: "junk"'),
        (Script(raw={2: b'data: {"choices": 5, "tokens": 5}\n\n'}), "can't be read"),
        (Script(raw={2: b'data: {"error": {"message": "it burns", "code": 500}}\n\n'}), "it burns"),
        (Script(raw={2: b'error: {"message": "it burns"}\n\n'}), "it burns"),
        (Script(raw={2: b"data: " + b"x" * (MAX_EVENT_BYTES + 1)}), "more than 1048576 bytes"),
    ],
)
def test_streams_that_break(server: ScriptedServer, script: Script, words: str) -> None:
    pieces: list[Piece] = []
    server.script(script)
    with pytest.raises(UpstreamBroken, match=words):
        ask(server, pieces=pieces, silence_s=SILENCE_S)
    assert [piece.text for piece in pieces] == expected_pieces(PROMPT, 2)


def test_refusal_in_the_stream(server: ScriptedServer) -> None:
    server.script(Script(raw={0: b'data: {"error": {"message": "the context is exceeded", "code": 400}}\n\n'}))
    with pytest.raises(UpstreamRefused, match=r"^the context is exceeded$"):
        ask(server)


def test_no_head_is_silence(server: ScriptedServer) -> None:
    server.script(Script(before_head=Ending.HANG))
    with pytest.raises(UpstreamBroken, match=r"silent for 0\.3 s"):
        ask(server, silence_s=SILENCE_S)


def test_pieces_prolong_the_silence(server: ScriptedServer) -> None:
    server.script(Script(token_us=100_000))  # five of them take longer than the silence that is allowed
    assert ask(server, silence_s=SILENCE_S).finish.reason == "length"


@pytest.mark.parametrize("ending", [Ending.FINISH_AND_HANG, Ending.FINISH_AND_PINGS])
def test_after_the_finish_reason_the_wait_is_short(server: ScriptedServer, ending: Ending) -> None:
    server.script(Script(ending=ending))
    began = time.monotonic()
    assert ask(server).finish[:2] == ("length", Usage(-1, -1))
    assert time.monotonic() - began < 5  # 1 s, and what a slow machine adds; the silence allowed is 10 s


@pytest.mark.parametrize("after", [b"data: junk\n\n", b'data: {"error": "late"}\n\n'])
def test_fault_after_the_finish_reason_is_none(after: bytes) -> None:
    finish = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
    with ScriptedServer(OPENAI) as server:
        server.script(Script(pieces=2, raw={2: finish + after}, ending=Ending.CLOSE))
        asked = ask(server)
    assert asked.finish[:2] == ("stop", Usage(-1, -1))
    assert [piece.text for piece in asked.pieces] == expected_pieces(PROMPT, 2)


def test_server_that_is_killed_and_comes_back(server: ScriptedServer) -> None:
    server.script(Script(pieces=2, ending=Ending.HANG))
    server.decide = lambda recorded: Script()
    pieces: list[Piece] = []
    with pytest.raises(UpstreamBroken, match=r"silent"):
        ask(server, pieces=pieces, silence_s=SILENCE_S)
    server.kill()
    with pytest.raises(UpstreamAway, match=r"Connection refused"):
        ask(server)
    server.start()
    assert ask(server).text == "".join(expected_pieces(PROMPT, 5))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_what_this_side_lacks_is_not_the_servers_being_away(number: int) -> None:
    key = aiohttp.client_reqrep.ConnectionKey("host", 80, False, True, None, None, None)  # noqa: FBT003
    problem = problem_before_head(aiohttp.ClientConnectorError(key, OSError(number, "")), "http://host/v1")
    assert type(problem) is UpstreamBroken
    assert os.strerror(number) in problem.message
    assert "ulimit" in problem.message


SAYING_KEYS = {
    "a refusal": refusal(400, "key secret-key-1 may not do this"),
    "a wrong setting": refusal(403, "key secret-key-1 is not known"),
    "a fault": refusal(500, "secret-key-1"),
    "an event": Script(pieces=0, raw={0: b'data: {"error": {"message": "secret-key-1"}}\n\n'}),
    "a malformed event": Script(pieces=0, raw={0: b"data: secret-key-1\n\n"}),
}


@pytest.mark.parametrize("answer", SAYING_KEYS)
def test_no_message_repeats_the_key(answer: str, server: ScriptedServer) -> None:
    server.script(SAYING_KEYS[answer])
    with pytest.raises(UpstreamProblem) as caught:
        ask(server, api_key="secret-key-1")
    assert "***" in caught.value.message
    assert "secret-key-1" not in caught.value.message
    assert "secret-key-1" not in str(caught.value)


@pytest.mark.parametrize("key", ["s", "data", "id", "w", "text"])
def test_what_is_no_message_is_read_as_it_is(key: str, server: ScriptedServer) -> None:
    server.api_key = key
    asked = ask(server, api_key=key)
    assert asked.text == "".join(expected_pieces(PROMPT, 5))
    assert server.requests[0].fields.get("model", "scripted") == "scripted"
