"""aiohttp's exceptions as problems, by whether a byte of the answer had come."""

import errno
import os
from typing import Final

import aiohttp

from ironbatch.upstream.answers import shown
from ironbatch.upstream.problems import UpstreamAway, UpstreamBroken, UpstreamMisset, UpstreamProblem

NETWORK_FAULTS: Final = (aiohttp.ClientError, OSError)
"""What aiohttp raises for the network's or the server's sake. TimeoutError is an OSError: catch it before."""

CONNECTION_LOST: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
"""Of a connection that was there and is gone, or that never was."""

OWN_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Why a connection fails on this side, whatever the server is like."""


def problem_before_head(error: Exception, url: str) -> UpstreamProblem:
    """Why no answer has begun."""
    where = f"the model server at {shown(url)}"
    if isinstance(error, aiohttp.ClientSSLError):
        return UpstreamMisset(
            f"no safe connection to {where}: {_reason(error)}; correct the scheme or the host of --backend-url, or"
            " have its certificate signed by an authority that this machine trusts (SSL_CERT_FILE)"
        )
    if isinstance(error, aiohttp.ServerTimeoutError):
        return UpstreamAway(f"no connection to {where}: it did not accept one in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return _no_connection(error, where)
    if isinstance(error, CONNECTION_LOST):
        # It was there. Whether it still is, the next try will tell; and this one may be why it went.
        return UpstreamBroken(f"the model server closed the connection before it answered: {_reason(error)}")
    if isinstance(error, aiohttp.InvalidURL):
        return UpstreamMisset(f"{shown(url)} can't be asked: {_reason(error)}; correct --backend-url")
    return UpstreamBroken(f"the model server gave no proper HTTP answer ({type(error).__name__})")


def _no_connection(error: aiohttp.ClientConnectorError, where: str) -> UpstreamProblem:
    if error.os_error.errno in OWN_LIMITS:
        return UpstreamBroken(f"this engine can't connect to the model server: {_reason(error)}; see `ulimit -n`")
    return UpstreamAway(f"no connection to {where}: {_reason(error)}")


def problem_in_stream(error: Exception) -> UpstreamProblem:
    """Why an answer that had begun will not end."""
    return UpstreamBroken(f"the connection to the model server broke in the middle of a stream: {_reason(error)}")


def _reason(error: Exception) -> str:
    """The system's word for it, as far as there is one: aiohttp's repeats address and SSL settings."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "closed too early, or no proper HTTP"  # aiohttp's words name a status 400 that nobody sent
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0 and not _is_tls(error):
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    return str(cause) or type(cause).__name__


def _is_tls(error: Exception) -> bool:
    return isinstance(error, aiohttp.ClientSSLError)  # its errno counts OpenSSL's errors
