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
    """For `in_private_mounts`: make directories that stand below a private one (such as /root) open to all users."""
    closed = {
        str(parent) for path in paths for parent in Path(path).parents if not parent.stat().st_mode & stat.S_IXOTH
    }
    outermost = [path for path in closed if not any(str(parent) in closed for parent in Path(path).parents)]
    steps = ["mount -t tmpfs tmpfs /mnt"]
    steps += [f"mkdir /mnt/{k} && mount --rbind {path} /mnt/{k}" for k, path in enumerate(paths)]
    steps += [f"mount -t tmpfs -o mode=755 tmpfs {path}" for path in outermost]
    steps += [f"mkdir -p {path} && mount --rbind /mnt/{k} {path}" for k, path in enumerate(paths)]
    return " && ".join(steps)


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
