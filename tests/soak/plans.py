"""What a client asks and what it does then, drawn from a seed: the same for the same seed, however the run goes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

MAX_MODEL_LEN = 2_048
KV_BLOCKS = 320
KV_BLOCK_SIZE = 16

READ, LEAVE, STALL = "read", "leave", "stall"
WAYS = ("close", "reset", "half-close")

REFUSED = frozenset({400, 404, 405, 408, 413, 431, 501, 505})
"""What a request that nobody could answer may get; the server may also close without a word."""


@dataclass(frozen=True)
class Plan:
    """One request, and what becomes of its client.

    Args:
        body: of a valid request; None for one that is not.
        payload: what is sent, head included.
        conduct: READ to the end; LEAVE or STALL after `after_bytes` of the answer, or LEAVE after `after_s`.
        way: how a client leaves.
        stall_s: how long a stalled reader does not read; `resumes` says whether it reads on then.
        reuses: whether it takes the connection of the request before, if that is still open.
    """

    body: dict[str, Any] | None
    payload: bytes
    conduct: str = READ
    way: str = "close"
    after_bytes: int | None = None
    after_s: float | None = None
    stall_s: float = 0.0
    resumes: bool = True
    reuses: bool = False

    @property
    def may_time_out(self) -> bool:
        """Whether the request itself has a time-out."""
        return self.body is not None and "timeout_s" in self.body


class Planner:
    """Draws the plans of one user, one after the other."""

    def __init__(self, seed: int, user: int) -> None:
        shared = Random(f"{seed} prefixes")
        self._prefixes = [[shared.randrange(2**31) for _ in range(160)] for _ in range(6)]
        self._random = Random(f"{seed} user {user}")

    def pause_s(self) -> float:
        """How long the user waits before the next request."""
        return self._random.expovariate(1 / 0.05)

    def draw(self) -> Plan:
        """The next plan."""
        kind = self._random.choices(("ask", "stall", "nonsense"), (86, 8, 6))[0]
        if kind == "nonsense":
            return self._nonsense()
        return self._stalled() if kind == "stall" else self._asked()

    def _asked(self) -> Plan:
        random = self._random
        body = self._body(most_tokens=random.choice((20, 60, 120, 120, 400)), n=random.choice((1, 1, 1, 1, 2, 3, 4)))
        payload = request_bytes(body)
        if random.random() < 0.72:
            return Plan(body, payload, reuses=random.random() < 0.5)
        way = random.choice(WAYS)
        if random.random() < 0.5:
            return Plan(body, payload, LEAVE, way, after_s=random.uniform(0, 0.6))
        return Plan(body, payload, LEAVE, way, after_bytes=int(random.expovariate(1 / 2_000)))

    def _stalled(self) -> Plan:
        """More of an answer than the sockets hold, so that the worker's write waits."""
        random = self._random
        body = self._body(most_tokens=600, n=4) | {"details": True, "max_new_tokens": random.randrange(300, 600)}
        body.pop("timeout_s", None)
        return Plan(
            body,
            request_bytes(body),
            STALL,
            random.choice(WAYS),
            after_bytes=random.randrange(1, 4_000),
            stall_s=random.uniform(0.2, 3.0),
            resumes=random.random() < 0.7,
        )

    def _body(self, most_tokens: int, n: int) -> dict[str, Any]:
        random = self._random
        body: dict[str, Any] = {"max_new_tokens": random.randint(1, most_tokens), "seed": random.getrandbits(63)}
        kind = random.random()
        if kind < 0.2:
            body["prompt_tokens"] = random.randint(1, 300)
        else:
            prefix = random.choice(self._prefixes)[: random.randint(1, 160)]
            own = random.choice((0, 5, 20, 20, 200))
            body["prompt_token_ids"] = prefix + [random.randrange(2**31) for _ in range(random.randint(0, own))]
        extras = (
            ("n", 1.0 if n > 1 else 0.1, n),
            ("details", 0.7, True),
            ("priority", 0.5, random.randint(-8, 7)),
            ("cache_salt", 0.15, f"tenant {random.randrange(3)}"),
            ("ignore_eos", 0.1, True),
            ("timeout_s", 0.06, round(random.uniform(0.05, 1.0), 3)),
        )
        return body | {name: value for name, share, value in extras if random.random() < share}

    def _nonsense(self) -> Plan:
        """What no server can answer as it was meant, and requests that never become whole."""
        random = self._random
        good = {"prompt_tokens": 4, "max_new_tokens": 4}
        whole = request_bytes(good)
        payload = random.choice(
            (
                request_bytes(good | {"n": random.choice((0, -1, 129, "two", 1.5, True))}),
                request_bytes(good | {"prompt_tokens": random.choice((0, -5, MAX_MODEL_LEN, 10**30, "ten"))}),
                request_bytes(good | {"prompt_token_ids": [1, 2]}),
                request_bytes(good | {"priority": random.choice((-9, 8, "high"))}),
                request_bytes(good | {"max_new_tokens": 10**6}),
                request_bytes({}),
                request_bytes(b"{" * random.randint(1, 5_000)),
                request_bytes(random.randbytes(random.randint(1, 300))),
                request_bytes(good, path="/nowhere"),
                b"GET /generate HTTP/1.1\r\nHost: soak\r\n\r\n",
                b"POST /generate HTTP/1.1\r\nHost: soak\r\nContent-Length: 99999999999\r\n\r\n",
                b"POST /generate HTTP/1.1\r\nHost: soak\r\nContent-Length: -1\r\n\r\n",
                random.randbytes(random.randint(4, 400)).replace(b"\n", b"") + b"\r\n\r\n",
                whole[: random.randrange(1, len(whole))],
            )
        )
        return Plan(None, payload, LEAVE, random.choice(WAYS), after_s=random.uniform(0, 0.5))


def request_bytes(body: dict[str, Any] | bytes, path: str = "/generate") -> bytes:
    """A POST as it goes over the wire."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload
