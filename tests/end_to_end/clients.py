"""Clients that keep a connection, and that say what became of each request."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.server import wait_until

TIMEOUT_S = 60


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Of an error's answer."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error

    @property
    def announces_close(self) -> bool:
        """Whether the connection ends with it."""
        return self.headers.get("connection", "").lower() == "close"


class Kept:
    """One connection for many requests. It does not connect anew by itself."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._connection.auto_open = 0
        self._connection.connect()

    def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """One request, and all of its answer."""
        self._connection.request(method, path, json.dumps(body) if body is not None else None)
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())

    def assert_closed(self) -> None:
        """The server has hung up."""
        assert self._connection.sock is None or self._connection.sock.recv(1) == b""

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def fetch(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
    """One request on a connection of its own."""
    kept = Kept(port)
    try:
        return kept.fetch(method, path, body)
    finally:
        kept.close()


@dataclass
class Crowd:
    """What many clients have met that ask one request after another."""

    answers: list[Answer] = field(default_factory=list)
    problems: list[BaseException] = field(default_factory=list)
    is_over: bool = False

    def wait_for(self, more: int) -> None:
        """Until so many more requests were answered, or one went wrong."""
        count = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= count or self.problems, f"{more} more answers", 60)


@contextmanager
def crowd(port: int, body: dict[str, Any], *, clients: int, keeps: bool) -> Iterator[Crowd]:
    """Clients, each on a thread, that ask until the end. With `keeps` each holds on to a connection while it may."""
    found = Crowd()

    def ask() -> None:
        kept: Kept | None = None
        try:
            while not found.is_over:
                if kept is None:
                    kept = Kept(port)
                answer = kept.fetch("POST", "/generate", body)
                found.answers.append(answer)
                if answer.announces_close or not keeps:
                    kept.close()
                    kept = None
        except Exception as problem:  # the test's to judge
            found.problems.append(problem)
        finally:
            if kept is not None:
                kept.close()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        found.is_over = True
        for thread in threads:
            thread.join()
