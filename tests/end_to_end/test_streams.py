"""Streams under load, under stalls and under disconnects."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import (
    FORMS,
    REPOSITORY,
    RawStream,
    Server,
    generate_all,
    plain_body,
    running,
    wait_until,
    without_stats,
)

pytestmark = pytest.mark.end_to_end


def bench(server: Server, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the bench client against `server`; its JSON."""
    file = tmp_path / "bench.json"
    words = [sys.executable, "-m", "ironbatch", "bench", "--url", f"http://127.0.0.1:{server.port}", *options]
    done = subprocess.run(
        [*words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize(("form", "blocks"), [("serve", 4096), ("gunicorn", 4096), ("serve", 64)])
def test_two_thousand_requests_and_the_counts_agree(form: str, blocks: int, tmp_path: Path) -> None:
    with running(form, workers=2, total_kv_blocks=blocks) as server:
        result = bench(server, tmp_path, "--concurrency", "128", "--total-requests", "2000")
        metrics = server.wait_idle()
        counted = result["tokens"]
        assert result["requests"] == 2000
        assert result["failures"] == []
        assert metrics["requests_completed"] == 2000
        assert metrics["tokens_generated"] == counted == 2000 * 64
        assert metrics["tokens_delivered"] == counted
        assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"] == blocks
        assert (metrics["preemptions"] > 0) == (blocks == 64)


@pytest.mark.parametrize("form", FORMS)
def test_details_carry_the_tokens_of_the_request_alone(form: str) -> None:
    body = {"prompt_token_ids": [5, 6, 7], "max_new_tokens": 30, "seed": 11, "details": True}
    with running(form) as server:
        alone = generate_all(server.port, [body])[0]
        beside = generate_all(server.port, [body, *[{"prompt_tokens": 50, "max_new_tokens": 200}] * 20])[0]
    lines = [json.loads(line) for line in alone.splitlines()]
    assert [line["token_index"] for line in lines] == list(range(30))
    assert [line["done"] for line in lines] == [False] * 29 + [True]
    assert lines[-1]["finish_reason"] == "length"
    assert all(line["token_id"] >= 0 for line in lines)
    assert without_stats(beside) == without_stats(alone)


def test_no_tokens_asked_is_one_line_and_takes_no_slot() -> None:
    with running(max_running_seqs=1, max_queued_requests=0, mock_token_latency_us=100_000) as server:
        holder = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 8000})
        holder.read_chunk()  # the only slot is taken
        stream = RawStream(server.port, {"prompt_tokens": 9, "max_new_tokens": 0})
        assert stream.read_head() == 200
        assert b'{"token_index":0,"done":true}\n' in generate_no_tokens(server)
        stream.close()
        holder.close()
        assert server.wait_idle()["requests_completed"] == 2


def generate_no_tokens(server: Server) -> bytes:
    """The whole response, head included, to a request for no tokens."""
    stream = RawStream(server.port, {"prompt_tokens": 9, "max_new_tokens": 0})
    wait_until(lambda: stream.status or stream.read_head(), "the head")
    while len(stream._pending) < len(b'{"token_index":0,"done":true}\n'):
        stream._receive()
    stream.close()
    return stream._pending


def test_a_full_queue_is_503_with_retry_after() -> None:
    with running(max_running_seqs=2, max_queued_requests=1, mock_token_latency_us=50_000) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 1000}) for _ in range(3)]
        wait_until(lambda: server.metrics()["running"] == 2 and server.metrics()["waiting"] == 1, "a full engine")
        extra = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 1})
        assert extra.read_head() == 503
        assert b"retry-after: 1" in extra.headers.lower()
        for stream in [*streams, extra]:
            stream.close()
        metrics = server.wait_idle()
        assert metrics["requests_cancelled"] == 3
        assert metrics["requests_unavailable"] == 1


def test_a_client_that_goes_frees_its_blocks() -> None:
    """Queued, prefilling, decoding."""
    options = {"max_running_seqs": 4, "max_batch_tokens": 16, "mock_token_latency_us": 5_000}
    with running(**options) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 2000, "max_new_tokens": 2000}) for _ in range(8)]
        streams += [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 2000, "priority": -1})]
        streams[-1].read_chunk()
        wait_until(lambda: server.metrics()["waiting"] > 0, "a queue")
        for stream in streams:
            stream.close()
        metrics = server.wait_idle()
        assert metrics["requests_cancelled"] == len(streams)
        assert metrics["requests_completed"] == 0


def test_a_worker_that_is_behind_sends_what_is_ready_as_one_chunk() -> None:
    with running(workers=1, mock_token_latency_us=2_000) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 3000}) for _ in range(3)]
        for stream in streams:
            stream.read_chunk()
        (worker,) = server.processes("web worker")
        worker.send_signal(signal.SIGSTOP)
        before = server.scheduler_tokens()
        wait_until(lambda: server.scheduler_tokens() >= before + 3 * 200, "200 tokens more for each stream")
        worker.send_signal(signal.SIGCONT)
        for stream in streams:
            sizes = [stream.read_chunk().count(b"\n") for _ in range(150)]
            assert max(sizes) >= 200, sizes
            assert sum(size > 20 for size in sizes) == 1, sizes  # one wake, one chunk
            stream.close()


def test_a_stalled_reader_gets_every_byte_when_it_resumes() -> None:
    """More than the sockets hold, so that the server's write blocks; others flow meanwhile."""
    options = {"max_model_len": 400_000, "total_kv_blocks": 32_768, "mock_token_latency_us": 0}
    with running(workers=1, max_running_seqs=8, max_queued_requests=8, **options) as server:
        count = 300_000
        stalled = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": count}, receive_buffer_bytes=4096)
        first = stalled.read_chunk()
        wait_until(lambda: server.metrics()["tokens_generated"] >= count, "all tokens to be generated", 60)
        assert generate_all(server.port, [{"prompt_tokens": 3, "max_new_tokens": 50}]) == [plain_body(50)]
        assert server.metrics()["requests_completed"] == 1  # the stalled one is not
        assert first + stalled.read_all() == plain_body(count)
        stalled.close()
        assert server.wait_idle()["requests_completed"] == 2


def test_a_stalled_reader_that_goes_costs_nothing() -> None:
    options = {"max_model_len": 400_000, "total_kv_blocks": 32_768, "mock_token_latency_us": 0}
    with running(workers=1, max_running_seqs=1, max_queued_requests=0, **options) as server:
        stalled = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 300_000}, receive_buffer_bytes=4096)
        stalled.read_chunk()
        wait_until(lambda: server.metrics()["tokens_generated"] >= 300_000, "all tokens to be generated", 60)
        stalled.close()
        wait_until(lambda: server.metrics()["requests_cancelled"] == 1, "the cancel")
        assert generate_all(server.port, [{"prompt_tokens": 3, "max_new_tokens": 5}]) == [plain_body(5)]
        server.wait_idle()


def test_keep_alive_serves_many_requests_on_one_connection() -> None:
    with running(workers=1) as server:
        words = ["curl", "-sN", "--fail", "--max-time", "20"]
        url = f"http://127.0.0.1:{server.port}/generate"
        one = ["-X", "POST", url, "-d", '{"prompt_tokens": 128, "max_new_tokens": 4}']
        done = subprocess.run([*words, *one, "--next", *one], capture_output=True, timeout=60, check=False)
        assert done.stdout == plain_body(4) * 2
        old = subprocess.run([*words, "--http1.0", *one], capture_output=True, timeout=60, check=False)
        assert old.stdout == plain_body(4)
