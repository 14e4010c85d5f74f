"""The plug-in of docs/backends.md, installed as it stands there, serves what the requests alone determine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from tests.end_to_end.server import Server, generate_all, run_to_end, running, wait_until, without_stats

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "backends.md"
MOST_LINES = 40
BUILDS_WHEELS = Version("70.1")  # the first setuptools that needs no package `wheel`

OPTIONS = {
    "backend": "pagehash",
    "total_kv_blocks": 64,  # 1,024 positions
    "max_batch_tokens": 96,  # longer prompts come in chunks
    "seed": 77,
}


def files() -> dict[str, str]:
    """The plug-in's files: each is announced by its name in backquotes and a colon."""
    found = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["pagehash.py", "pyproject.toml"]
    return dict(found)


def install(source: Path, target: Path) -> None:
    """Install the project in `source` into the folder `target`, without a network."""
    if importlib.util.find_spec("pip") and builds_wheels():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        done = subprocess.run(
            [*pip, *offline, f"--target={target}", str(source)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (target / "pagehash.py").write_text((source / "pagehash.py").read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, entries in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in entries.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def builds_wheels() -> bool:
    try:
        return Version(version("setuptools")) >= BUILDS_WHEELS
    except PackageNotFoundError:
        return False


def on_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let child processes find what is installed in `folder`."""
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A whole server on the plug-in; the end of this fixture is the end of the server."""
    folder = tmp_path_factory.mktemp("plug-in")
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    for name, text in files().items():
        (source / name).write_text(text)
    install(source, target)
    with pytest.MonkeyPatch.context() as patch:
        on_path(patch, target)
        with running("serve", **OPTIONS) as server:
            yield server
            assert server.stop() == 0
            server.assert_nothing_left()
            assert "Traceback" not in "".join(server.output)


def expected_lines(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer to a request, from the request alone."""
    context = list(body.get("prompt_token_ids") or [0] * body["prompt_tokens"])
    seed = body.get("seed", OPTIONS["seed"])
    lines: list[dict[str, Any]] = []
    for index in range(body["max_new_tokens"]):
        data = np.array(context, "<i4").tobytes()
        digest = hashlib.blake2b(data, digest_size=4, key=seed.to_bytes(8, "little")).digest()
        context.append(int.from_bytes(digest, "little") % 32_000)
        lines.append({"token_index": index, "token_id": context[-1], "done": False})
    lines[-1] |= {"done": True, "finish_reason": "length"}
    return lines


def parsed(answer: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in without_stats(answer).splitlines()]


def test_it_is_as_short_as_we_say() -> None:
    assert sum(len(text.splitlines()) for text in files().values()) < MOST_LINES


def test_one_request(server: Server) -> None:
    body = {"prompt_token_ids": [1, 2, 3], "max_new_tokens": 8, "details": True}
    (answer,) = generate_all(server.port, [body])
    assert parsed(answer) == expected_lines(body)


def test_many_at_once_under_preemption(server: Server) -> None:
    rng = np.random.default_rng(5)
    bodies: list[dict[str, Any]] = []
    for k in range(32):
        length = int(rng.integers(1, 200))
        prompt: dict[str, Any] = {"prompt_tokens": length}
        if k % 2:
            prompt = {"prompt_token_ids": rng.integers(0, 2**31, length).tolist(), "seed": int(rng.integers(2**62))}
        bodies.append(prompt | {"max_new_tokens": int(rng.integers(1, 200)), "details": True})
    before = server.metrics()["preemptions"]
    answers = generate_all(server.port, bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert parsed(answer) == expected_lines(body)
    assert server.wait_idle()["preemptions"] > before  # or the pool was no bottleneck


def test_streams_survive_the_death_of_their_scheduler(server: Server) -> None:
    bodies = [{"prompt_tokens": 20 + k, "max_new_tokens": 900, "seed": k, "details": True} for k in range(6)]
    before, doomed = server.scheduler_tokens(), server.scheduler()
    answers: list[bytes] = []
    client = threading.Thread(target=lambda: answers.extend(generate_all(server.port, bodies)))
    client.start()
    try:
        wait_until(lambda: server.scheduler_tokens() > before, "the first tokens")
        doomed.kill()
        at_death = server.scheduler_tokens() - before
    finally:
        client.join()
    assert at_death < 6 * 900, "all streams had ended before the scheduler died"
    assert server.scheduler().pid != doomed.pid
    assert [parsed(answer) for answer in answers] == [expected_lines(body) for body in bodies]
    server.wait_idle()


@pytest.mark.parametrize("method", ["__init__", "start"])
def test_plug_in_that_cannot_start_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    source = files()["pagehash.py"].replace(f"def {method}(", f"def {method}(self, *_):\n        1 / 0\n\n    def _(")
    (tmp_path / "pagehash.py").write_text(source)
    (tmp_path / "pyproject.toml").write_text(files()["pyproject.toml"])
    install(tmp_path, tmp_path / "installed")
    on_path(monkeypatch, tmp_path / "installed")
    code, output = run_to_end("serve", backend="pagehash")
    print(output)
    assert code == 1
    assert "ZeroDivisionError" in output
    assert "serving on" not in output
