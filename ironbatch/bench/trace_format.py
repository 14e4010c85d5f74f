"""The trace formats that are known, told apart by the names of their columns."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from ironbatch.limits import quoted

MAX_ARRIVAL_S: Final = 1e11
"""Beyond the year 5000, should a trace count from 1970: in nanoseconds it still fits 64 bits many times over."""

_NUMBER: Final = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The columns of one format, in lower case, and how its arrival times are written.

    `also` are columns that only tell this format from another one; they are not read.
    """

    name: str
    arrival: str
    prompt_tokens: str
    output_tokens: str
    read_arrival_s: Callable[[str], float]
    also: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it must have."""
        return (self.arrival, self.prompt_tokens, self.output_tokens, *self.also)


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text) is None or float(text) > MAX_ARRIVAL_S:
        raise ValueError(f"{quoted(text)} is not a number between 0 and {MAX_ARRIVAL_S:g}")
    return float(text)


def _milliseconds(text: str) -> float:
    return _seconds(text) / 1e3


def _date_and_time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a date and time such as 2023-11-16 18:15:46.68") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)  # only differences count; local time would jump twice a year
    return moment.timestamp()


FORMATS: Final = (
    TraceFormat("plain", "arrival_s", "prompt_tokens", "max_new_tokens", _seconds),
    # github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv of 2023 and 2024
    TraceFormat("Azure", "timestamp", "contexttokens", "generatedtokens", _date_and_time),
    # github.com/HPMLL/BurstGPT; with Session ID and Elapsed time in later releases
    TraceFormat("BurstGPT", "timestamp", "request tokens", "response tokens", _seconds),
    # github.com/alibaba-edu/qwen-bailian-usagetraces-anon: Mooncake's names, but in seconds
    TraceFormat("Qwen-Bailian", "timestamp", "input_length", "output_length", _seconds, also=("chat_id",)),
    # github.com/kvcache-ai/Mooncake, FAST25-release/traces
    TraceFormat("Mooncake", "timestamp", "input_length", "output_length", _milliseconds),
)


def detect_format(columns: Iterable[str]) -> TraceFormat | None:
    """The first format whose columns are all there; None if there is none."""
    present = {column.strip().lower() for column in columns}
    return next((known for known in FORMATS if present.issuperset(known.columns)), None)


def known_columns() -> str:
    """All formats' columns, for a message."""
    return "; ".join(f"{known.name}: {', '.join(known.columns)}" for known in FORMATS)


def lower_keys(row: Mapping[str, object]) -> dict[str, str]:
    """One row by lower-case column names, its values as text."""
    return {str(key).strip().lower(): str(value).strip() for key, value in row.items()}
