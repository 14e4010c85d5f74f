"""Time-outs of requests: which answer they give, whom they spare, and that nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from ironbatch.config import Config
from ironbatch.web.timeouts import Timeouts
from tests.support import ScriptedBackend
from tests.web.fakes import Answer, Lifetime, expected_lines, in_loop, leave, parsed, until
from tests.web.test_app import Server, a_server


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"prompt_tokens": 2, "max_new_tokens": 9} | fields)


async def ended(*answers: Answer) -> None:
    """Wait without a scheduler's help."""
    for answer in answers:
        assert answer.task is not None
        await answer.task
        assert answer.send.is_complete


def settle(server: Server) -> None:
    """The scheduler hears of what was given up, and frees it."""
    server.small.step()


@in_loop
async def test_before_the_first_token_it_is_a_status() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=0.01))
            await ended(answer)
            assert answer.status == 504
            assert answer.error["type"] == "timeout"
            assert answer.error["param"] == "timeout_s"
            assert "timeout_s of 0.01 s" in answer.error["message"]
            assert b"retry-after" not in answer.headers
            settle(server)
            await until(lambda: not server.segment.slots["owner"].any(), "the slot's return")
            server.small.assert_nothing_held()
            assert server.counts() == {"received": 1, "failed": 1}
            assert server.metrics["requests_timed_out"] == 1


@pytest.mark.parametrize("details", [False, True])
@in_loop
async def test_after_it_the_tokens_so_far_and_an_error_line(details: bool) -> None:  # noqa: FBT001
    with a_server() as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=0.05, details=details))
            await server.is_submitted()
            for _ in range(3):
                server.small.step()
            await ended(answer)
            *lines, last = parsed(answer.body)
            assert [line["token_index"] for line in lines] == [0, 1, 2]
            assert (last["token_index"], last["done"], last["error"]["type"]) == (3, True, "timeout")
            assert ("preemptions" in last) is details
            settle(server)
            await until(lambda: not server.segment.slots["owner"].any(), "the slot's return")
            server.small.assert_nothing_held()


@in_loop
async def test_of_several_choices_those_that_run_say_so_and_the_others_are_whole() -> None:
    def script(plan: Any) -> list[list[int]]:
        """Choice 0 ends at once."""
        plan.output.finish_reasons[0] = 2 if len(plan) > 1 else 0
        return [[1]] * len(plan)

    def backend(config: Config) -> ScriptedBackend:
        scripted = ScriptedBackend(config)
        scripted.script = script  # type: ignore[method-assign]
        return scripted

    with a_server(backend) as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=0.05, n=2))
            await server.is_submitted(2)
            for _ in range(4):
                server.small.step()
            await ended(answer)
            last = {line["choice"]: line for line in parsed(answer.body) if line["done"]}
            assert sorted("error" in line for line in last.values()) == [False, True]
            settle(server)
            await until(lambda: not server.segment.slots["owner"].any(), "the slots' return")


@in_loop
async def test_a_request_that_has_ended_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.TimerHandle] = []
    start = Timeouts.start

    def noted(*args: Any) -> list[asyncio.TimerHandle]:
        timers = start(*args)
        started.extend(timers)
        return timers

    monkeypatch.setattr(Timeouts, "start", noted)
    with a_server(queue_timeout_s=3600) as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=3600))
            await server.is_submitted()
            assert [timer.cancelled() for timer in started] == [False, False]
            await server.finish(answer)
            assert answer.body == expected_lines(9)
            gone = server.generate(body())
            await until(lambda: len(started) == 3, "its timer")
            await leave(gone)
            assert all(timer.cancelled() for timer in started)
            assert server.metrics["requests_timed_out"] == 0
            settle(server)


@in_loop
async def test_a_client_that_goes_after_its_timeout_cancels_nothing_twice() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=0.05))
            await server.is_submitted()
            answer.send.stall()
            server.small.step()
            await until(lambda: answer.send.chunks, "a chunk that waits")
            await until(lambda: server.metrics["requests_timed_out"], "the time-out")
            tail = int(server.segment.lanes[0]["tail"])
            await leave(answer)
            assert int(server.segment.lanes[0]["tail"]) == tail
            settle(server)
            await until(lambda: not server.segment.slots["owner"].any(), "the slot's return")
            assert server.counts() == {"received": 1, "cancelled": 1}


@in_loop
async def test_a_stalled_reader_finds_the_error_line_when_it_reads_again() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            answer = server.generate(body(timeout_s=0.05))
            await server.is_submitted()
            answer.send.stall()
            server.small.step()
            await until(lambda: answer.send.chunks, "a chunk that waits")
            await until(lambda: server.metrics["requests_timed_out"], "the time-out")
            settle(server)
            await until(lambda: not server.segment.slots["owner"].any(), "the slot's return")
            answer.send.resume()
            await ended(answer)
            assert parsed(answer.body)[-1]["error"]["type"] == "timeout"


@in_loop
async def test_who_was_never_admitted_is_refused_after_the_queue_timeout() -> None:
    with a_server(queue_timeout_s=1, max_running_seqs=1) as server:
        async with Lifetime(server.app):
            first = server.generate(body())
            await server.is_submitted()
            server.small.step()
            second = server.generate(body())
            await server.is_submitted(2)
            server.small.step()
            await ended(second)
            assert second.status == 503
            assert second.headers[b"retry-after"] == b"1"
            assert second.error["type"] == "queue_timeout"
            assert "1 s" in second.error["message"]
            assert "--queue-timeout-s" in second.error["message"]
            await server.finish(first)
            assert first.body == expected_lines(9)
            assert server.metrics["requests_timed_out"] == 1


@in_loop
async def test_who_was_admitted_and_preempted_is_spared() -> None:
    # Two that fit at first and not at their full length: the newer one is preempted, and waits for over a second.
    options: dict[str, Any] = {"total_kv_blocks": 4, "kv_block_size": 4, "no_prefix_cache": True, "max_model_len": 16}
    with a_server(queue_timeout_s=1, **options) as server:
        async with Lifetime(server.app):
            answers = [server.generate(body(prompt_tokens=6, max_new_tokens=9)) for _ in range(2)]
            await server.is_submitted(2)
            for _ in range(4):
                server.small.step()
            assert server.small.gauge("waiting_count") == 1
            await asyncio.sleep(1.1)  # the claim is that a time passes and nothing comes of it
            await server.finish(*answers)
            assert [answer.body for answer in answers] == [expected_lines(9)] * 2
            assert server.metrics["requests_timed_out"] == 0
