"""The client against the scripted model server: good streams, connections, cancelling, keys and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironbatch.upstream.dialects import OpenAIDialect
from ironbatch.upstream.problems import UpstreamAway, UpstreamBroken, UpstreamMisset
from ironbatch.upstream.types import NO_TOKEN_ID, Enough, Finish, Found, Piece, Usage
from tests.upstream.conftest import PROMPT, ask, client_of, request, run, until
from tests.upstream.scripted import LLAMA_CPP, OPENAI, Ending, Script, ScriptedServer, refusal
from tests.upstream.tokens import expected_pieces, expected_token_ids

CANCEL_S = 0.1  # issue 7: a cancel closes the upstream's stream within 100 ms


class TestStreams:
    @pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7]])
    def test_pieces_come_in_order_with_finish_and_usage(self, server: ScriptedServer, prompt: str | list[int]) -> None:
        asked = ask(server, request(prompt, max_tokens=20))
        assert [piece.text for piece in asked.pieces] == expected_pieces(prompt, 20)
        token_ids = expected_token_ids(prompt, 20) if server.dialect == LLAMA_CPP else [NO_TOKEN_ID] * 20
        assert [piece.token_id for piece in asked.pieces] == token_ids
        assert asked.finish[:2] == ("length", Usage(4 if prompt == PROMPT else 3, 20))

    def test_continued_answer_equals_the_whole(self, server: ScriptedServer) -> None:
        first = ask(server, request(max_tokens=7)).text
        assert first + ask(server, request(PROMPT + first, max_tokens=8)).text == "".join(expected_pieces(PROMPT, 15))

    def test_end_of_the_model(self, server: ScriptedServer) -> None:
        server.script(Script(pieces=3))
        assert ask(server).finish[:2] == ("stop", Usage(4, 3))

    @pytest.mark.parametrize("usage", ["with the finish reason", "none"])
    def test_usage_elsewhere_or_nowhere(self, server: ScriptedServer, usage: str) -> None:
        server.script(Script(usage=usage))
        assert ask(server).finish.usage == (Usage(-1, -1) if usage == "none" else Usage(4, 5))

    def test_without_done(self, openai: ScriptedServer) -> None:
        openai.script(Script(has_done=False))
        assert ask(openai).finish[:2] == ("length", Usage(4, 5))

    @pytest.mark.parametrize("cut", [{"bytes_per_write": 1}, {"bytes_per_write": 7}, {"pieces_per_write": 4}])
    def test_chunks_that_are_no_events(self, server: ScriptedServer, cut: dict[str, int]) -> None:
        server.script(Script(**cut))  # type: ignore[arg-type]
        assert ask(server).text == "".join(expected_pieces(PROMPT, 5))

    @pytest.mark.parametrize(
        "raw",
        [
            b"\xef\xbb\xbf", b": ping\n\n", b"data:\n\n", b"data: \n\n", b'data: {"choices": null}\n\n',
            b'data: {"choices": []}\n\n', b'data: {"choices": [{"text": null}]}\n\n', b"event: x\nid: 1\n\n", b"\r\n",
        ],
    )  # fmt: skip
    def test_what_means_nothing_is_skipped(self, server: ScriptedServer, raw: bytes) -> None:
        server.script(Script(raw={0: raw}))
        assert ask(server).text == "".join(expected_pieces(PROMPT, 5))

    def test_40_at_once(self, server: ScriptedServer) -> None:
        async def all_of_them() -> list[list[Piece]]:
            async with client_of(server.url, connections=40) as client:
                found = await client.find("")
                answers: list[list[Piece]] = [[] for _ in range(40)]
                asked = [
                    client.complete(found, request(f"prompt {index} "), answer.append)
                    for index, answer in enumerate(answers)
                ]
                await asyncio.gather(*asked)
                return answers

        for index, answer in enumerate(run(all_of_them())):
            assert [piece.text for piece in answer] == expected_pieces(f"prompt {index} ", 5)


class TestLeaving:
    def test_cancel_is_seen_by_the_server_within_100_ms(self, server: ScriptedServer) -> None:
        server.script(Script(pieces=2, ending=Ending.HANG))
        assert self._seconds_from_cancel(server, lambda: server.requests and server.requests[0].pieces == 2) < CANCEL_S

    def test_cancel_before_the_head(self, server: ScriptedServer) -> None:
        server.script(Script(head_delay_s=60))
        assert self._seconds_from_cancel(server, lambda: server.requests) < CANCEL_S

    def test_cancel_between_tokens(self, server: ScriptedServer) -> None:
        server.script(Script(token_us=5000))
        assert self._seconds_from_cancel(server, lambda: server.requests and server.requests[0].pieces > 2) < CANCEL_S

    def test_cancel_while_the_request_is_still_being_sent(self) -> None:
        """The server answers at once and reads nothing: the rest of the prompt must not hold the connection."""
        lost_at: list[float] = []

        def answer_unread(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                while time.monotonic() < give_up_at:  # a write is how one who does not read hears of the end
                    connection.sendall(b": ping\n\n")
                    time.sleep(0.002)
            lost_at.append(time.monotonic())

        async def cancel(url: str) -> float:
            async with client_of(url) as client:
                found = Found("m", 0, 0, OpenAIDialect())
                large = request("word " * 4_000_000)
                asked = asyncio.ensure_future(client.complete(found, large, lambda piece: None))
                await until(lambda: client._streaming, "the head has come")
                cancelled_at = time.monotonic()
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                await until(lambda: lost_at, "the server sees it")
                return lost_at[0] - cancelled_at

        give_up_at = time.monotonic() + 5
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = threading.Thread(target=answer_unread, args=(listener,))
            server.start()
            assert run(cancel(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")) < CANCEL_S
            server.join()

    @staticmethod
    def _seconds_from_cancel(server: ScriptedServer, is_due: object) -> float:
        async def cancel() -> float:
            async with client_of(server.url) as client:
                found = await client.find("")
                asked = asyncio.ensure_future(client.complete(found, request(max_tokens=1000), lambda piece: None))
                await until(is_due, "the stream stands")  # type: ignore[arg-type]
                cancelled_at = time.monotonic()
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                await until(lambda: server.left, "the server sees that the client has left")
                left_at = server.left[0].left_at
                assert left_at is not None
                assert not server.open_now
                return left_at - cancelled_at

        seconds: float = run(cancel())
        return seconds

    def test_enough_ends_the_stream(self, server: ScriptedServer) -> None:
        pieces: list[Piece] = []

        def take_two(piece: Piece) -> None:
            pieces.append(piece)
            if len(pieces) == 2:
                raise Enough

        async def once() -> Finish:
            server.script(Script(token_us=1000))
            async with client_of(server.url) as client:
                finish = await client.complete(await client.find(""), request(max_tokens=1000), take_two)
                await until(lambda: server.left, "the stream is closed")
                return finish

        assert run(once())[:2] == ("length", Usage(-1, -1))
        assert [piece.text for piece in pieces] == expected_pieces(PROMPT, 2)

    def test_bug_of_the_taker_goes_through(self, server: ScriptedServer) -> None:
        def fail(piece: Piece) -> None:
            raise BrokenPipeError("the taker's")

        async def once() -> None:
            async with client_of(server.url) as client:
                with pytest.raises(BrokenPipeError, match=r"the taker's"):
                    await client.complete(await client.find(""), request(max_tokens=1000), fail)

        run(once())


class TestConnections:
    def test_connection_is_used_again(self, openai: ScriptedServer) -> None:
        async def three() -> None:
            async with client_of(openai.url) as client:
                found = await client.find("")
                for _ in range(3):
                    await client.complete(found, request(), lambda piece: None)

        run(three())
        assert len(openai.requests) == 3
        assert len(openai.connections) == 1

    @pytest.mark.parametrize("ending", [Ending.FINISH_AND_HANG, Ending.HANG, Ending.NO_REASON])
    def test_connection_that_was_not_read_to_its_end_is_not(self, openai: ScriptedServer, ending: Ending) -> None:
        async def two() -> list[Piece]:
            pieces: list[Piece] = []
            async with client_of(openai.url, silence_s=0.2) as client:
                found = await client.find("")
                openai.script(Script(pieces=1, ending=ending))
                await asyncio.gather(client.complete(found, request(), lambda piece: None), return_exceptions=True)
                await client.complete(found, request(), pieces.append)
            return pieces

        assert [piece.text for piece in run(two())] == expected_pieces(PROMPT, 5)

    def test_connection_that_the_server_closes_as_it_is_used_again(self, openai: ScriptedServer) -> None:
        async def two() -> Finish:
            async with client_of(openai.url) as client:
                found = await client.find("")
                await client.complete(found, request(), lambda piece: None)
                openai.script(Script(before_head=Ending.RESET))
                return await client.complete(found, request(), lambda piece: None)

        assert run(two())[:2] == ("length", Usage(4, 5))
        assert len(openai.requests) == 3  # the second went out twice

    def test_probe_finds_a_way_beside_the_streams(self, openai: ScriptedServer) -> None:
        async def probe() -> None:
            openai.script(Script(ending=Ending.HANG))
            async with client_of(openai.url, connections=1) as client:
                found = await client.find("")
                asked = asyncio.ensure_future(client.complete(found, request(), lambda piece: None))
                await until(lambda: openai.open_now, "the stream stands")
                await client.probe()
                asked.cancel()

        run(probe())

    @pytest.mark.parametrize("script", [Script(pieces=1, ending=Ending.HANG), Script(head_delay_s=60)])
    def test_closing_ends_what_is_open(self, server: ScriptedServer, script: Script) -> None:
        async def close_twice() -> None:
            server.script(script)
            async with client_of(server.url) as client:
                asked = asyncio.ensure_future(client.complete(await client.find(""), request(), lambda piece: None))
                await until(lambda: server.open_now, "the stream stands")
                await client.close()
                with pytest.raises((UpstreamBroken, UpstreamAway)):
                    await asyncio.wait_for(asked, 2)
                await until(lambda: not server.open_now, "the stream is closed")

        run(close_twice())


class TestProbing:
    def probe(self, server: ScriptedServer) -> None:
        async def once() -> None:
            async with client_of(server.url) as client:
                await client.probe()

        run(once())

    def test_serving(self, server: ScriptedServer) -> None:
        self.probe(server)

    def test_nobody_listens(self, server: ScriptedServer) -> None:
        server.kill()
        with pytest.raises(UpstreamAway, match=r"Connection refused"):
            self.probe(server)
        server.start()
        self.probe(server)

    @pytest.mark.parametrize("path", ["/v1/models", "/health"])
    def test_loading(self, server: ScriptedServer, path: str) -> None:
        server.gets[path] = refusal(503, "Loading model")
        with pytest.raises(UpstreamAway, match=r"Loading model"):
            self.probe(server)

    def test_health_of_another_meaning(self, openai: ScriptedServer) -> None:
        openai.gets["/health"] = refusal(500, "sick")
        openai.gets["/v1/models"] = refusal(404, "no list")
        self.probe(openai)

    def test_server_that_fails(self, openai: ScriptedServer) -> None:
        openai.gets["/v1/models"] = refusal(500, "sick")
        with pytest.raises(UpstreamBroken, match=r"500.*sick"):
            self.probe(openai)

    def test_server_that_does_not_answer(self, openai: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ironbatch.upstream.client.ASK_S", 0.2)
        openai.gets["/v1/models"] = Script(before_head=Ending.HANG)
        with pytest.raises(UpstreamAway, match=r"did not answer within 0.2 s"):
            self.probe(openai)

    def test_name_without_address(self) -> None:
        async def once() -> None:
            async with client_of("http://no-such-host.invalid/v1") as client:
                await client.probe()

        with pytest.raises(UpstreamAway, match=r"no-such-host\.invalid"):
            run(once())


class TestKeys:
    def test_key_goes_into_the_header(self, server: ScriptedServer) -> None:
        server.api_key = "sesame"
        assert ask(server, api_key="sesame").text
        assert server.requests[0].headers["Authorization"] == "Bearer sesame"

    def test_no_key_no_header(self, server: ScriptedServer) -> None:
        ask(server)
        assert "Authorization" not in server.requests[0].headers

    def test_wrong_key_is_not_repeated(self, server: ScriptedServer) -> None:
        server.api_key = "sesame"
        with pytest.raises(UpstreamMisset, match=r"401.*Invalid API Key.*--backend-api-key-file") as caught:
            ask(server, api_key="secret-and-wrong")
        assert "secret" not in caught.value.message


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> Iterator[ScriptedServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with ScriptedServer(OPENAI, tls=context) as scripted:
        yield scripted


class TestTls:
    def test_unknown_signer_is_refused(self, tls_server: ScriptedServer) -> None:
        with pytest.raises(UpstreamMisset, match=r"no safe connection.*certificate"):
            ask(tls_server)

    def test_known_signer_is_served(
        self, tls_server: ScriptedServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert ask(tls_server).text == "".join(expected_pieces(PROMPT, 5))

    def test_server_that_speaks_no_tls(self, openai: ScriptedServer) -> None:
        async def once() -> None:
            async with client_of(openai.url.replace("http:", "https:")) as client:
                await client.probe()

        with pytest.raises(UpstreamMisset, match=r"no safe connection.*--backend-url"):
            run(once())


def test_connection_that_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose backlog is full drops the handshake, as a firewall does."""
    monkeypatch.setattr("ironbatch.upstream.client.CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.settimeout(0)
            filler.connect_ex(address)

        async def once() -> None:
            async with client_of(f"http://127.0.0.1:{address[1]}/v1") as client:
                await client.probe()

        with pytest.raises(UpstreamAway, match=r"did not accept one in time"):
            run(once())
        for filler in fillers:
            filler.close()
