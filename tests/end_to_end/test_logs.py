"""What a whole server logs: one event one line from every process, with request ids, and without the requests."""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.changed_start import running_under
from tests.end_to_end.server import FORMS, RawStream, Server, plain_body, run_to_end, running, wait_until

pytestmark = pytest.mark.end_to_end

MARKER = "UNMISTAKABLE4711"
MARKED_IDS = [471_147_114, 471_147_115, 471_147_116]
EVENT_FIELDS = ["ts", "level", "logger", "pid", "message"]
TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z [A-Z]+ [a-z_.]+\[\d+\]: .*")
MAX_BODY_BYTES = 65_536


def ask(server: Server, body: bytes, request_id: str, path: str = "/generate") -> tuple[int, bytes]:
    """A POST; the answer must bring the id back."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, body, {"X-Request-Id": request_id})
        answer = connection.getresponse()
        assert answer.headers.get_all("X-Request-Id") == [request_id]
        return answer.status, answer.read()
    finally:
        connection.close()


def provoke(server: Server) -> None:
    """A stream, and each way to be refused, all of them with the marker in them; then a death of each kind."""
    marked = json.dumps({"prompt_token_ids": MARKED_IDS, "max_new_tokens": 5, "cache_salt": MARKER, "junk": MARKER})
    assert ask(server, marked.encode(), "id-stream") == (200, plain_body(5))
    refused = {
        "id-malformed": b'{"prompt": "%b"' % MARKER.encode(),
        "id-encoding": f'{{"prompt": "{MARKER}"}}'.encode("utf-16"),
        "id-type": json.dumps({"prompt_tokens": MARKER}).encode(),
        "id-salt": json.dumps({"prompt_tokens": 1, "cache_salt": MARKER * 100}).encode(),
        "id-surrogate": b'{"prompt_tokens": 1, "cache_salt": "%b\\ud800"}' % MARKER.encode(),
        "id-ids": json.dumps({"prompt_token_ids": [MARKED_IDS[0], -1]}).encode(),
        "id-nested": b"[" * 20_000 + MARKER.encode(),
    }
    for request_id, body in refused.items():
        status, answer = ask(server, body, request_id)
        assert (request_id, status) == (request_id, 400)
        assert json.loads(answer)["error"]["type"] == "invalid_request"
    assert ask(server, MARKER.encode() * (MAX_BODY_BYTES // 8), "id-oversize")[0] == 413
    assert ask(server, MARKER.encode(), "id-query", f"/nowhere?prompt={MARKER}")[0] == 404
    server.scheduler().kill()
    assert ask(server, marked.encode(), "id-after")[0] == 200
    old = {process.pid for process in server.processes("web worker")}
    server.processes("web worker")[0].kill()
    wait_until(lambda: len({p.pid for p in server.processes("web worker")} - old) == 1, "a new worker", 60)
    wait_until(server.is_healthy, "health", 60)
    server.process.send_signal(signal.SIGUSR2)
    # Of two signals that are pending at once the kernel lets the later one's handler run first.
    wait_until(lambda: any("USR2 is refused" in line for line in list(server.output)), "the refusal")


def lines_of(server: Server) -> list[str]:
    """All that it has said; it has been told to stop."""
    server.process.wait(60)
    return [line.rstrip("\n") for line in server.output]


@pytest.fixture(scope="module", params=FORMS)
def json_events(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every line of a server's life at log level debug."""
    options = {"log_format": "json", "log_level": "debug", "max_body_bytes": MAX_BODY_BYTES}
    with running(request.param, **options) as server:
        provoke(server)
        assert server.stop() == 0
        lines = lines_of(server)
        for line in lines:
            assert line.startswith("{"), f"{line!r} is no event"
    return [json.loads(line) for line in lines]


def test_every_line_of_every_process_is_an_event(json_events: list[dict[str, Any]]) -> None:
    for event in json_events:
        assert list(event)[: len(EVENT_FIELDS)] == EVENT_FIELDS
        assert event["level"] in {"debug", "info", "warning", "error", "critical"}
        assert type(event["pid"]) is int
    loggers = {event["logger"] for event in json_events}
    assert {"gunicorn.error", "ironbatch.web", "ironbatch.supervisor"} <= loggers
    said = "\n".join(event["message"] for event in json_events)
    for expected in ("Booting worker", "the scheduler ended with signal SIGKILL", "USR2 is refused", "SIGKILL"):
        assert expected in said
    assert not [event for event in json_events if "exception" in event]


def test_no_event_holds_anything_of_a_request(json_events: list[dict[str, Any]]) -> None:
    everything = json.dumps(json_events)
    assert MARKER not in everything
    assert not [token for token in MARKED_IDS if str(token) in everything]


def test_lines_about_a_request_carry_its_id(json_events: list[dict[str, Any]]) -> None:
    told = {event["request_id"]: event["message"] for event in json_events if "request_id" in event}
    assert told["id-stream"] == "POST /generate: 200"
    assert told["id-malformed"] == told["id-surrogate"] == "POST /generate: 400"
    assert told["id-oversize"] == "POST /generate: 413"
    assert told["id-query"] == "POST /nowhere: 404"


@pytest.mark.parametrize("form", FORMS)
def test_text_lines_and_a_client_that_would_forge_one(form: str) -> None:
    forged = "2026-01-01T00:00:00.000000Z CRITICAL ironbatch.supervisor[1]: forged"
    quoted = "".join(f"%{byte:02x}" for byte in f"\r\n{forged}\n\u2028\x85\x1b[2J".encode())
    with running_under([], {"GUNICORN_CMD_ARGS": "--access-logfile=-"}, form, log_level="debug") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        bad = f"a {forged}"
        connection.request(
            "GET", f"/x{quoted}", headers={"X-Request-Id": bad, "User-Agent": "a\tb\xe9", "Referer": forged}
        )
        answer = connection.getresponse()
        assert answer.status == 404
        answer.read()
        made = answer.headers["X-Request-Id"]
        assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", made), "theirs is not fit for a log"
        connection.close()
        wait_until(lambda: f"request_id={made}" in "".join(server.output), "the line about it")
        assert server.stop() == 0
        lines = lines_of(server)
    access = [line for line in lines if line.startswith("127.0.0.1 - - [")]
    assert bool(access) == (form == "gunicorn")  # `serve` takes no settings of gunicorn's
    assert all(line.isprintable() for line in access)
    serving = [line for line in lines if line.startswith("ironbatch: serving on ")]
    for line in set(lines) - set(access) - set(serving):
        assert TEXT_LINE.fullmatch(line), repr(line)
        assert not line.startswith(forged)
        assert line.isprintable()
    assert any("forged" in line for line in lines), "the control: the path is logged at debug"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["/generate", "/health", "/metrics"])
def test_a_client_without_an_id_gets_one(form: str, path: str, servers: dict[str, Server]) -> None:
    server = servers[form]
    found = []
    for _ in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = b'{"prompt_tokens": 1, "max_new_tokens": 2}' if path == "/generate" else None
        connection.request("POST" if body else "GET", path, body)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        found += answer.headers.get_all("X-Request-Id") or []
        connection.close()
    assert len(set(found)) == 4


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with running("serve", workers=1) as serve, running("gunicorn", workers=1) as gunicorn:
        yield {"serve": serve, "gunicorn": gunicorn}


def test_ids_of_two_streams_on_one_connection(servers: dict[str, Server]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", servers["serve"].port, timeout=60)
    for request_id in ("first", "second", "third"):
        connection.request("POST", "/generate", b'{"prompt_tokens": 1}', {"X-Request-Id": request_id})
        answer = connection.getresponse()
        assert answer.headers["X-Request-Id"] == request_id
        assert answer.read() == plain_body(16)
    connection.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_start_that_fails_says_so_in_json(form: str) -> None:
    code, output = run_to_end(form, log_format="json", addr="192.0.2.1:0")
    assert code not in (0, None)
    events = [json.loads(line) for line in output.splitlines()]
    assert any("192.0.2.1" in event["message"] and event["level"] == "error" for event in events)


def test_a_stream_that_is_cut_off_is_no_traceback(servers: dict[str, Server]) -> None:
    server = servers["gunicorn"]
    stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 8000})
    stream.read_chunk()
    stream.close()
    server.wait_idle()
    assert "Traceback" not in "".join(server.output)
