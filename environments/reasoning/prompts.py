"""Prompts: any task of reasoning-gym as an environment with two splits that never share a problem.

What a problem asks, its text or, of a task that draws wordings, its meaning, decides its split: a fixed
quarter of all is held out, whatever the seed and the sizes. So no train split, and no warm start that draws
from one, can contain a held-out problem of any run. Problems are generated on demand; problem i of a split is
the i-th of the seed's stream that belongs there and was not there yet, the same on every machine.
"""

import dataclasses
import difflib
import json
import random  # noqa: TID251 - the library draws from it
from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Problem, SplitEnvironment, key_of
from antiphon.environments.reasoning import library, reward

FAMILY = "reasoning"

RESERVED = {"seed": "environment.seed", "size": "environment.train_size"}
"""Fields of every task that the environment's own keys decide."""
SUFFIX = "prompt_suffix"
"""The one parameter that is not the task's: text put after each prompt, such as an instruction
to answer between the tags. Models that were not trained to write the tags need one."""

STREAM_RATIO = 8
"""Problems the library may make for each one a split needs; a split takes a quarter or more."""
STREAM_FLOOR = 1_024
"""Length of the shortest stream: a short one might hold too few of the rarer split at random."""

_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
"""Types of task parameters that are checked here; the task checks what is more involved."""
WORDED = frozenset({"calendar_arithmetic"})
"""Tasks that draw one of several wordings for a question: two of them are one problem."""
EXECUTING = frozenset({"codeio", "composite"})
"""Tasks that make a problem by executing code of the library's data, or may have one that does as a part."""
_NOT_ASKED = frozenset({"source_dataset", "source_index", "difficulty"})
"""What an entry's metadata says besides the question."""


def task_names() -> list[str]:
    """Return the library's task names, sorted."""
    return sorted(library.all_tasks())


def knows(task: str) -> bool:
    """Return whether the library has a task, which is loaded then."""
    try:
        library.load_task(task)
    except KeyError:
        return False
    return True


def about(task: str) -> str:
    """Return the library's sentence about a task."""
    dataset, config = library.load_task(task)
    said = (dataset.__doc__ or config.__doc__ or "").strip().splitlines()
    return said[0].strip() if said else ""


def parameters_of(task: str) -> dict[str, Any]:
    """Return the parameters that a task takes, with their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(library.load_task(task)[1]):
        if field.name in RESERVED:
            continue
        made = field.default_factory
        found[field.name] = field.default if made is dataclasses.MISSING else made()
    return {**found, SUFFIX: ""}


def split_of(asked: str) -> str:
    """Return the split that a problem belongs to, by what it asks: a fixed quarter is held out."""
    return "heldout" if derive_seed("reasoning-split", asked) % 4 == 0 else "train"


def problem_of(task: str, entry: Mapping[str, Any]) -> str:
    """Return what a problem asks, which is its text unless the task draws a wording for it."""
    if task not in WORDED:
        return str(entry["question"])
    asked = {key: value for key, value in entry["metadata"].items() if key not in _NOT_ASKED}
    return json.dumps([asked, entry["answer"]], sort_keys=True)


class ReasoningEnvironment(SplitEnvironment):
    """One task of reasoning-gym with fixed parameters, seed and sizes."""

    def __init__(
        self,
        task: str,
        parameters: Mapping[str, Any],
        seed: int,
        train_size: int,
        heldout_size: int,
        repeats: bool = False,
    ):
        """Check the parameters and open the two streams; no problem is generated yet.

        `repeats` lets a problem come again within a split, as demonstrations may.

        Raises:
            ConfigError: when the task does not know or cannot accept a parameter, or a size is
                not positive.
        """
        for key, value in (("train_size", train_size), ("heldout_size", heldout_size)):
            if value < 1:
                raise ConfigError(f"environment.{key}={value} must be at least 1")
        super().__init__(seed, train_size, heldout_size)
        self.name = f"{FAMILY}/{task}"
        self.only_compares = reward.only_compares(task)
        own = dict(parameters)
        self._suffix = own.pop(SUFFIX, "")
        if not isinstance(self._suffix, str):
            raise ConfigError(f"environment.parameters.{SUFFIX}={self._suffix!r} must be text")
        _check_names(task, own)
        self._streams = {
            split: _Stream(task, own, seed, split, size, repeats) for split, size in self._sizes.items()
        }

    def make(self, split: str, index: int) -> Problem:
        """Return a problem.

        Raises:
            ConfigError: when the task has too few different problems to fill the split.
        """
        entry = self._streams[split].entry(index)
        answer = entry["answer"]
        return Problem(
            key=key_of(split, self.seed, index),
            text=entry["question"] + self._suffix,
            answer="" if answer is None else str(answer),
        )

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Score each completion's text: 1.0 when its closing answer is right, else 0.0.

        Raises:
            ContractError: when the problem is not one of this environment; never for what a
                model wrote.
        """
        split, index = self.place_of(problem.key)
        stream = self._streams[split]
        entry = stream.entry(index)
        return [reward.score(stream.task, stream.dataset, entry, completion) for completion in completions]

    def explain(self, problem: Problem, completion: str, reward_: float) -> str:
        """Say why a completion got its reward, without scoring it again."""
        return reward.explain(problem.answer, completion, reward_)


class _Stream:
    """The problems of one split in order, generated as far as anyone asked."""

    def __init__(
        self, task: str, parameters: dict[str, Any], seed: int, split: str, size: int, repeats: bool
    ):
        self.task = task
        self._repeats = repeats
        self._seen: set[str] = set()
        self.split = split
        # The library gets it too: a few tasks plan all their problems ahead, and acre's plan,
        # alone among them, depends on how many there are.
        self.length = max(STREAM_FLOOR, STREAM_RATIO * size)
        # The library draws problem i from seed + i: neighbouring seeds would share problems.
        stream_seed = derive_seed("reasoning", task, split, seed) % 2**31
        try:
            self.dataset = library.create(task, seed=stream_seed, size=self.length, **parameters)
        except (AssertionError, TypeError, ValueError, AttributeError, LookupError) as error:
            named = [name for name in parameters if name in str(error)] or list(parameters)
            fields = ", ".join(f"environment.parameters.{name}={parameters[name]!r}" for name in named)
            raise ConfigError(
                f"{fields or 'environment.parameters'}: {FAMILY}/{task} refuses this: {error}"
            ) from error
        self._entries: list[dict[str, Any]] = []
        self._next = 0

    def entry(self, index: int) -> dict[str, Any]:
        while len(self._entries) <= index:
            if self._next == self.length:
                raise ConfigError(
                    f"{FAMILY}/{self.task} with these environment.parameters has too few different "
                    f"problems for the split {self.split!r}: {self.length} draws gave {len(self._entries)}; "
                    f"lower environment.{self.split}_size, or make the task more varied (larger numbers or "
                    "ranges)"
                )
            state = random.getstate()
            random.seed(self._next)  # list_functions draws from the interpreter's numbers, too
            self._next += 1
            try:
                candidate = self.dataset[self._next - 1]
            except (TypeError, ValueError):
                if self.task not in EXECUTING:
                    raise
                continue  # what the code returned cannot be written as JSON
            finally:
                random.setstate(state)
            asked = problem_of(self.task, candidate)
            if split_of(asked) == self.split and (self._repeats or asked not in self._seen):
                self._seen.add(asked)
                self._entries.append(candidate)
        return self._entries[index]


def _check_names(task: str, parameters: Mapping[str, Any]) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(library.load_task(task)[1])}
    known = set(fields) - set(RESERVED)
    for name, value in parameters.items():
        if name in RESERVED:
            raise ConfigError(f"environment.parameters.{name} is set by {RESERVED[name]}; remove it here")
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(known))}"
            raise ConfigError(f"environment.parameters.{name} is not a parameter of {FAMILY}/{task}; {hint}")
        wanted = _PLAIN_TYPES.get(str(getattr(fields[name], "__name__", fields[name])))
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise ConfigError(
                f"environment.parameters.{name}={value!r} must be of type {wanted[-1].__name__}"
            )
