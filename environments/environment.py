"""Environment: source of prompts and rewards, and nothing else.

An environment is a pure function of its configuration: the same split, seed and index give
the same problem on every machine, so a prompt key is enough to reward an answer anywhere.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.messages import UNIT_RANGE, RewardRange

SPLITS = ("train", "heldout")
LARGEST_REWARD = 1e9
"""Sums of squares of larger ones could be no float."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt as text, and what rewarding its answers needs."""

    key: str
    """`<split>-<seed>-<index>`; `Environment.problem_by_key` finds the problem again."""
    text: str
    """The prompt as the model sees it, before the tokenizer."""
    answer: str
    """A reference answer, for reports and warm starts; others may be rewarded too."""


class Problems(Protocol):
    """Where prompts come from; where rewards lie elsewhere than in [0, 1], it also has an attribute
    `reward_range`: see `reward_range_of`.
    """

    name: str
    only_compares: bool
    """Whether the task is known to do no more with a text than compare it with another, or with a number that
    it stands for. Everything else is done in a sandbox."""

    def problem(self, split: str, index: int) -> Problem:
        """Return problem `index` of `split` ("train" or "heldout").

        Raises:
            ConfigError: when the split is unknown or the index lies outside it.
        """

    def size(self, split: str) -> int:
        """Return how many problems `split` has."""

    def problem_by_key(self, key: str) -> Problem:
        """Find a problem again from its key.

        Raises:
            ContractError: when the key was not made by this environment.
        """


class Environment(Problems, Protocol):
    """What a task of one turn must provide to be trained on; `conversation` has that of several."""

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Score each completion's text within its range; never raises for what a model wrote."""


def reward_range_of(environment: object) -> RewardRange:
    """Return the least and the largest reward that an environment states; 0 and 1 where it states none.

    Raises:
        ConfigError: when what it states is no range.
    """
    stated = getattr(environment, "reward_range", UNIT_RANGE)
    try:
        low, high = map(float, stated)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -LARGEST_REWARD <= low < high <= LARGEST_REWARD:
        raise ConfigError(
            f"reward_range={stated!r:.80} is no pair (low, high) with low below high, each a number of at "
            f"most {LARGEST_REWARD:g}; state the least and the largest reward"
        )
    return low, high


class SplitEnvironment(ABC):
    """The problems of two splits of given sizes, which are found by index and by key."""

    name: str = ""

    def __init__(self, seed: int, train_size: int, heldout_size: int) -> None:
        self.seed = seed
        self._sizes = dict(zip(SPLITS, (train_size, heldout_size), strict=True))

    @abstractmethod
    def make(self, split: str, index: int) -> Problem:
        """Return a problem whose split and index are known to be right."""

    def problem(self, split: str, index: int) -> Problem:
        if not 0 <= index < self.size(split):
            raise ConfigError(
                f"problem {index} lies outside split {split!r} of {self.name or 'this environment'}, "
                f"which has {self._sizes[split]}; raise environment.{split}_size"
            )
        return self.make(split, index)

    def size(self, split: str) -> int:
        if split not in self._sizes:
            raise ConfigError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
        return self._sizes[split]

    def problem_by_key(self, key: str) -> Problem:
        return self.problem(*self.place_of(key))

    def place_of(self, key: str) -> tuple[str, int]:
        """Return split and index of the problem that a key names.

        Raises:
            ContractError: when the key was not made by this environment.
        """
        split, index = key.partition("-")[0], key.rpartition("-")[2]
        place = int(index) if index.isdecimal() and len(index) < 20 else -1
        if 0 <= place < self._sizes.get(split, 0) and key == key_of(split, self.seed, place):
            return split, place
        raise ContractError(
            f"prompt key {key[:80]!r} is not one of {self.name or 'this environment'} with "
            f"environment.seed={self.seed}, train_size={self._sizes['train']}, heldout_size="
            f"{self._sizes['heldout']}; both sides of a run need the same environment configuration"
        )


def key_of(split: str, seed: int, index: int) -> str:
    """Return the key of a problem."""
    return f"{split}-{seed}-{index}"


def check_names(parameters: Mapping[str, Any], known: Collection[str]) -> None:
    """Check that a task takes the parameters that it is given.

    Raises:
        ConfigError: naming one that it does not take, and the closest.
    """
    for key in parameters:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            hint = f"did you mean {close[0]}?" if close else takes
            raise ConfigError(f"environment.parameters.{key} is not a parameter of this task; {hint}")


def checked(parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's parameters, with the defaults of those that are not given.

    Raises:
        ConfigError: for a parameter that is not among the defaults, or of another type than there.
    """
    check_names(parameters, defaults)
    for key, value in parameters.items():
        wanted = type(defaults[key])
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if defaults[key] is not None and (not fits or (isinstance(value, bool) and wanted is not bool)):
            raise ConfigError(f"environment.parameters.{key}={value!r} must be of type {wanted.__name__}")
    return {**defaults, **parameters}


@runtime_checkable
class Explains(Protocol):
    """What an environment may have besides: it says why a completion got its reward."""

    def explain(self, problem: Problem, completion: str, reward: float) -> str:
        """Return a few words, such as "answer '12', expected '15'"; it compares texts and runs nothing."""


def explain(environment: Problems, problem: Problem, completion: str, reward: float) -> str:
    """Say why a completion got its reward; of an environment that does not know, what was expected."""
    if isinstance(environment, Explains):
        return environment.explain(problem, completion, reward)
    best = reward >= reward_range_of(environment)[1]
    return "" if best or not problem.answer else f"the reference answer is {problem.answer!r}"
