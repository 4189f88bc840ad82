"""What crosses the pipes between the reward service and a scoring process: one JSON object a line.

To the process: first a `ScoringTask`, then `key`, `texts` and `hangs` for the answers to one problem at a
time: no more are asked for once this many hung. From it: a line when it is ready, then a line for each
answer. Whatever else comes from it is an error of that process: a hostile answer may have written it.

Of conversations, to the process: `trajectory` and `replies`, and with `key` and `seed` the conversation is
begun first; or `forget`, which is not answered. From it: one line, a `Turn` or `Lost`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, get_args

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.messages import UNIT_RANGE, Ended, Message, Reply, RewardRange, Role, ToolCall
from antiphon.core.reporting.plain_text import plain

LINE_BYTES = 4096
"""Longest line that is read of a scoring process."""
TURN_CHARS = 1 << 18
"""Most characters of the messages of one turn."""
TURN_BYTES = 8 * TURN_CHARS
"""Longest line that is read of a scoring process that holds conversations: JSON may take six for each."""
REASON_CHARS = 200
MOST_PARTS, PART_CHARS = 16, 64
"""Parts of a reward that are kept, the first ones, and characters of the name of one."""
ROUNDING = 1e-6
"""So far outside of its range, in widths of that, a reward is the nearer end: parts that were added up as
floats."""
READY = b'{"ready": true}\n'
_HALF = re.compile("[\\ud800-\\udfff]")


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """What a scoring process needs to know before the first answer."""

    name: str
    """The environment, as in `environment.name`."""
    parameters: Mapping[str, Any]
    seed: int
    train_size: int
    heldout_size: int
    answer_timeout_s: float
    """Seconds that one answer may take."""
    memory_bytes: int
    """Address space that scoring one answer may use."""
    factory: str = "antiphon.environments.registry:make_environment"
    """What builds the environment, as `module:function`; it takes the first five of these."""
    folders: tuple[str, ...] = ()
    """Further folders in which Python finds the environment's modules."""
    readable: tuple[str, ...] = ()
    """Files and folders of them that the sandbox shows."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that the environment's class may read."""
    reward_range: RewardRange = UNIT_RANGE

    def without_secrets(self, text: str) -> str:
        """Return `text` with the names of secrets in place of their values."""
        for name, value in self.secrets.items():
            text = text.replace(value, f"${name}")
        return text


@dataclass(frozen=True, slots=True)
class Failed:
    """No reward could be given to an answer, or no answer to a reply."""

    reason: str
    """For people; one line."""
    infrastructure: bool = False
    """Whether not the environment failed but what runs it, so that asking again may help."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The process of a conversation ended before it answered."""

    reason: str
    killed: bool
    """Whether something outside has killed it."""


Verdict = float | Failed
"""A reward within the environment's range, or why there is none."""
Turn = tuple[Message, ...] | Ended | Failed
"""What came of a reply: the environment's messages, the end of the trajectory, or why there is neither."""


def line_of(value: Mapping[str, Any]) -> bytes:
    """Return one JSON object as a line."""
    return json.dumps(value).encode() + b"\n"


def result_line(result: Verdict) -> bytes:
    """Return the line that tells what came of one answer."""
    if isinstance(result, Failed):
        return line_of({"failed": result.reason[:REASON_CHARS]})
    return line_of({"reward": result})


def parse_result(line: bytes, within: RewardRange = UNIT_RANGE) -> Verdict:
    """Read what `result_line` wrote, or an answer has forged; `within` is the environment's range.

    Raises:
        ContractError: when it is none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and len(found) == 1:
        ((name, value),) = found.items()
        if name == "reward":
            return checked_reward(value, within)
        if name == "failed" and isinstance(value, str):
            return Failed(plain(" ".join(value[:REASON_CHARS].split())))
    raise ContractError("a scoring process wrote something that is no result")


def checked_reward(
    value: object, within: RewardRange = UNIT_RANGE, said: str = "the scorer returned"
) -> Verdict:
    """Return a scorer's answer as a reward, or why it is none; `within` is the environment's range.

    >>> checked_reward(True), checked_reward(0.5), checked_reward(0.4 + 0.2 + 0.3 + 0.1 + 2e-16)
    (1.0, 0.5, 1.0)
    >>> checked_reward(1e9).reason
    'the scorer returned 1000000000.0, which lies outside 0..1'
    """
    low, high = within
    margin = ROUNDING * (high - low)
    if not isinstance(value, (int, float)):
        return Failed(f"{said} {type(value).__name__} instead of a number")
    if not low - margin <= value <= high + margin:  # what is no number is outside too
        shown = "a huge number" if abs(value) > 1e300 else f"{float(value)}"
        return Failed(f"{said} {shown}, which lies outside {low:g}..{high:g}")
    return min(high, max(low, float(value)))


def failure_of(error: BaseException, hide: Callable[[str], str], what: str = "the scorer failed:") -> Failed:
    """Return the failure of one that raised an error; `hide` takes the secrets out of a text."""
    try:
        said = f": {error}"
    except BaseException:  # noqa: BLE001 - an answer may have written the error's class
        said = ""
    reason = hide(f"{what} {type(error).__name__}{said}")[:REASON_CHARS]
    return Failed(plain(" ".join(reason.split())).removesuffix(":"))


def raised(error: BaseException, hide: Callable[[str], str]) -> Failed:
    """Return the failure of an environment that raised an error instead of an answer."""
    if isinstance(error, UnavailableError):
        return Failed(str(error)[:REASON_CHARS], infrastructure=True)
    return failure_of(error, hide, "the environment raised")


def hung(answer_timeout_s: float) -> Failed:
    """Return the failure of an answer that was not scored in time."""
    return Failed(f"the scorer gave no reward within {answer_timeout_s:g} s")


def turn_line(turn: Turn | Lost) -> bytes:
    """Return the line that tells what came of a reply."""
    if isinstance(turn, tuple):
        return line_of({"messages": [asdict(message) for message in turn]})
    return line_of({type(turn).__name__.lower(): asdict(turn)})


def parse_turn(line: bytes, reward_range: tuple[float, float], *, opening: bool = False) -> Turn | Lost:
    """Read what `turn_line` wrote, or an answer has forged.

    Raises:
        ContractError: when it is none.
    """
    try:
        ((kind, value),) = json.loads(line).items()
        if kind == "messages":
            return checked_turn([_message(one) for one in value], reward_range, opening=opening)
        if kind == "ended":
            return checked_turn(Ended(**value), reward_range)
        if kind in ("failed", "lost"):
            made = Failed(**value) if kind == "failed" else Lost(**value)
            return replace(made, reason=plain(" ".join(str(made.reason)[:REASON_CHARS].split())))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ContractError("a scoring process wrote something that is no turn")


def reply_of(found: Mapping[str, Any]) -> Reply:
    """Read a reply that was written as `asdict` makes it."""
    return Reply(**{**found, "tool_calls": tuple(ToolCall(**one) for one in found["tool_calls"])})


def checked_turn(found: object, reward_range: tuple[float, float], *, opening: bool = False) -> Turn:
    """Return what an environment answered, or why that is no answer.

    `opening` says that it is what `begin` returned, which ends nothing.

    >>> checked_turn([Message("user", "Higher.")], (0.0, 1.0))
    (Message(role='user', content='Higher.', tool_calls=(), tool_call_id='', name=''),)
    >>> checked_turn(Ended(3.0), (-2.0, 2.0)).reason
    'the environment ended with the reward 3.0, which lies outside -2..2'
    """
    if isinstance(found, Ended) and not opening:
        return _checked_end(found, reward_range)
    if isinstance(found, (str, Message)) or not isinstance(found, Sequence):
        return Failed(f"the environment returned {type(found).__name__} instead of messages or an end")
    if not found:
        return Failed("the environment returned no message")
    roles = get_args(Role) if opening else ("user", "tool", "system")
    chars = 0
    for message in found:
        if not isinstance(message, Message):
            return Failed(f"the environment returned {type(message).__name__} instead of a Message")
        for text in (message.content, message.tool_call_id, message.name):
            if not isinstance(text, str):
                return Failed(f"the environment returned a message of {type(text).__name__} instead of text")
            chars += len(text)
        if message.role not in roles:
            return Failed(
                f"the environment returned a message of the role {message.role!r:.20}, not {', '.join(roles)}"
            )
        if not message.content and message.role == "user":
            return Failed("the environment returned a message of the user without text")
        if chars > TURN_CHARS:
            return Failed(f"the environment returned more than {TURN_CHARS:,} characters")
        if _HALF.search(message.content):
            return Failed("the environment returned a message with half a character, as cut JSON has it")
    return tuple(found)


def attempt(
    work: Callable[[], object],
    reward_range: tuple[float, float],
    hide: Callable[[str], str],
    *,
    opening: bool = False,
) -> Turn:
    """Return what an environment answers, or in words what it does wrong."""
    try:
        return checked_turn(work(), reward_range, opening=opening)
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a reply may have raised it
        return raised(error, hide)


def _checked_end(found: Ended, reward_range: tuple[float, float]) -> Ended | Failed:
    numbers = {"the reward": found.reward, **found.parts}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)):
            return Failed(f"the environment ended with {name} {type(value).__name__} instead of a number")
        if not abs(value) < math.inf:  # an integer may be too large to be asked whether it is finite
            return Failed(f"the environment ended with {name} {value:g}, which is no finite number")
    reward = checked_reward(found.reward, reward_range, "the environment ended with the reward")
    if isinstance(reward, Failed):
        return reward
    parts = {str(name)[:PART_CHARS]: float(value) for name, value in islice(found.parts.items(), MOST_PARTS)}
    reason = plain(" ".join(str(found.reason)[:REASON_CHARS].split()))
    return Ended(reward, parts, reason)


def _message(found: Mapping[str, Any]) -> Message:
    return Message(**{**found, "tool_calls": tuple(ToolCall(**one) for one in found["tool_calls"])})
