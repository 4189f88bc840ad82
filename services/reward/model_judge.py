"""Model judge: has a model elsewhere give the rewards, over HTTP.

What the policy wrote is sent, compared and kept, never evaluated. Nothing that the other side does can hold
a request up for longer than `judge.timeout_s`, or fill the memory: an answer that it does not judge in
`judge.attempts` requests has *failed*, with the reason. What was judged is kept (`lineage.judgements`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import structlog

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.judge_config import Judged, JudgeSection
from antiphon.environments.environment import Environment, reward_range_of
from antiphon.environments.scoring.messages import Failed, Verdict, checked_reward
from antiphon.lineage.judgements import JUDGEMENTS, Judgement
from antiphon.lineage.kept import Kept
from antiphon.services.reward.json_server import JsonServer

PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Pause before the second request for an answer, which doubles for each further one, and the longest."""
_log = structlog.get_logger(__name__)


class ModelJudge:
    """Gives verdicts by a model; an asynchronous context, which keeps judgements at a path or in memory."""

    def __init__(
        self,
        section: JudgeSection,
        environment: Environment,
        path: Path | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare; nothing is asked before the context is entered.

        Raises:
            ConfigError: when the variable with the API key is not set.
        """
        self._section, self._environment, self._path, self._sleep = section, environment, path, sleep
        self._server = JsonServer("judge", section.key, section.timeout_s, section.at_once)
        self._within = reward_range_of(environment)
        self._places = asyncio.Semaphore(section.at_once)
        self._judging: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By digest; held while an answer is judged, so that another group with the same one waits for it."""

    async def __aenter__(self) -> Self:
        self._kept = Kept(self._path, JUDGEMENTS, Judgement)
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__()
        self._kept.close()

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer to the problem with a key."""
        problem = self._environment.problem_by_key(key)
        asked = {text: Judged(problem.text, problem.answer, text) for text in texts}
        async with asyncio.TaskGroup() as tasks:
            judging = {text: tasks.create_task(self._judge(one)) for text, one in asked.items()}
            for one in asked.values():
                if self._section.checks_order(one):
                    tasks.create_task(self._judge(one, swapped=True))
        return [self._verdict(judging[text].result()) for text in texts]

    def _verdict(self, found: Judgement) -> Verdict:
        low, high = self._within
        if found.share is None:
            return Failed(found.failure)
        reward = low + found.share * (high - low)
        return checked_reward(reward, self._within)  # as a float it may lie just beyond

    async def _judge(self, one: Judged, swapped: bool = False) -> Judgement:
        """Return what is kept of an answer; else ask, and keep what was paid for."""
        digest = self._section.digest_of(one, swapped)
        async with self._judging.setdefault(digest, asyncio.Lock()):
            found = before = self._kept.find(digest)
            if found is None or found.share is None:
                found = await self._ask(*self._section.request(one, swapped))
                if found.requests:
                    usual = self._section.digest_of(one) if swapped else ""
                    found = found.after(before)._replace(other_order_of=usual)
                    self._kept.add(digest, found, over=before)
            return found

    async def _ask(self, url: str, body: dict[str, Any]) -> Judgement:
        """Ask until there is a score; a reply without one is paid for, too."""
        clock, section = asyncio.get_running_loop().time, self._section
        share, reply, failure = None, "", ""
        tokens_in = tokens_out = requests = 0
        seconds = 0.0
        for attempt in range(section.attempts):
            await self._sleep(min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) if attempt else 0.0)
            async with self._places:
                begun = clock()
                try:
                    tree = await self._server.post(url, body)
                    requests, seconds = requests + 1, seconds + clock() - begun
                    tokens_in += _tokens(tree, "prompt")
                    tokens_out += _tokens(tree, "completion")
                    reply = section.reply_in(tree)
                    share, failure = section.share_in(reply), ""
                    break
                except (UnavailableError, ContractError, ValueError) as error:
                    failure = self._server.plain(f"judge: {error}")
                    _log.warning("judge.failed", attempt=attempt + 1, reason=failure)
                    if isinstance(error, ContractError):
                        break
        of_prompts, of_replies = section.price_per_million
        usd = (tokens_in * of_prompts + tokens_out * of_replies) / 1e6
        reply = self._server.plain(reply, keep="\n", most=None)
        return Judgement(share, reply, failure, tokens_in, tokens_out, requests, seconds, usd)


def _tokens(tree: Any, of: str) -> int:
    """Return the tokens of prompt or reply ("completion") that an answer says, as far as it does."""
    usage = tree.get("usage") if isinstance(tree, dict) else None
    count = usage.get(f"{of}_tokens") if isinstance(usage, dict) else 0
    return count if isinstance(count, int) and 0 <= count < 1 << 32 else 0
