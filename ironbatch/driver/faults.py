"""Faults that a reference device can be made to have, each a fault of some device in the field."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Final

from ironbatch.errors import ConfigError
from ironbatch.limits import quoted

LOST_FENCE: Final = "lost-fence"
"""The batch runs, and its fence is not signalled before the context's next one."""

LATE_FENCE: Final = "late-fence"
"""The batch runs, and its fence is signalled between one and two times longest_step_us later."""

DUPLICATE_FENCE: Final = "duplicate-fence"
"""The fence is signalled again after the context's next one: the status page goes back, until the one after that."""

EIO: Final = "eio"
"""The batch fails; what it would have written is garbage, and there are no results."""

SHORT_RING: Final = "short-ring"
"""The submission is refused: no room for the results, the device says."""

RESET: Final = "reset"
"""The device resets itself in the place of running the batch."""

HANG: Final = "hang"
"""The process that serves the device stops (SIGSTOP) in the place of running the batch."""

VANISH: Final = "vanish"
"""That process dies (SIGKILL) in the place of running the batch."""

KINDS: Final = (LOST_FENCE, LATE_FENCE, DUPLICATE_FENCE, EIO, SHORT_RING, RESET, HANG, VANISH)
OF_A_PROCESS: Final = frozenset({HANG, VANISH})
"""What only a device that is a process of its own can have."""


class Faults:
    """Which of the batches that a device is given meet a fault: the same ones for the same seed.

    Args:
        kinds: of KINDS; `kind@N` plants this one in the Nth batch (from 1) that is submitted, and nowhere else.
        rate: the probability that a batch meets one of the kinds that have no number.
        seed: of the random numbers.

    Raises:
        ConfigError: an unknown kind, or a rate that is none.
    """

    def __init__(self, kinds: Iterable[str] = (), rate: float = 0.0, seed: int = 0) -> None:
        self._planted: dict[int, str] = {}
        self._kinds: list[str] = []
        self._rate = rate
        self._random = random.Random(seed)  # noqa: S311 - it must be the same for the same seed
        self._batches = 0
        problems = [problem for text in kinds if (problem := self._add(text))]
        if not 0 <= rate <= 1:
            problems.append(f"--inject-rate: {rate} is not between 0 and 1; use a probability such as 0.02")
        if problems:
            raise ConfigError(problems)

    @property
    def kinds(self) -> frozenset[str]:
        """All that may happen."""
        return frozenset(self._kinds) | frozenset(self._planted.values())

    def draw(self) -> str | None:
        """What the next batch meets; None for most."""
        self._batches += 1
        happens = self._random.random() < self._rate  # drawn each time, so that planted ones move no others
        if self._batches in self._planted:
            return self._planted[self._batches]
        return self._random.choice(self._kinds) if happens and self._kinds else None

    def late_ns(self, longest_step_ns: int) -> int:
        """How much too late a late fence is."""
        return self._random.randint(longest_step_ns, 2 * longest_step_ns)

    def _add(self, text: str) -> str:
        """Take one of the kinds; the answer is what is wrong with it."""
        kind, at, number = text.partition("@")
        if kind not in KINDS:
            return f"--inject: {quoted(kind)} is no fault; use some of {', '.join(KINDS)}"
        if not at:
            self._kinds.append(kind)
        elif re.fullmatch("[1-9][0-9]{0,17}", number) is None:
            return f"--inject: {quoted(text)} names no batch; use a number from 1 on, such as {kind}@3"
        elif self._planted.get(int(number), kind) != kind:
            return f"--inject: batch {number} has {self._planted[int(number)]} already; give {kind} to another one"
        else:
            self._planted[int(number)] = kind
        return ""
