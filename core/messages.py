"""Messages: what a policy and an environment say to each other in a trajectory of several turns.

An environment writes messages, a renderer makes tokens of them, the policy's tokens become a reply, and the
environment answers that. Text and plain data only: tokens stand in `core.records`.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from antiphon.core.frozen import frozen

Role = Literal["system", "user", "assistant", "tool"]
RewardRange = tuple[float, float]
"""The least and the largest reward of an environment."""
UNIT_RANGE: RewardRange = (0.0, 1.0)
"""That of an environment which states none."""


@frozen
class Tool:
    """A tool that the policy is told of at the beginning of a conversation."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments, an object."""


@frozen
class ToolCall:
    """A call that the policy wrote in its model's form."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""
    """Names the call where the model's form does; a tool's message repeats it."""


@frozen
class Message:
    """One message, of the environment or, in what was said before, of the policy."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    tool_call_id: str = ""
    """Of a tool's message: the call it answers."""
    name: str = ""
    """Of a tool's message: the tool."""


@frozen
class Reply:
    """What the policy wrote in one turn, read from its tokens."""

    text: str
    """Without thinking, tool calls and special tokens."""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """Why something that looks like a tool call is none; for the policy to read, so no error."""
    cut: bool = False
    """Whether it reached `sampling.max_tokens` before its end."""


@frozen
class Ended:
    """The end of a trajectory, as the environment says it."""

    reward: float
    """Any finite number within the range that the environment states."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, for pages alone."""
    reason: str = ""
    """A few words for pages, such as "won"."""
