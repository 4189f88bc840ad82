"""Tools: plain functions that a policy may call, and a shell and Python in the sandbox.

A function's signature is its JSON schema and its docstring its description. What is wrong with a call is a
message for the policy to read, and no error. `shell` and `python` run in processes of the trajectory's own
(`scoring.tool_processes`), which only its process in the sandbox has.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar, Protocol

from pydantic import TypeAdapter, ValidationError, validate_call

from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.messages import Ended, Message, Reply, Tool, ToolCall
from antiphon.environments.conversation import tool_answer, user
from antiphon.environments.environment import Problem

Function = Callable[..., object]
"""A tool. One whose first parameter is `self` gets the conversation."""


class Runs(Protocol):
    """Runs a text in a trajectory's own process of the sandbox."""

    def __call__(self, tool: str, text: str) -> str:
        """Return what running it wrote."""


def _nowhere(tool: str, text: str) -> str:
    raise ContractError(
        f"the tool {tool} runs in the sandbox of a trajectory alone, so `begin` cannot call it, nor an "
        "environment that only compares or is scored without a sandbox"
    )


_running: list[Runs] = [_nowhere]


def run_with(runs: Runs) -> None:
    """Let `shell` and `python` of this process run where `runs` does."""
    _running[0] = runs


def shell(command: str) -> str:
    """Run a command of the shell. Its folder is yours: files stay there from call to call."""
    return _running[0]("shell", command)


def python(code: str) -> str:
    """Run Python code; returns what it prints and its last value. Variables stay from call to call."""
    return _running[0]("python", code)


def tool_of(function: Function) -> Tool:
    """Return what the policy is told of a function.

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_of(add).description, tool_of(add).parameters["properties"]["b"]
    ('Add two numbers.', {'type': 'integer'})

    Raises:
        ConfigError: when a parameter's type has no JSON schema, or there is no docstring.
    """
    name = function.__name__
    if not (description := inspect.getdoc(function)):
        raise ConfigError(f"the tool {name} has no docstring, by which the policy knows what it does")
    try:
        schema = TypeAdapter(_bound(function, object())).json_schema()
    except Exception as error:  # pydantic has several, of no common class
        said = " ".join(str(error).split())[:160]
        raise ConfigError(f"the tool {name} has a parameter without a JSON schema: {said}") from error
    for one in schema.get("properties", {}).values():
        one.pop("title", None)
    # In the order in which models see tools in training.
    kept = ("type", "properties", "required", "$defs")
    return Tool(name, description, {key: schema[key] for key in kept if key in schema})


def sandboxed_tools(tools: Sequence[Tool]) -> list[str]:
    """Return the names of those of some tools that take processes of their own."""
    ours = [tool_of(shell), tool_of(python)]
    return [tool.name for tool in tools if tool in ours]


def call(functions: Sequence[Function], asked: ToolCall, conversation: object) -> Message:
    """Call the tool that the policy asked for in a conversation, and return its message.

    What the tool raises but ValueError is raised: that is no mistake of the policy.
    """
    named = {function.__name__: function for function in functions}
    if asked.name not in named:
        there = f"there are {', '.join(named)}" if named else "there is none"
        return tool_answer(asked, f"there is no tool {asked.name!r}; {there}")
    checked = validate_call(_bound(named[asked.name], conversation))
    try:
        return tool_answer(asked, str(checked(**asked.arguments)))
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg'].lower()}" for one in error.errors())
        return tool_answer(asked, f"{asked.name} cannot be called so: {'; '.join(wrong)}")
    except ValueError as error:
        return tool_answer(asked, f"{asked.name} failed: {error}")


class ToolConversation(ABC):
    """A conversation whose policy may call functions before it says its last word."""

    functions: ClassVar[Sequence[Function]] = ()
    """The tools; `self` is the first parameter of one that needs the conversation."""
    problem: Problem

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        """Return the problem's text as the first message; others as `Conversation.begin` says."""
        self.problem = problem
        return [user(problem.text)]

    @abstractmethod
    def said(self, reply: Reply) -> Sequence[Message] | Ended:
        """Answer a reply that calls no tool, as `Conversation.answer`."""

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        """Call the tools that a reply asks for, in order; what is no call is told so."""
        answers = [call(self.functions, asked, self) for asked in reply.tool_calls]
        if reply.malformed:
            answers.append(user(f"that is no call of a tool: {reply.malformed}"))
        return answers or self.said(reply)


def _bound(function: Function, conversation: object) -> Any:
    first = next(iter(inspect.signature(function).parameters), "")
    return MethodType(function, conversation) if first == "self" else function
