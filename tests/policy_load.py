"""Random load for the policy: engines small enough that everything happens, and requests that resemble each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ironbatch.config import Config
from tests.scheduler_oracle import Row, Scheduler, Sequence
from tests.support import small_config

EOS = 9
SECOND = 10**9


@dataclass(frozen=True)
class Case:
    """An engine and what is asked of it. `options` are the configuration's, `limits` those of the backend."""

    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    priorities: tuple[int, ...] = (0,)
    arrival_chance: float = 0.5
    cancel_chance: float = 0.05
    group_chance: float = 0.0
    unknown_chance: float = 0.2  # of a prompt whose token ids are not given
    salts: tuple[tuple[int, int], ...] = ((0, 0),)
    time_steps_ns: tuple[int, ...] = (0, 1, 1_000, 1_000_000)
    most_prompt: int = 24
    most_new: int = 12
    loss_chance: float = 0.0  # of the backend
    failure_chance: float = 0.0  # of a plan
    reserves: bool = False  # the backend wants no preemption

    @property
    def config(self) -> Config:
        return small_config(**{"max_queued_requests": 10, "priority_aging_s": 0, **self.options})

    def oracle(self) -> Scheduler:
        """The oracle of this engine: the configuration's limits, and the backend's where they are tighter."""
        config, limits = self.config, self.limits
        most_tokens = [config.max_batch_tokens, limits.get("max_tokens"), *limits.get("token_buckets", ())[-1:]]
        batch_tokens = min(tokens for tokens in most_tokens if tokens)
        most_rows = [config.max_running_seqs, limits.get("max_sequences"), *limits.get("sequence_buckets", ())[-1:]]
        running_limit = min(batch_tokens, *(rows for rows in most_rows if rows))
        return Scheduler(
            num_blocks=config.total_kv_blocks,
            block_size=config.kv_block_size,
            batch_tokens=batch_tokens,
            running_limit=running_limit,
            limits_running=running_limit < config.running_limit,
            limits_tokens=batch_tokens < config.max_batch_tokens,
            tokens_per_step=limits.get("max_tokens_per_step", 1),
            reserves=self.reserves,
            eos_token_id=EOS,
            aging_ns=config.priority_aging_s * SECOND,
            has_prefix_cache=not config.no_prefix_cache,
            mixes=limits.get("mixes_prefill_and_decode", True),
            max_prefill_sequences=limits.get("max_prefill_sequences"),
            sequence_buckets=limits.get("sequence_buckets", ()),
            max_batch_context=limits.get("max_batch_context"),
        )


@dataclass(frozen=True)
class Request:
    """As a client would send it."""

    prompt: int
    max_new: int
    priority: int
    arrival_ns: int
    prompt_ids: list[int] | None
    salt: tuple[int, int]
    ignore_eos: bool
    choices: int

    def sequence(self, slot: int) -> Sequence:
        fields = (self.prompt, self.max_new, self.priority, self.arrival_ns)
        return Sequence(slot, *fields, ignore_eos=self.ignore_eos, prompt_ids=self.prompt_ids, salt=self.salt)


class Load:
    """All choices of one run, from one random generator."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.random = random.Random(seed)
        self.longest = case.config.max_request_tokens
        # Tokens are few and so are beginnings, so that prompts share them and even what is generated is met again.
        self.beginnings = [[self.random.randint(1, 2) for _ in range(case.most_prompt)] for _ in range(3)]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def requests(self, oracle: Scheduler, now_ns: int) -> list[Request]:
        if not self.chance(self.case.arrival_chance):
            return []
        drawn = [self._request(oracle, now_ns) for _ in range(self.random.choice((1, 1, 1, 2, 4)))]
        return [request for request in drawn if request is not None]

    def _request(self, oracle: Scheduler, now_ns: int) -> Request | None:
        prompt = self.random.randint(1, min(self.case.most_prompt, self.longest - 1))
        request = Request(
            prompt=prompt,
            max_new=self.random.randint(1, min(self.case.most_new, self.longest - prompt)),
            priority=self.random.choice(self.case.priorities),
            arrival_ns=now_ns,
            prompt_ids=None if self.chance(self.case.unknown_chance) else self._prompt_ids(prompt),
            salt=self.random.choice(self.case.salts),
            ignore_eos=self.chance(0.5),
            choices=self.random.randint(2, 4) if self.chance(self.case.group_chance) else 1,
        )
        return request if oracle.fits_alone(request.sequence(0), request.choices) else None

    def _prompt_ids(self, length: int) -> list[int]:
        shared = self.random.randint(0, length)
        tail = [self.random.randint(1, 2) for _ in range(length - shared)]
        return self.random.choice(self.beginnings)[:shared] + tail

    def cancels(self, slots: list[int]) -> list[int]:
        return [self.random.choice(slots)] if slots and self.chance(self.case.cancel_chance) else []

    def time_step_ns(self) -> int:
        return self.random.choice(self.case.time_steps_ns)

    def outputs(self, rows: list[Row], most: int) -> list[list[int]]:
        """Mostly as many tokens as there may be, sometimes fewer, and rarely the end of the sequence."""
        counts = [self.random.choice((most, most, most, self.random.randint(0, most))) * row.emits for row in rows]
        return [[self.random.choice((1, 1, 1, 1, 2, 2, 2, EOS)) for _ in range(count)] for count in counts]


TIGHT = {"total_kv_blocks": 12, "kv_block_size": 4}
AGING: dict[str, Any] = {
    "priorities": (-8, -2, 0, 0, 1, 7),
    "time_steps_ns": (0, 1, 1_000_000, SECOND // 7, SECOND // 3, SECOND),
}
GROUPS: dict[str, Any] = {"group_chance": 0.4}
ALL: dict[str, Any] = AGING | GROUPS | {"salts": ((0, 0), (0, 0), (1, 2), (2, 1))}

CASES = {
    "one class": Case(TIGHT),
    "no prefix cache": Case(TIGHT | {"no_prefix_cache": True}),
    "blocks of one token": Case({"total_kv_blocks": 40, "kv_block_size": 1}, most_prompt=12, most_new=8),
    "blocks of 16": Case({"total_kv_blocks": 5, "kv_block_size": 16, "max_batch_tokens": 24}),
    "hardly any blocks": Case({"total_kv_blocks": 3, "kv_block_size": 4}, most_prompt=9, most_new=6),
    "one token a step": Case({"max_batch_tokens": 1}, most_prompt=6, most_new=5),
    "several tokens a row": Case(TIGHT, {"max_tokens_per_step": 3}),
    "priorities": Case(TIGHT, priorities=(-8, 0, 7)),
    "priorities and few places": Case({"max_running_seqs": 3}, priorities=(-8, -1, 0, 7)),
    "ageing": Case(TIGHT | {"priority_aging_s": 3}, **AGING),
    "groups": Case(TIGHT, **GROUPS),
    "groups, no cache": Case(TIGHT | {"no_prefix_cache": True}, **GROUPS),
    "groups in small chunks": Case({"total_kv_blocks": 24, "kv_block_size": 2, "max_batch_tokens": 6}, **GROUPS),
    "groups and several tokens": Case(TIGHT, {"max_tokens_per_step": 3}, **GROUPS),
    "all reserved": Case(TIGHT | {"priority_aging_s": 3}, reserves=True, **ALL),
    "all reserved, several tokens, losses": Case(
        TIGHT, {"max_tokens_per_step": 3}, loss_chance=0.02, failure_chance=0.02, reserves=True, **ALL
    ),
    "everything": Case(TIGHT | {"priority_aging_s": 3}, **ALL),
    "everything in blocks of one": Case(
        {"total_kv_blocks": 30, "kv_block_size": 1, "priority_aging_s": 3}, most_prompt=10, most_new=6, **ALL
    ),
    "max sequences": Case(TIGHT, {"max_sequences": 3}, **ALL),
    "max tokens": Case(TIGHT, {"max_tokens": 5}, **ALL),
    "turns": Case(TIGHT, {"mixes_prefill_and_decode": False}, **ALL),
    "one prompt at a time": Case(TIGHT, {"max_prefill_sequences": 1}, **ALL),
    "buckets": Case(TIGHT, {"sequence_buckets": (1, 2, 4), "token_buckets": (4, 8)}, **ALL),
    "context": Case(
        TIGHT | {"priority_aging_s": 3}, {"sequence_buckets": (1, 2, 4, 8), "max_batch_context": 64}, **ALL
    ),
    "turns, one prompt at a time": Case(
        TIGHT, {"mixes_prefill_and_decode": False, "max_prefill_sequences": 1, "max_tokens": 6}, **ALL
    ),
    "all limits": Case(
        TIGHT | {"priority_aging_s": 3},
        {
            "max_sequences": 6,
            "max_tokens": 12,
            "mixes_prefill_and_decode": False,
            "max_prefill_sequences": 2,
            "sequence_buckets": (2, 4, 8),
            "token_buckets": (4, 8, 16),
            "max_batch_context": 96,
            "max_tokens_per_step": 2,
        },
        **ALL,
    ),
    "losses and failures": Case(TIGHT | {"priority_aging_s": 3}, loss_chance=0.02, failure_chance=0.02, **ALL),
}
