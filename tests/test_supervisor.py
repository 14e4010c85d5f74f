"""What the supervisor says when it cannot start."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ironbatch.config import Config
from ironbatch.errors import ConfigError, StartError
from ironbatch.listener import bind_listener, url_of
from tests.shm.descriptors import open_descriptors

ROOT = Path(__file__).parents[1]


def refused(addr: str) -> str:
    """Binding fails with one line that names the address; nothing stays open."""
    before = open_descriptors()
    with pytest.raises(StartError) as caught:
        bind_listener(Config(addr=addr))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot listen on {addr}: ")
    assert "; " in message, "what to do about it"
    assert open_descriptors() == before
    return message


@pytest.mark.parametrize("addr", ["127.0.0.1:0", ":0", "0.0.0.0:0", "localhost:0"])
def test_any_free_port(addr: str) -> None:
    with bind_listener(Config(addr=addr)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with socket.create_connection(("127.0.0.1" if "localhost" not in addr else "localhost", port), timeout=10):
            peer, _ = listener.accept()
            peer.close()


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as problem:
        pytest.skip(f"no IPv6 here: {problem}")
    with bind_listener(Config(addr="[::1]:0")) as listener:
        assert listener.family == socket.AF_INET6
        assert url_of(Config(addr="[::1]:0"), listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        message = refused(f"127.0.0.1:{taken.getsockname()[1]}")
    assert "Address already in use" in message
    assert "another process listens there" in message


def test_a_port_is_free_again_right_after_its_server() -> None:
    with bind_listener(Config(addr="127.0.0.1:0")) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=10)
        peer, _ = listener.accept()
        peer.close()  # the server closes first: its side lingers in TIME_WAIT
    client.close()
    bind_listener(Config(addr=f"127.0.0.1:{port}")).close()


def test_an_address_of_another_machine() -> None:
    message = refused("192.0.2.1:0")  # TEST-NET-1, RFC 5737
    assert "no interface of this machine has that address" in message


def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)  # without the network's time-out
    message = refused("no-such-host.invalid:80")
    assert message.endswith("Name or service not known; check the host in --addr")


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "ports below 1024 need privileges"), (errno.EINVAL, "choose another")]
)
def test_what_else_bind_may_say(monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refusing)
    message = refused("127.0.0.1:80")
    assert os.strerror(number) in message
    assert remedy in message


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "x" * 64 + ".example", "-", "_", "a.-b", "x.", "xn--0", "xn--a"])
def test_a_host_that_cannot_be_a_name_is_refused_by_the_configuration_or_here(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's IDNA encoding of a bad label raises UnicodeError, which is no OSError."""
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    with pytest.raises((ConfigError, StartError)) as caught:
        bind_listener(Config(addr=f"{host}:80"))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ConfigError) or host not in UNENCODABLE


UNENCODABLE = ("a..b", "x" * 64, "x" * 64 + ".example")


def unknown_host(*arguments: Any, **options: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def run_engine(**environ: str) -> subprocess.CompletedProcess[str]:
    """The supervisor without the web role, as gunicorn starts it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("IRONBATCH_")}
    return subprocess.run(
        [sys.executable, "-m", "ironbatch.supervisor"],
        cwd=ROOT,
        env=clean | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_engine_without_a_gunicorn_that_made_one() -> None:
    ran = run_engine()
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.startswith("ironbatch: error: no engine: start with `ironbatch serve`")
    assert ran.stderr.count("\n") == 1


def test_the_engine_with_a_bad_configuration_names_all_that_is_wrong() -> None:
    ran = run_engine(IRONBATCH_KV_BLOCK_SIZE="3", IRONBATCH_WORKERS="0")
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("ironbatch: error: ") for line in lines)
    assert {"IRONBATCH_KV_BLOCK_SIZE", "IRONBATCH_WORKERS"} == {line.split(": ")[2] for line in lines}
