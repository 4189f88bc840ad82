"""Chat: messages of chat completions as a row's tokens, and what was sampled as a message.

Messages that go on from a sampled turn become that turn's tokens and what follows them, so that nothing which
was sampled is rendered again. What the turns were is read from the row each time; nothing is remembered.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from antiphon.core.errors import ContractError
from antiphon.core.messages import Message, Reply, Tool, ToolCall
from antiphon.models.rendering import Renderer
from antiphon.services.reward.sessions import SampledTurn

_Text = Annotated[str, Field(max_length=1 << 22)]


class TextPart(BaseModel):
    """A part of a message; there are no others than text."""

    type: Literal["text"]
    text: _Text


class CalledFunction(BaseModel):
    """A function that an assistant called."""

    name: str
    arguments: _Text
    """JSON."""


class ChatToolCall(BaseModel):
    """A call in an assistant's message."""

    id: str = ""
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message as chat completions have it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | list[TextPart] | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> Message:
        """Return it as environments write messages.

        Raises:
            ContractError: when the arguments of a tool call are no JSON object.
        """
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        role = "system" if self.role == "developer" else self.role
        calls = tuple(_call(one) for one in self.tool_calls or ())
        return Message(role, text, calls, self.tool_call_id or "", self.name or "")


class ChatTool(BaseModel):
    """A tool as chat completions have it."""

    type: Literal["function"]
    function: Tool


def context_of(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    recorded: Callable[[list[int]], SampledTurn | None],
) -> list[int]:
    """Return the tokens up to where the policy answers.

    Args:
        renderer: makes tokens of messages.
        messages: the conversation, which ends with what the policy is to answer.
        tools: what it may call.
        recorded: returns what was sampled of the trajectory after a context.

    Raises:
        ContractError: when the renderer cannot make tokens of it.
    """
    if not messages or messages[-1].role == "assistant":
        raise ContractError("messages must end with one of the user or a tool, which is to be answered")
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    context: list[int] = []
    for place, until in zip([-1, *replies], [*replies, len(messages)], strict=True):
        turn, new = recorded(context), messages[place + 1 : until]
        row = [] if turn is None else turn.token_ids.tolist()
        if row and new and _says(renderer.reply(context, row, tools), messages[place]):
            context = [*context, *row, *renderer.following(context, row, new, tools)]
        elif until:
            context = list(renderer.opening(messages[:until], tools))
    return context


def message_of(reply: Reply, name: str) -> dict[str, Any]:
    """Return what was sampled as a message; `name` makes the ids of calls without one."""
    calls = [
        {
            "id": call.call_id or f"{name}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(reply.tool_calls)
    ]
    found: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if calls else "")}
    if reply.thinking:
        found["reasoning_content"] = reply.thinking
    return found | ({"tool_calls": calls} if calls else {})


def _call(call: ChatToolCall) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ContractError(f"the arguments of the call of {call.function.name[:80]!r} are no JSON object")
    return ToolCall(call.function.name, arguments, call.id)


def _says(reply: Reply, message: Message) -> bool:
    """Return whether a message repeats what was sampled; thinking and ids of calls may be left out."""
    calls = [(call.name, dict(call.arguments)) for call in reply.tool_calls]
    said = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.role == "assistant" and reply.text.strip() == message.content.strip() and calls == said
