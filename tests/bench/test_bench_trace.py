"""Traces in every format, and what is told about those that are none."""

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench import trace as trace_module
from ironbatch.bench.flags import MAX_NEW_TOKENS, PROMPT_TOKENS
from ironbatch.bench.trace import Trace
from ironbatch.errors import ConfigError

MS = 1_000_000
PLAIN = "arrival_s,prompt_tokens,max_new_tokens\n"


def make(folder: Path, content: str | bytes) -> Trace:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Trace(str(path), PROMPT_TOKENS, MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    "content",
    [
        PLAIN + "10,374,44\n10.25,396,109\n",
        "max_new_tokens, Prompt_Tokens ,ARRIVAL_S,more\r\n44,374,10,x\r\n109,396,10.25,y\r\n",
        (
            '{"arrival_s": 10, "prompt_tokens": 374, "max_new_tokens": 44}\n\n'
            '{"max_new_tokens": 109, "prompt_tokens": 396, "arrival_s": 1.025e1}'
        ),
        (
            "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:46.9305900,396,109\n"
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 23:59:59.900000+00:00,374,44\n2024-05-11 00:00:00.150000+00:00,396,109\n"
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,374,44,418,Conversation log\n5.25,GPT-4,396,109,505,API log\n"
        ),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            '5.0,a,1.5,"Chat,GPT",374.0,44.0,418,log\n5.25,b,2,GPT-4,396,109,505,log\n'
        ),
        (
            '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}\n'
            '{"timestamp": 250, "input_length": 396, "output_length": 109, "hash_ids": [0, 2]}\n'
        ),
        (
            '{"chat_id": 1, "timestamp": 61.0, "input_length": 374, "output_length": 44, "turn": 1}\n'
            '{"chat_id": 2, "timestamp": 61.25, "input_length": 396, "output_length": 109, "turn": 2}\n'
        ),
    ],
)
def test_every_format_says_the_same(tmp_path: Path, content: str) -> None:
    trace = make(tmp_path, content)
    assert list(trace.rows()) == [(0, 374, 44), (250 * MS, 396, 109)]
    assert list(trace.rows()) == list(trace.rows()), "it can be walked again"
    assert trace.raised_prompts == 0


def test_prompt_of_nothing_is_sent_as_one_token_and_counted(tmp_path: Path) -> None:
    trace = make(tmp_path, PLAIN + "0,0,7\n0,5,0\n0,0,0\n")
    assert list(trace.rows()) == [(0, 1, 7), (0, 5, 0), (0, 1, 0)]
    assert trace.raised_prompts == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no requests; give a file with one a line"),
        (PLAIN, "holds no requests"),
        ("a,b\n1,2\n", "line 2: columns 'a, b' are of no known trace; use those of plain: arrival_s, prompt_tokens"),
        ("1,2,3\n4,5,6\n", "line 2: columns '1, 2, 3' are of no known trace"),
        (PLAIN + "0,5,5\n1,-5,5\n", "line 3: prompt_tokens -5 is not between 0 and 1048576; use 0 or more, or take"),
        (PLAIN + "0,9999999,5\n", "line 2: prompt_tokens 9999999 is not between 0 and 1048576; use 1048576 or less"),
        (PLAIN + "0,5,1048577\n", "line 2: max_new_tokens 1048577 is not between 0 and 1048576"),
        (PLAIN + "0,many,5\n", "line 2: prompt_tokens 'many' is not a whole number"),
        (PLAIN + "0,1.5,5\n", "line 2: prompt_tokens '1.5' is not a whole number"),
        (PLAIN + "0,5\n", "line 2: max_new_tokens '' is not a whole number"),
        (PLAIN + "soon,5,5\n", "line 2: arrival_s 'soon' is not a number between 0 and 1e+11; correct it, or take"),
        (PLAIN + "-1,5,5\n", "line 2: arrival_s '-1' is not a number"),
        (PLAIN + "1e300,5,5\n", "line 2: arrival_s '1e300' is not a number between 0 and 1e+11"),
        (PLAIN + "nan,5,5\n", "line 2: arrival_s 'nan'"),
        (PLAIN + "2,5,5\n1,5,5\n", "line 3: arrival_s '1' is before the line above; sort the file by it"),
        (PLAIN + '0,"5,5\n', "line 2: unexpected end of data; write it as CSV"),
        (PLAIN + "0,\x00,5\n", "line 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n", "line 2: timestamp '5' is not a date and time such as"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: columns 'timestamp, input_length' are of no known trace"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0}\n',
            "line 2: columns 'timestamp' are",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1]\n', "line 2: '[1]' is not a JSON object"),
        ('{"timestamp": 0,\n', "line 1: '{\"timestamp\": 0,' is not a JSON object; put one on each line"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}\n', "line 1: input_length 'True' is not a whole"),
        ('{"timestamp": ' + "[" * 100_000, "is not a JSON object"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "is not UTF-8 text (invalid start byte); unpack it first if it is compressed"),
    ],
)
def test_malformed_trace_is_told_with_line_value_and_remedy(tmp_path: Path, content: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(make(tmp_path, content).rows())
    (problem,) = caught.value.problems
    assert problem.startswith(f"--trace: '{tmp_path / 'trace'}'")
    assert told in problem
    assert "\n" not in problem


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: .*; give a file that can"):
        list(Trace(str(tmp_path / "no"), PROMPT_TOKENS, MAX_NEW_TOKENS).rows())


def test_line_too_long_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_LINE_CHARS", 100)
    with pytest.raises(ConfigError, match="line 2: it is longer than 100 characters"):
        list(make(tmp_path, PLAIN + "0," + "5" * 200 + ",5\n").rows())


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    trace = make(tmp_path, PLAIN + "0,1,1\n" * 50_000 + "bad\n")
    assert len(list(itertools.islice(trace.rows(), 10))) == 10


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(1, 1_048_576), st.integers(0, 1_048_576)), min_size=1, max_size=20
    )
)
def test_csv_and_json_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    rows.sort()
    folder = tmp_path_factory.mktemp("trace")
    wanted = [((at_ms - rows[0][0]) * MS, prompt, output) for at_ms, prompt, output in rows]
    table = PLAIN + "".join(f"{at_ms / 1e3},{prompt},{output}\n" for at_ms, prompt, output in rows)
    lines = "".join(
        json.dumps({"timestamp": at_ms, "input_length": prompt, "output_length": output}) + "\n"
        for at_ms, prompt, output in rows
    )
    for content in (table, lines):
        for row, (at_ns, prompt, output) in zip(make(folder, content).rows(), wanted, strict=True):
            assert abs(row.arrival_ns - at_ns) < 1000, "a float of seconds holds less than nanoseconds"
            assert row[1:] == (prompt, output)


@pytest.mark.parametrize("kind", ["fifo", "directory", "/dev/null", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path(kind)
    with pytest.raises(ConfigError, match="is not a regular file; give one"):
        list(Trace(str(path), PROMPT_TOKENS, MAX_NEW_TOKENS).rows())


def test_the_first_arrival_may_be_any_time(tmp_path: Path) -> None:
    rows = make(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n1969-12-31 23:00:00,1,1\n1969-12-31 23:00:01,1,1\n")
    assert [row.arrival_ns for row in rows.rows()] == [0, 1_000_000_000]
