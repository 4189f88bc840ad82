"""Environments from outside: classes of other packages, checked where they are built.

What is wrong with one is a sentence that names it, before anything starts; the class itself stays as it is.
"""

import contextlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from antiphon.core.errors import AntiphonError, ConfigError, ContractError
from antiphon.core.messages import Reply, Tool
from antiphon.environments.conversation import Conversation, opening
from antiphon.environments.environment import Problem, reward_range_of
from antiphon.environments.scoring.messages import Failed, attempt, checked_reward, turn_line
from antiphon.system.packages import (
    ENVIRONMENTS,
    find_package,
    named_folders,
    reference_of,
    search_working_directory,
)

METHODS = ("problem", "size", "problem_by_key")
ARGUMENTS = "(parameters, seed, train_size, heldout_size)"
ELSEWHERE_S = 120.0
"""Longest time that another process may take to build an environment and its first problems."""
COMPARED = 64
"""Prompts of each split that are looked at before a run."""

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def installed_names() -> list[str]:
    """Return the names that installed packages give their environments."""
    return sorted(name for name in entry_points(group=ENVIRONMENTS).names if reference_of(name))


def folders_of(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return where a scoring process finds an environment from outside, and what it must read of that.

    Those are its package and the folders that PYTHONPATH names; both are empty for one of ours.
    """
    reference = reference_of(name)
    package = None if reference is None else find_package(reference)
    if package is None:
        return (), ()
    named = [str(folder) for folder in named_folders()]
    return (str(package.root), *named), (str(package.path), *named)


def secret_values(names: Sequence[str], field: str = "environment.secrets") -> dict[str, str]:
    """Return the values of the variables that a field of the configuration names.

    Raises:
        ConfigError: when one is not set.
    """
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(
            f"{field} names {', '.join(missing)}, which is not set here; export it where the run is started"
        )
    return {name: os.environ[name] for name in names}


class OutsideEnvironment:
    """An environment of another package; what it does wrong is said in one sentence.

    One that makes conversations has what a `ConversationEnvironment` has besides.
    """

    conversation: Callable[[], Conversation]
    rebuildable: bool
    reward_range: tuple[float, float]
    tools: tuple[Tool, ...]

    def __init__(
        self,
        name: str,
        reference: str,
        parameters: Mapping[str, Any],
        seed: int,
        train_size: int,
        heldout_size: int,
    ) -> None:
        """Import the class and build it.

        Raises:
            ConfigError: when the module or the class is missing or fails, or lacks what an environment has.
        """
        self.name = name
        self._called = f"environment.name={name}"
        made = import_named(self._called, reference, "class")
        arguments = self._arguments = (dict(parameters), seed, train_size, heldout_size)
        try:
            inspect.signature(made).bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"{self._called}: {reference} cannot be built from {ARGUMENTS}: {error}"
            ) from error
        if lacking := [*getattr(made, "__abstractmethods__", ())]:
            raise ConfigError(f"{self._called}: {reference} lacks {' and '.join(sorted(lacking))}")
        try:
            self._inner = self._tried("building it", lambda: made(*arguments))
        except ConfigError as error:
            if isinstance(missing := error.__cause__, KeyError) and missing.args[0] not in parameters:
                raise ConfigError(
                    f"{self._called}: {reference} needs the parameter {missing.args[0]}, which has no "
                    f"default; set environment.parameters.{missing.args[0]}, or give it one in `defaults`"
                ) from error
            raise
        self.has_turns = callable(getattr(self._inner, "conversation", None))
        for method in (*METHODS, "conversation" if self.has_turns else "reward"):
            if not callable(getattr(self._inner, method, None)):
                raise ConfigError(
                    f"{self._called}: {reference} has no method {method}; an environment has "
                    f"{', '.join(METHODS)} and reward, or conversation where it has turns"
                )
        if self.has_turns:
            self._take_turns()
        self.only_compares = getattr(self._inner, "only_compares", False) is True
        self.reward_range = self._tried("reward_range", lambda: reward_range_of(self._inner))
        if callable(explain := getattr(self._inner, "explain", None)):
            self.explain = explain  # why a completion got its reward, where the class can say so
        self.about = (inspect.getdoc(made) or "").partition("\n")[0]
        """The first line of the class's docstring."""
        self.defaults = dict(getattr(made, "defaults", {}))
        """Its parameters with their defaults, where it says so."""
        self.reference = reference

    def problem(self, split: str, index: int) -> Problem:
        what = f"problem({split!r}, {index})"
        return self._checked(what, self._tried(what, lambda: self._inner.problem(split, index)))

    def size(self, split: str) -> int:
        return int(self._tried(f"size({split!r})", lambda: self._inner.size(split)))

    def problem_by_key(self, key: str) -> Problem:
        what = f"problem_by_key({key[:80]!r})"
        return self._checked(what, self._tried(what, lambda: self._inner.problem_by_key(key)))

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        if self.has_turns:
            raise ContractError(f"{self._called} has turns; its conversations give the rewards")
        return self._inner.reward(problem, completions)  # type: ignore[no-any-return]

    def try_out(self) -> None:
        """Ask for some problems and the rewards of harmless answers, or what is said to them, as a run will.

        Raises:
            ConfigError: when a problem or its beginning does not repeat, splits share one, a reward is none,
                or a reply is not answered.
        """
        seen: dict[str, str] = {}
        for split in ("train", "heldout"):
            for index in range(min(COMPARED, self.size(split))):
                problem = self.problem(split, index)
                if self.problem_by_key(problem.key) != problem or self.problem(split, index) != problem:
                    raise ConfigError(
                        f"{self._called}: {problem.key} is another problem each time it is asked for"
                    )
                other = seen.setdefault(problem.text, problem.key)
                if other.partition("-")[0] != problem.key.partition("-")[0]:
                    raise ConfigError(
                        f"{self._called}: {problem.key} has the same prompt as {other}; held-out problems "
                        "must not be trained on"
                    )
        problem = self.problem("train", 0)
        if self.has_turns:
            self._try_conversation(problem)
        else:
            self._try_rewards(problem)
        self._check_elsewhere()

    def _try_rewards(self, problem: Problem) -> None:
        answers = [problem.answer, ""]
        rewards = self._tried("reward(...)", lambda: self._inner.reward(problem, answers))
        if not isinstance(rewards, Sequence) or len(rewards) != len(answers):
            raise ConfigError(
                f"{self._called}: reward(...) returned {rewards!r:.80}, not one number for each answer"
            )
        for reward in rewards:
            if isinstance(verdict := checked_reward(reward, self.reward_range), Failed):
                raise ConfigError(f"{self._called}: {verdict.reason.replace('the scorer', 'reward(...)')}")

    def _try_conversation(self, problem: Problem) -> None:
        if opening(self, problem, 1) != opening(self, problem, 1):
            raise ConfigError(
                f"{self._called}: begin(...) of {problem.key} gives other messages each time; all chance "
                "must come from its problem and seed"
            )
        for text in (problem.answer, ""):
            conversation = self.conversation()
            conversation.begin(problem, 1)
            turn = attempt(partial(conversation.answer, Reply(text)), self.reward_range, str)
            if isinstance(turn, Failed):
                raise ConfigError(f"{self._called}: answer(...) to the reply {text!r:.40}: {turn.reason}")

    def _take_turns(self) -> None:
        """Take over what an environment with turns says of itself, and check it."""
        self.conversation = self._inner.conversation
        self.rebuildable = getattr(self._inner, "rebuildable", True)
        if not isinstance(self.rebuildable, bool):
            raise ConfigError(f"{self._called}: rebuildable={self.rebuildable!r:.40} must be True or False")
        low, high = self._tried("reward_range", lambda: reward_range_of(self._inner))
        self.unfinished_reward = getattr(self._inner, "unfinished_reward", low)
        if not (isinstance(self.unfinished_reward, (int, float)) and low <= self.unfinished_reward <= high):
            raise ConfigError(
                f"{self._called}: unfinished_reward={self.unfinished_reward!r:.40} is no number from {low:g} "
                f"to {high:g}, which are its rewards"
            )
        self.tools = tuple(self._tried("tools", lambda: getattr(self._inner, "tools", ())))
        for tool in self.tools:
            if not isinstance(tool, Tool):
                raise ConfigError(f"{self._called}: tools has a {type(tool).__name__} instead of a Tool")
            if sum(tool.name == other.name for other in self.tools) > 1:
                raise ConfigError(f"{self._called}: tools has two of the name {tool.name!r:.40}")

    def _check_elsewhere(self) -> None:
        """Compare the problems with those of another process, in which sets and hashes have another order."""
        from antiphon.system.processes import output_of  # no scoring process needs it

        counts = {split: min(COMPARED, self.size(split)) for split in ("train", "heldout")}
        asked = json.dumps([self.name, *self._arguments, counts])
        built, said = output_of("antiphon.environments.outside", given=asked, timeout_s=ELSEWHERE_S)
        if not built:
            said = said.removeprefix(f"{self._called}: ")
            raise ConfigError(f"{self._called}: another process cannot build it: {said}")
        for ours, other in zip(_problems(self, counts), json.loads(said), strict=True):
            if ours != other:
                raise ConfigError(
                    f"{self._called}: {ours[0]} is another problem in another process ({ours[1][-60:]!r} and "
                    f"{other[1][-60:]!r}); draw from a list or sorted(...) instead of a set, and by the "
                    "given random numbers alone"
                )

    def _checked(self, what: str, found: Any) -> Problem:
        if not isinstance(found, Problem):
            raise ConfigError(f"{self._called}: {what} returned {type(found).__name__} instead of a Problem")
        for field in ("key", "text", "answer"):
            if not isinstance(value := getattr(found, field), str):
                raise ConfigError(
                    f"{self._called}: {field} of {what} is of type {type(value).__name__} instead of text"
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{self._called}: {field} of {what} ({found.key[:80]!a}) holds {value[error.start]!a}, "
                    "half a character, as cut JSON has it; repair the data"
                ) from error
        if not found.key or not found.text:
            raise ConfigError(f"{self._called}: {what} has an empty {'text' if found.key else 'key'}")
        return found

    def _tried(self, what: str, work: Any) -> Any:
        return tried(self._called, what, work)


def import_named(called: str, reference: str, kind: str) -> Any:
    """Return the class or the function that `package.module:name` means.

    Args:
        called: the field with its value, with which what is wrong begins.
        reference: what is looked for.
        kind: "class" or "function".

    Raises:
        ConfigError: when the module or what is named in it is missing, or importing it fails.
    """
    if not _REFERENCE.fullmatch(reference):
        raise ConfigError(f"{called}: {reference!r} is no package.module:{kind.replace('class', 'Class')}")
    module_name, _, name = reference.partition(":")
    if find_package(module_name) is None:
        raise ConfigError(
            f"{called}: there is no module {module_name}; install its package beside Antiphon "
            "(.venv/bin/python -m pip install PATH), or name its folder in PYTHONPATH"
        )
    search_working_directory()
    module = tried(called, f"importing {module_name}", lambda: importlib.import_module(module_name))
    if not callable(found := getattr(module, name, None)):
        wanted = inspect.isclass if kind == "class" else inspect.isfunction
        others = [
            key
            for key, value in vars(module).items()
            if wanted(value) and value.__module__ == module.__name__
        ]
        there = f"it has {', '.join(others)}" if others else f"it has no {kind}"
        raise ConfigError(f"{called}: module {module_name} has no {kind} {name}; {there}")
    return found


def tried(called: str, what: str, work: Any) -> Any:
    """Return what the user's code does in `work`.

    Raises:
        ConfigError: when it raises, in a sentence that begins with `called` and names `what`.
    """
    try:
        return work()
    except AntiphonError as error:
        kind = ContractError if isinstance(error, ContractError) else ConfigError
        raise kind(f"{called}: {error}") from error
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{called}: {what} raised {type(error).__name__}: {said}") from error


def _problems(environment: OutsideEnvironment, counts: Mapping[str, int]) -> list[list[str]]:
    found = [environment.problem(split, index) for split, size in counts.items() for index in range(size)]
    if environment.has_turns:
        begun = [turn_line(opening(environment, problem, 1)).decode() for problem in found]
    else:
        begun = [""] * len(found)
    return [[one.key, one.text + said, one.answer] for one, said in zip(found, begun, strict=True)]


if __name__ == "__main__":
    named, *rest, wanted = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a class may print
            problems = _problems(OutsideEnvironment(named, reference_of(named) or "", *rest), wanted)
        print(json.dumps(problems))
    except AntiphonError as error:
        sys.exit(str(error))
