"""The socket that a server listens on, and its address as a client writes it."""

from __future__ import annotations

import errno
import os
import resource
import socket

from ironbatch.config import Config
from ironbatch.errors import StartError

LISTEN_BACKLOG = 2048

OWN_DESCRIPTORS = 40
"""What a web worker has open beside its connections: libraries, the event loop, doorbells, the listening socket."""

_BIND_REMEDIES = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another port with --addr",
    errno.EACCES: "ports below 1024 need privileges: choose another port with --addr",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address: use one that has, or :PORT for all",
}


def bind_listener(config: Config) -> socket.socket:
    """The listening socket. Raises StartError in one line that says why not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        raise StartError(f"cannot listen on {config.addr}: {problem.strerror}; check the host in --addr") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as problem:
        listener.close()
        remedy = _BIND_REMEDIES.get(problem.errno or 0, "choose another with --addr")
        raise StartError(f"cannot listen on {config.addr}: {os.strerror(problem.errno or 0)}; {remedy}") from None
    return listener


def few_descriptors_problem(config: Config) -> str | None:
    """Whether the limit of open files lets the workers hold as many connections as the engine has places.

    Beyond the limit a connection is accepted and closed at once, so this is a warning.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OWN_DESCRIPTORS + config.num_lanes - (-config.num_slots // config.workers)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return None
    return (
        f"the limit of open files is {limit}, and a web worker needs {wanted} to hold its share of the engine's"
        f" {config.num_slots} places; connections beyond the limit are closed at once: raise it (ulimit -n,"
        " LimitNOFILE=), or lower --max-queued-requests or --max-running-seqs"
    )


def url_of(config: Config, listener: socket.socket) -> str:
    """Such as http://127.0.0.1:8080; the port is the one that was found, where any free one was asked for."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
