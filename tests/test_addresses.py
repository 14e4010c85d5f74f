"""Addresses to listen on: what they mean, and what an operator reads of a bad one."""

import pytest

from ironbatch.addresses import http_url_problem, split_addr


def problem(addr: str) -> str:
    with pytest.raises(ValueError, match=r"(use|put|give) ") as caught:
        split_addr(addr)
    return str(caught.value)


@pytest.mark.parametrize(
    ("addr", "host", "port"),
    [
        ("0.0.0.0:8080", "0.0.0.0", 8080),
        ("127.0.0.1:0", "127.0.0.1", 0),
        (":65535", "0.0.0.0", 65_535),
        ("localhost:80", "localhost", 80),
        ("a_b-c.example.:80", "a_b-c.example.", 80),
        (f"{'a' * 63}.example:80", f"{'a' * 63}.example", 80),
        ("[::1]:8080", "::1", 8080),
        ("[::]:0", "::", 0),
        ("[FE80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_addresses(addr: str, host: str, port: int) -> None:
    assert split_addr(addr) == (host, port)


@pytest.mark.parametrize(
    ("addr", "told"),
    [
        ("8080", "'8080' is not a host and a port; use :8080"),
        ("localhost", "'localhost' is not a host and a port; use host:port, such as 127.0.0.1:8080"),
        ("localhost:", "'localhost:': the port '' is not a whole number; give one between 0 and 65535"),
        (":65536", "':65536': the port 65536 is not between 0 and 65535; use 65535 or less"),
        (":-1", "':-1': the port -1 is not between 0 and 65535; use 0 or more"),
        ("::1:8080", "'::1:8080' is ambiguous; put an IPv6 address in brackets, such as [::1]:8080"),
        ("[::1:8080", "'[::1:8080' is ambiguous; put an IPv6 address in brackets, such as [::1]:8080"),
        ("[::g]:1", "'[::g]' is not an IPv6 address; use one such as [::1]"),
        ("[::1%a b]:1", "'[::1%a b]' is not an IPv6 address; use one such as [::1]"),
        ("[]:1", "'[]' is not an IPv6 address; use one such as [::1]"),
        ("1.2.3:1", "'1.2.3' is not an IPv4 address; use one such as 127.0.0.1"),
        ("256.1.1.1:1", "'256.1.1.1' is not an IPv4 address; use one such as 127.0.0.1"),
    ],
)
def test_bad_addresses_tell_the_remedy(addr: str, told: str) -> None:
    assert problem(addr) == told


@pytest.mark.parametrize("host", ["a b", "a/b", "-a", "a..b", ".a", "http://a", "é", "a" * 64, "a." * 130, "a\n"])
def test_what_is_no_host_name(host: str) -> None:
    told = problem(f"{host}:80")
    assert "is not a host name" in told or "is ambiguous" in told


# ----------------------------------------------------------------------------------------------- URLs of a model server


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/v1",
        "https://models.example.org/v1/",
        "http://[::1]:8000",
        "HTTP://localhost/a/b%20c",
        "http://host_1:65535/v1",
    ],
)
def test_urls_to_ask(url: str) -> None:
    assert http_url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000/v1", "no http or https URL"),
        ("localhost", "no http or https URL"),
        ("ftp://host/v1", "no http or https URL"),
        ("http:///v1", "names no host"),
        ("http://", "names no host"),
        ("http://host:0/v1", "port 0"),
        ("http://host:70000/v1", "no URL"),
        ("http://host:x/v1", "no URL"),
        ("http://[::1/v1", "no URL"),
        ("http://user:secret@host/v1", "--backend-api-key-file"),
        ("http://host/v1?key=secret", "query"),
        ("http://host/v1#top", "query or a fragment"),
        ("http://ho$t/v1", "neither a host name nor an address"),
        ("http://1.2.3.4.5/v1", "neither a host name nor an address"),
    ],
)
def test_urls_that_cannot_be_asked(url: str, told: str) -> None:
    problem = http_url_problem(url)
    assert problem is not None
    assert told in problem
    assert "secret" not in problem or "?" in url
    assert "\n" not in problem
    assert "interfaces" not in problem, "that is a word about listening"
