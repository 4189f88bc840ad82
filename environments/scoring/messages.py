"""What crosses the pipes between the reward service and a scoring process: one JSON object a line.

To the process: first a `ScoringTask`, then `key`, `texts` and `hangs` for the answers to one problem at a
time: no more are asked for once this many hung. From it: a line when it is ready, then a line for each
answer. Whatever else comes from it is an error of that process: a hostile answer may have written it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.reporting.plain_text import plain

LINE_BYTES = 4096
"""Longest line that is read of a scoring process."""
REASON_CHARS = 200
ROUNDING = 1e-6
"""So far outside of its range, in widths of that, a reward is the nearer end: parts that were added up as
floats."""
READY = b'{"ready": true}\n'


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
    """No reward could be given to an answer."""

    reason: str
    """For people; one line."""


Verdict = float | Failed
"""A reward within the environment's range, or why there is none."""


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


def checked_reward(value: object, within: RewardRange = UNIT_RANGE) -> Verdict:
    """Return a scorer's answer as a reward, or why it is none; `within` is the environment's range.

    >>> checked_reward(True), checked_reward(0.5), checked_reward(0.4 + 0.2 + 0.3 + 0.1 + 2e-16)
    (1.0, 0.5, 1.0)
    >>> checked_reward(1e9)
    Failed(reason='the scorer returned 1000000000.0, which lies outside 0..1')
    """
    low, high = within
    margin = ROUNDING * (high - low)
    if not isinstance(value, (int, float)):
        return Failed(f"the scorer returned {type(value).__name__} instead of a number")
    if not low - margin <= value <= high + margin:  # what is no number is outside too
        shown = "a huge number" if abs(value) > 1e300 else f"{float(value)}"
        return Failed(f"the scorer returned {shown}, which lies outside {low:g}..{high:g}")
    return min(high, max(low, float(value)))


def failure_of(error: BaseException, hide: Callable[[str], str]) -> Failed:
    """Return the failure of a scorer that raised an error; `hide` takes the secrets out of a text."""
    try:
        said = f": {error}"
    except BaseException:  # noqa: BLE001 - an answer may have written the error's class
        said = ""
    reason = hide(f"the scorer failed: {type(error).__name__}{said}")[:REASON_CHARS]
    return Failed(plain(" ".join(reason.split())).removesuffix(":"))


def hung(answer_timeout_s: float) -> Failed:
    """Return the failure of an answer that was not scored in time."""
    return Failed(f"the scorer gave no reward within {answer_timeout_s:g} s")
