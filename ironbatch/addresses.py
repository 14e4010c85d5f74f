"""Addresses as an operator writes them: to listen on (`host:port`, `[v6]:port`, `:port`), or of a server to ask."""

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from ironbatch.limits import MAX_HOST_CHARS, PORT, quoted

ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104 - serving the network is the purpose

_HOST_NAME: Final = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.|$))+")


def split_addr(addr: str) -> tuple[str, int]:
    """`host:port`, `[v6]:port` or `:port` (all interfaces) as (host, port); port 0 means any free one.

    Raises ValueError with the problem and the remedy.
    """
    host, colon, port_text = addr.rpartition(":")
    if not colon:
        remedy = f":{addr}" if re.fullmatch(r"[0-9]{1,5}", addr) else "host:port, such as 127.0.0.1:8080"
        raise ValueError(f"{quoted(addr)} is not a host and a port; use {remedy}")
    try:
        port = PORT.read(port_text)
    except ValueError as error:
        raise ValueError(f"{quoted(addr)}: the port {error}") from None
    if host.startswith("[") and host.endswith("]"):
        return _read_ipv6_address(host[1:-1]), port
    if ":" in host or "[" in host or "]" in host:
        raise ValueError(f"{quoted(addr)} is ambiguous; put an IPv6 address in brackets, such as [::1]:8080")
    return _read_host(host) if host else ALL_INTERFACES, port


def _read_ipv6_address(text: str) -> str:
    try:
        address = str(ipaddress.IPv6Address(text))
    except ValueError:
        address = ""
    if re.fullmatch(r"[0-9a-f:.]+(%[A-Za-z0-9._-]+)?", address) is None:  # ipaddress takes any text as a scope
        raise ValueError(f"{quoted(f'[{text}]')} is not an IPv6 address; use one such as [::1]")
    return address


def _read_host(host: str) -> str:
    if re.fullmatch(r"[0-9.]+", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(f"{quoted(host)} is not an IPv4 address; use one such as 127.0.0.1") from None
    if len(host) > MAX_HOST_CHARS or _HOST_NAME.fullmatch(host) is None:
        raise ValueError(
            f"{quoted(host)} is not a host name (letters, digits and dashes, with dots between, at most"
            f" {MAX_HOST_CHARS} characters); use a name or an address, or leave it out for all interfaces"
        )
    return host


def http_url_problem(url: str) -> str | None:
    """Why requests can't be sent to `url`, or None; with the remedy. What is in it before an @ is not repeated."""
    remedy = "use one such as http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"it is no URL: {error}; {remedy}"
    for is_wrong, problem in (
        (
            parts.username is not None or parts.password is not None,
            "it holds a user name or a password, which every list of processes would show; use --backend-api-key-file",
        ),
        (parts.scheme not in {"http", "https"}, f"{quoted(url)} is no http or https URL; {remedy}"),
        (not host, f"{quoted(url)} names no host; {remedy}"),
        (port == 0, f"{quoted(url)} has the port 0, where nobody listens; {remedy}"),
        (
            parts.query or parts.fragment,
            f"{quoted(url)} has a query or a fragment, and paths are appended to it; leave that out",
        ),
    ):
        if is_wrong:
            return problem
    try:
        split_addr(f"[{host}]:1" if ":" in str(host) else f"{host}:1")
    except ValueError:
        return f"{quoted(str(host))} is neither a host name nor an address; {remedy}"
    return None
