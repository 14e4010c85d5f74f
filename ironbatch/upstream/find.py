"""What stands behind a URL: the model's name, its slots, and the dialect that it is best asked in."""

from typing import Any, Final, Protocol

import msgspec

from ironbatch.upstream.answers import Answer, problem_of, shown
from ironbatch.upstream.dialects import UNREADABLE, LlamaCppDialect, OpenAIDialect, root_of
from ironbatch.upstream.problems import (
    UpstreamAway,
    UpstreamBroken,
    UpstreamBusy,
    UpstreamMisset,
    UpstreamProblem,
    UpstreamRefused,
    said,
)
from ironbatch.upstream.types import Found

MAX_MODEL_NAME_CHARS: Final = 200  # of a name in a message or a log

NO_SUCH_PATH: Final = frozenset({404, 405, 501})  # how servers say that they do not know a path

_MAX_COUNT: Final = 2**31 - 1


class Asker(Protocol):
    """Whoever can ask the model server: UpstreamClient, or a test."""

    @property
    def base_url(self) -> str:
        """Where the OpenAI-compatible paths begin, without a slash at the end."""

    async def get(self, url: str) -> Answer:
        """The answer to a GET, whatever its status. Raises a problem if there is none."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # vLLM's


class _Models(msgspec.Struct):
    data: list[_Model]


class _Settings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    total_slots: int | None = None
    default_generation_settings: _Settings | None = None


def shown_model(name: str) -> str:
    """A model's name as messages show it: whole up to MAX_MODEL_NAME_CHARS characters, on one line."""
    line = "".join(char if char.isprintable() else "�" for char in name[: MAX_MODEL_NAME_CHARS + 1])
    return line if len(line) <= MAX_MODEL_NAME_CHARS else line[:MAX_MODEL_NAME_CHARS] + "…"


def described(found: Found) -> str:
    """What a server says of itself, for the log."""
    slots = f"{found.slots} at once" if found.slots else "it does not say how many streams it takes at once"
    context = f", {found.context_tokens} tokens each" if found.context_tokens else ""
    return f"model {shown_model(found.model)} ({found.dialect.name}), {slots}{context}"


async def find(client: Asker, wanted_model: str) -> Found:
    """Ask the model server about itself. `wanted_model` "" is the first that it lists.

    Raises UpstreamAway (try later), UpstreamMisset (the operator's) or UpstreamBroken.
    """
    try:
        models = await _models(client, is_needed=not wanted_model)
        model = wanted_model or models[0].id
        context_tokens = next((_count(listed.max_model_len) for listed in models if listed.id == model), 0)
        props = await _props(client)
    except UpstreamBusy as busy:
        raise UpstreamAway(busy.message) from None
    except UpstreamRefused as refusal:  # a plain GET has nothing to refuse: that is no model server
        raise UpstreamMisset(f"{refusal.message}; correct --backend-url") from None
    is_listed = not models or any(listed.id == model for listed in models)
    if props is None:
        return Found(model, 0, context_tokens, OpenAIDialect(), is_listed)
    settings = props.default_generation_settings or _Settings()
    return Found(model, _count(props.total_slots), _count(settings.n_ctx), LlamaCppDialect(), is_listed)


async def _models(client: Asker, *, is_needed: bool) -> list[_Model]:
    """The models that it lists: at least one if they are needed, because the operator has named none."""
    answer = await client.get(f"{client.base_url}/models")
    if answer.status == 200:
        try:
            models = [model for model in msgspec.json.decode(answer.body, type=_Models).data if model.id]
        except UNREADABLE:
            models = []
        if models or not is_needed:
            return models
        raise UpstreamMisset(
            f"{shown(answer.url)} names no model: {said(_text(answer))}; correct --backend-url, or give --backend-model"
        )
    if answer.status in NO_SUCH_PATH and not is_needed:
        return []
    raise problem_of(answer)


async def _props(client: Asker) -> _Props | None:
    """llama.cpp's /props, or None if it is no llama.cpp.

    Only a clear answer is taken for "no": one that fails would otherwise change the dialect from start to start.
    """
    answer = await client.get(f"{root_of(client.base_url)}/props")
    if answer.status in NO_SUCH_PATH or _is_page(answer):
        return None
    if answer.status != 200:
        raise _props_problem(answer)
    try:
        value: Any = msgspec.json.decode(answer.body)
        if isinstance(value, dict) and "total_slots" not in value:  # LM Studio: 200 {"error": "Unexpected endpoint"}
            return None
        props = msgspec.convert(value, _Props)
    except UNREADABLE as error:
        raise UpstreamBroken(f"{shown(answer.url)} can't be read: {said(_text(answer))} ({error})") from None
    if not _count(props.total_slots):
        raise UpstreamBroken(f"{shown(answer.url)} tells of {props.total_slots} slots; one at least was expected")
    return props


def _props_problem(answer: Answer) -> UpstreamProblem:
    problem = problem_of(answer)
    if isinstance(problem, (UpstreamAway, UpstreamBusy)) or answer.status in {401, 403}:
        return problem
    return UpstreamBroken(problem.message)


def _is_page(answer: Answer) -> bool:
    """Whether it is a page for browsers, as some servers show at every path that they do not know."""
    return answer.status == 200 and answer.content_type == "text/html"


def _text(answer: Answer) -> str:
    return answer.body[:1000].decode("utf-8", "replace")


def _count(count: int | None) -> int:
    return count if count is not None and 0 < count <= _MAX_COUNT else 0
