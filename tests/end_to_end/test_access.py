"""Nobody but its owner reaches into an engine: another user's process tries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.changed_start import NOBODY
from tests.end_to_end.server import FORMS, Server, running

pytestmark = pytest.mark.end_to_end

TRY = """
import json, os, sys
user, found = int(sys.argv[2]), {}
if user != os.geteuid():  # now, for this interpreter may stand where the other can't start it
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for path in json.loads(sys.argv[1]):
    for name, flags in (("read", os.O_RDONLY), ("write", os.O_RDWR)):
        try:
            os.close(os.open(path, flags))
            found[f"{name} {path}"] = "opened"
        except OSError as problem:
            found[f"{name} {path}"] = type(problem).__name__
    try:
        os.listdir(path)
        found[f"list {path}"] = "listed"
    except OSError as problem:
        found[f"list {path}"] = type(problem).__name__
print(json.dumps(found))
"""


def tried(paths: list[str], user: int) -> dict[str, str]:
    """What becomes of opening each path for reading and writing, and of listing it, by `user`."""
    words = [sys.executable, "-I", "-c", TRY, json.dumps(paths), str(user)]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=60, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def inside(server: Server) -> list[str]:
    """The segment, every descriptor of every process but the standard streams, and the compiled kernels."""
    server.remember_family()
    paths = [f"/dev/shm/{server.segment}"]
    for process in server.family:
        folder = Path(f"/proc/{process.pid}/fd")
        paths += [str(path) for path in folder.iterdir() if int(path.name) > 2]
        paths.append(f"/proc/{process.pid}/mem")
    kernels = [path for path in cache().glob("kernels-*") if path.is_dir()]
    assert kernels
    return [*paths, *map(str, kernels)]


def cache() -> Path:
    base = os.environ.get("IRONBATCH_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ironbatch"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("form", FORMS)
def test_another_user_opens_nothing(form: str) -> None:
    with running(form) as server:
        paths = inside(server)
        others = tried(paths, NOBODY)
        assert not {what: result for what, result in others.items() if result in {"opened", "listed"}}
        assert others[f"write /dev/shm/{server.segment}"] == "PermissionError"
        mine = tried(paths, os.geteuid())
        assert mine[f"write /dev/shm/{server.segment}"] == "opened", "the control"
        assert "listed" in mine.values()


@pytest.mark.parametrize("form", FORMS)
def test_the_segments_mode_is_its_owners_whatever_the_umask(form: str) -> None:
    before = os.umask(0)
    try:
        with running(form, workers=1) as server:
            found = os.stat(f"/dev/shm/{server.segment}")
            assert (found.st_mode & 0o777, found.st_uid) == (0o600, os.geteuid())
    finally:
        os.umask(before)


@pytest.mark.parametrize("form", FORMS)
def test_it_listens_on_its_address_alone(form: str) -> None:
    """No control socket, no socket with a name in the file system."""
    with running(form) as server:
        server.remember_family()
        for process in server.family:
            for connection in process.net_connections(kind="all"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.port == server.port
                else:
                    assert not (isinstance(connection.laddr, str) and connection.laddr.startswith("/")), connection
