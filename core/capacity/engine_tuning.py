"""Tuning: which settings of rollout engine and learner make a whole run at the least cost, found by trials.

One setting after the other is tried, the best so far kept (coordinate descent): some eight trials instead of
dozens. What a run costs is the start and its tokens at the rate of the trial, so compiling is chosen
where a run is long enough to pay for it. A trial says within some percent what a run will do, so nothing is
changed for less than `WORTH`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WORTH = 0.05
"""Share of its cost that a change must save."""

Unit = Literal["seconds", "cpu_seconds"]
"""What is spared: seconds where engine or learner have their machine, CPU seconds where they share it."""


Settings = Mapping[str, Any]
"""Key of a configuration -> value, of one engine or of the learner."""


def overrides(settings: Settings) -> list[str]:
    """Return settings as a configuration is given them.

    >>> overrides({"rollout.compiled": True, "model.dtype": "float32"})
    ['rollout.compiled=true', 'model.dtype=float32']
    """
    return [f"{key}={str(value).lower()}" for key, value in settings.items()]


def describe(settings: Settings) -> str:
    """Say settings in words."""
    if "learner.threads" in settings:
        return f"learner, {_threads(settings['learner.threads'])}"
    caching = "prefix caching, " if settings["rollout.prefix_caching"] else ""
    how = "compiled" if settings["rollout.compiled"] else "eager"
    threads, blocks = _threads(settings["rollout.threads"]), settings["rollout.block_size"]
    return f"{settings['model.dtype']}, {threads}, blocks of {blocks}, {caching}{how}"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What one engine or learner did."""

    start: Mapping[Unit, float]
    """Until it could sample or train."""
    sampling: Mapping[Unit, float]
    """For `tokens`."""
    tokens: int
    """Sampled, or trained; at least one."""
    completion_tokens: float
    """Mean tokens of completions that ended, or that were trained."""

    def rate(self, unit: Unit) -> float:
        """Return tokens per second, or per CPU second."""
        return self.tokens / self.sampling[unit]

    def cost(self, unit: Unit, tokens: float) -> float:
        """Return what one takes with its start that samples or trains this many tokens, in `unit`.

        >>> eager = Trial({"seconds": 8.0}, {"seconds": 2.0}, 2000, 100.0)
        >>> compiled = Trial({"seconds": 40.0}, {"seconds": 1.0}, 2000, 100.0)
        >>> [compiled.cost("seconds", tokens) < eager.cost("seconds", tokens) for tokens in (10_000, 100_000)]
        [False, True]
        """
        return self.start[unit] + tokens * self.sampling[unit] / self.tokens


def choose(
    begin: Settings,
    values: Mapping[str, Sequence[Any]],
    attempt: Callable[[Settings], Trial | None],
    unit: Unit,
    completions: float,
) -> Settings:
    """Return the settings of least cost that were found.

    Args:
        begin: what is set now; it is kept unless something else saves `WORTH`.
        values: key -> values to try, in the order in which settings are tried.
        attempt: tries settings; None where an engine cannot have them, or what it did says nothing.
        unit: what is spared.
        completions: what one engine samples, or the learner trains, in the run.

    Raises:
        ValueError: when the settings of now cannot be had.
    """
    first = attempt(begin)
    if first is None:
        raise ValueError("the settings that are set now gave no trial to compare with")
    # The same tokens for all: completions of a trial that was cut short are other ones.
    tokens = completions * first.completion_tokens
    best, least = begin, first.cost(unit, tokens)
    for name, tried in values.items():
        for value in tried:
            candidate = {**best, name: value}
            if value == best[name] or (found := attempt(candidate)) is None:
                continue
            if (cost := found.cost(unit, tokens)) < (1.0 - WORTH) * least:
                best, least = candidate, cost
    return best
