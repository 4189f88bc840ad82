"""Conversation: an environment that answers, for trajectories of several turns.

Beside problems it makes conversations. One of them is one trajectory's: it holds its state, says the first
messages and answers each reply with further ones, until it ends the trajectory with a reward. Where it can be
built again from the replies that it had, the death of the process that holds it costs nothing.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from antiphon.core.errors import ConfigError
from antiphon.core.messages import Ended, Message, Reply, Tool, ToolCall
from antiphon.environments.environment import Environment, Problem, Problems
from antiphon.environments.scoring.messages import Failed, attempt


class Conversation(Protocol):
    """The state of one trajectory; begun once."""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        """Return the first messages, which become the prompt.

        The same problem and seed give the same messages in every process. All samples of a group have the
        same seed. Tools of the sandbox are not there yet: the prompt is made outside of it.
        """

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        """Return what the environment says to a reply, one message at least, or how the trajectory ended."""


@runtime_checkable
class ConversationEnvironment(Problems, Protocol):
    """What a task with turns must provide to be trained on.

    It may have an `unfinished_reward` besides: what a trajectory earns that the run's limits ended, instead
    of the least reward.
    """

    rebuildable: bool
    """Whether a new conversation that is begun alike and gets the same replies reaches the same state."""
    reward_range: tuple[float, float]
    """The least and the largest reward."""

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call; it is told at the beginning."""

    def conversation(self) -> Conversation:
        """Make the conversation of one trajectory."""


AnyEnvironment = Environment | ConversationEnvironment


def opening(environment: ConversationEnvironment, problem: Problem, seed: int) -> tuple[Message, ...]:
    """Return the first messages of a problem's conversations with a seed.

    Raises:
        ConfigError: when the environment gives none.
    """
    found = attempt(
        lambda: environment.conversation().begin(problem, seed), environment.reward_range, str, opening=True
    )
    if isinstance(found, tuple):
        return found
    reason = found.reason if isinstance(found, Failed) else "it ended"
    raise ConfigError(f"environment.name={environment.name}: begin(...) of {problem.key}: {reason}")


def user(text: str) -> Message:
    """Return a message of the user.

    >>> user("Guess a number.").role
    'user'
    """
    return Message("user", text)


def tool_answer(call: ToolCall, text: str) -> Message:
    """Return what a tool answers to a call."""
    return Message("tool", text, tool_call_id=call.call_id, name=call.name)
