"""A server that starts under other circumstances than the test's own: another environment, limits, user, mounts."""

from __future__ import annotations

import contextlib
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import server as server_module
from tests.end_to_end.server import Server, command, running

Words = Sequence[str]
Environment = Mapping[str, str | None]

NOBODY = 65534
START_S = 400.0  # it may have to compile all kernels beside other tests


def changed_command(
    prefix: Words, environment: Environment, form: str, options: dict[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """A start behind `prefix`, with variables set, or removed where the value is None."""
    words, environ = command(form, options)
    found = {**environ, **environment}
    return [*prefix, *words], {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def running_under(prefix: Words, environment: Environment, form: str = "serve", **options: Any) -> Iterator[Server]:
    """As `running`; `prefix` must replace itself by the server (exec)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "START_S", START_S)
        patch.setattr(
            server_module, "command", lambda form, options: changed_command(prefix, environment, form, options)
        )
        with running(form, **options) as server:
            yield server


def in_shell(script: str) -> list[str]:
    """A prefix: what the shell does before it becomes the server."""
    return ["sh", "-c", f'{script} && exec "$@"', "sh"]


def within_everybodys_reach(*paths: str) -> str:
    """For `in_private_mounts`: make directories open to all users that are private, or stand below one (as /root)."""
    parts = [part for path in map(Path, paths) for part in ([path] if is_open(path) else sorted(path.iterdir()))]
    closed = {parent for part in parts for parent in part.parents if not is_open(parent)}
    outermost = [path for path in closed if not closed.intersection(path.parents)]
    steps = ["mount -t tmpfs tmpfs /mnt"]
    steps += [f"{made_like(part, f'/mnt/{k}')} && mount --rbind {part} /mnt/{k}" for k, part in enumerate(parts)]
    steps += [f"mount -t tmpfs -o mode=755 tmpfs {path}" for path in outermost]
    steps += [f"{made_like(part, str(part))} && mount --rbind /mnt/{k} {part}" for k, part in enumerate(parts)]
    return " && ".join(steps)


def is_open(path: Path) -> bool:
    """Whether all users may look into a directory."""
    return bool(path.stat().st_mode & stat.S_IXOTH)


def made_like(part: Path, place: str) -> str:
    """A command: make an empty file or directory to mount this one on."""
    return f"mkdir -p {place}" if part.is_dir() else f"mkdir -p $(dirname {place}) && touch {place}"


def in_private_mounts(script: str) -> list[str]:
    """A prefix: the same, with mounts that nobody else sees. Skips the test where these are not allowed."""
    prefix = ["unshare", "--mount", "--propagation", "private"]
    done = subprocess.run(
        [*prefix, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    return [*prefix, *in_shell(script)]


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])
