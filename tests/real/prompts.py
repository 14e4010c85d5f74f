"""Prompts that a model goes on with in one way alone, whatever it computes beside them.

llama.cpp's greedy output is not invariant to the batch: sums are added up in another order, and where two tokens are
about equally likely the other one may win. So a test that compares two runs uses only prompts for which the model is
sure of each token: that is looked at when the tests run, as another build of the model server may see it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.real.model import ModelServer, OwnAnswer

MARGIN = 0.5  # nats between the likeliest token and the next; differences by batch were seen at 0.02 and less
OUTPUT_TOKENS = 48
LONG_PROMPT = "<li>1</li>\n<li>2</li>\n<li>3</li>\n"
"""The model counts on for more than a thousand tokens."""

MULTIBYTE_PROMPT = "日本 日本 日本 日本 日本"
"""The model repeats it. Its first character is three tokens, none of which is a character by itself."""


def candidates() -> Iterator[str]:
    """Sequences that even a small model can continue."""
    for first in range(1, 40, 3):
        yield ", ".join(str(first + k) for k in range(8)) + ","
        yield "".join(f"<li>{first + k}</li>\n" for k in range(4))
    for step in (5, 10, 100):
        for first in range(1, 6):
            yield ", ".join(str((first + k) * step) for k in range(6)) + ","


def sure_prompts(model: ModelServer, count: int) -> dict[str, OwnAnswer]:
    """`count` prompts whose greedy answer of OUTPUT_TOKENS is sure, each with that answer."""
    found: dict[str, OwnAnswer] = {}
    for prompt in candidates():
        if len(found) == count:
            break
        answer = model.ask(prompt, OUTPUT_TOKENS)
        if answer.margin > MARGIN and len(answer.token_ids) == OUTPUT_TOKENS:
            found[prompt] = answer
    assert len(found) == count, f"the model is sure of only {len(found)} prompts"
    return found
