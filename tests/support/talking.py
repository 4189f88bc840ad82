"""Environments with turns: a guessing game, an adder with tools, an echo, a shell, and bad ones."""

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.messages import Ended, Message, Reply
from antiphon.core.seeds import generator
from antiphon.environments.conversation import user
from antiphon.environments.environment import Problem
from antiphon.environments.tools import Function, ToolConversation, python, shell, tool_of

FACTORY = "talking:make_environment"
FOLDER = str(Path(__file__).parent)
"""In which a scoring process finds this module, and the one that starts it."""
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
LARGEST = 100


class Guessing:
    """The policy guesses a number; each guess in vain costs a tenth."""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        self.number = int(generator("guessing", problem.key, seed).integers(LARGEST))
        self.guesses = 0
        return [user(f"Guess a number below {LARGEST}.")]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        self.guesses += 1
        if not reply.text.isdecimal():
            return [user("That is no number.")]
        if int(reply.text) == self.number:
            return Ended(max(0.0, 1.1 - 0.1 * self.guesses), {"guesses": self.guesses}, "found")
        return [user(f"{self.guesses}: {'higher' if int(reply.text) < self.number else 'lower'}")]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    if b == 0.0:
        raise ValueError("b must not be 0")
    return a / b


class Adding(ToolConversation):
    """Ends with the first reply that calls no tool."""

    def fetch(self, what: str) -> str:
        """Look up what was asked."""
        return f"{what} of {self.problem.key}"

    functions: tuple[Function, ...] = (add, divide, fetch)  # type: ignore[misc]

    def said(self, reply: Reply) -> Ended:
        return Ended(float(reply.text == self.problem.answer))


class Tooled(Adding):
    """Has a shell and Python."""

    functions = (shell, python)


class Echo:
    """Says the first reply again and ends with the second, worth -2..2."""

    said = ""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        return [Message("system", "You are an echo."), user(problem.text)]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        if not self.said:
            self.said = reply.text
            return [user(f"You said: {reply.text}")]
        return Ended(2.0 if reply.text == self.said else -2.0)


class Bad:
    """Does what a reply says, which is an expression."""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        return [user("Do your worst.")]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        names = {"user": user, "Ended": Ended, "Message": Message, "os": os, "time": time, "signal": signal}
        return eval(reply.text, {**names, "sys": sys, "self": self})  # type: ignore[no-any-return]


KINDS: dict[str, type[Any]] = {
    "guessing": Guessing, "adding": Adding, "tooled": Tooled, "echo": Echo, "bad": Bad
}  # fmt: skip


class Talking:
    """The environment of one of these kinds."""

    only_compares = False

    def __init__(self, name: str, *, rebuildable: bool = True) -> None:
        self.name = name
        self.rebuildable = rebuildable
        self.reward_range = (-2.0, 2.0) if name == "echo" else (0.0, 1.0)
        self.conversation = KINDS[name]
        self.tools = [tool_of(function) for function in getattr(self.conversation, "functions", ())]

    def problem(self, split: str, index: int) -> Problem:
        return Problem(f"{split}-0-{index}", f"Say {index}.", str(index))

    def size(self, split: str) -> int:
        return 1 << 20

    def problem_by_key(self, key: str) -> Problem:
        return self.problem(key.partition("-")[0], int(key.rpartition("-")[2]))


def make_environment(
    name: str, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int
) -> Talking:
    """Build the one that `name` says."""
    return Talking(name, **parameters)


def without_user_namespaces(*arguments: Any) -> Talking:
    """Build one as on a machine whose kernel makes no further user namespace."""
    from antiphon.environments.scoring import tool_processes

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tool_processes.own_user = refuse
    return make_environment(*arguments)
