"""Hosts: programs that hold the environment of a simulated run; some are slow or silent, and some lie.

They call the handlers of production's gateway, without HTTP: calls are late, and their answers may be lost.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from operator import methodcaller
from typing import Any, Literal

import numpy as np

from antiphon.services.reward.gateway import BEARER, Gateway, GenerateBody, HostBody, ReportBody, SamplingBody
from antiphon.services.reward.sessions import Refused, SeatReport
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.virtual.loop import Process
from antiphon.simulator.virtual.random_streams import RandomStream

TIMEOUT_S = 15.0
"""Silence after which a host loses its groups."""
ALIVE_S = 4.0
CALL_S = 30.0
"""Longest wait for an answer; then the host asks again."""
LOST_ANSWERS = 0.03
SLOWEST_TURN_S = 10.0
"""Longest time that a slow host takes for a turn."""
MISCHIEF = 3
"""How often a host does harm in its life."""
AT_ONCE = 1
"""Groups that a host plays at the same time."""
NO_REQUEST: Any = type("NoRequest", (dict,), {"headers": {}})({BEARER: ""})
"""In place of the HTTP request, at which the handlers look only for a header and for who asks."""
EXCUSES = ("is not held by", "was silent for too long")
"""Why an honest report may be refused."""


class Manner(StrEnum):
    """What a host is like."""

    HONEST = "honest"
    SLOW = "slow"
    SILENT = "silent"
    """It takes groups, and is not heard of them again."""
    WITHHOLDING = "withholding"
    """It does not report what earned nothing."""
    LYING = "lying"
    """It reports one token of one trajectory as another one."""


HARMFUL = (Manner.SILENT, Manner.WITHHOLDING, Manner.LYING)


@dataclass(slots=True)
class GatewayPlace:
    """Where hosts find the gateway."""

    process: Process
    gateway: Gateway


class Host:
    """One host program, from its start to its death."""

    def __init__(
        self,
        name: str,
        manner: Manner,
        place: Callable[[], GatewayPlace | None],
        random: RandomStream,
        report: Callable[[str], None],
        withheld: Counter[str],
    ) -> None:
        """`place` returns where the gateway is; `report` is told what must not be, `withheld` counts."""
        self._name, self._manner, self._place, self._withheld = name, manner, place, withheld
        self._random, self._report = random, report
        self._held: dict[str, asyncio.Task[None]] = {}
        """Groups that it plays."""
        self._harm = 0

    async def run(self) -> None:
        """Take groups and play them, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_alive())
            while True:
                taken = await self._call(lambda gateway: gateway._take(HostBody(host=self._name), NO_REQUEST))
                if taken is None:
                    continue
                if self._does_harm(Manner.SILENT):
                    await asyncio.sleep(2.0 * TIMEOUT_S)
                    continue
                self._held[taken["group"]] = tasks.create_task(self._play_group(taken))
                while len(self._held) >= AT_ONCE:
                    await asyncio.wait(self._held.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            body = HostBody(host=self._name, groups=list(self._held))
            said = await self._call(methodcaller("_alive", body, NO_REQUEST))
            for group_id in said["lost"]:
                if group_id in self._held:
                    self._held.pop(group_id).cancel()

    async def _play_group(self, taken: dict[str, Any]) -> None:
        playing = (self._play_episode(taken, episode) for episode in taken["episodes"])
        for error in await asyncio.gather(*playing, return_exceptions=True):
            if error is not None and not (isinstance(error, Refused) and error.status == 409):  # it is lost
                raise error
        self._held.pop(taken["group"], None)

    async def _play_episode(self, taken: dict[str, Any], episode: dict[str, Any]) -> None:
        played = [await self._play(taken["key"], trajectory) for trajectory in episode["trajectories"]]
        if not any(reward for reward, *_ in played) and self._does_harm(Manner.WITHHOLDING):
            self._held.pop(taken["group"], None)
            self._withheld[self._name] += 1
            return
        lies = self._does_harm(Manner.LYING)
        if lies:
            branch = self._random.choose(self._random.choose(played)[1])
            place = self._random.index(len(branch))
            branch[place] = (branch[place] + 1) % arithmetic.VOCABULARY
        seats = [
            SeatReport(
                trajectory=trajectory, reward=reward, branches=tuple(map(tuple, branches)), limit=limit
            )
            for trajectory, (reward, branches, limit) in zip(episode["trajectories"], played, strict=True)
        ]
        body = ReportBody(host=self._name, group=taken["group"], episode=episode["episode"], seats=seats)
        said = await self._call(lambda gateway: gateway._report(body, NO_REQUEST))
        if lies and said["accepted"]:
            self._report(f"a lie about group {body.group} was believed")
        elif not (lies or said["accepted"] or any(one in said["reason"] for one in EXCUSES)):
            self._report(f"a true report of group {body.group} was refused: {said['reason']}")

    async def _play(
        self, key: str, trajectory: str
    ) -> tuple[float, list[list[int]], Literal["turns", "tokens"] | None]:
        """Play one trajectory to its end: its reward, tokens of each context, and the limit it reached."""
        branches: list[list[int]] = []
        context, fresh = list(arithmetic.opening(key)), True
        while True:
            await asyncio.sleep(self._pause_s())
            body = GenerateBody(
                token_ids=context, sampling_params=SamplingBody(antiphon_trajectory=trajectory)
            )
            try:
                said = await self._call(methodcaller("_generate", body, NO_REQUEST))
            except Refused as refused:
                if refused.status != 400:
                    raise
                return 0.0, branches, "turns" if "max_turns" in str(refused) else "tokens"
            context = [*context, *said["choices"][0]["token_ids"]]
            branches = [*branches, context] if fresh else [*branches[:-1], context]
            following, fresh = arithmetic.hosted(np.array(context, dtype=np.int32), len(branches) - 1)
            if following is None:
                row = np.array([token for branch in branches for token in branch], dtype=np.int32)
                return arithmetic.reward(key, row, 1), branches, None
            context = list(following) if fresh else [*context, *following]

    def _does_harm(self, manner: Manner) -> bool:
        harm = self._manner is manner and self._harm < MISCHIEF and self._random.happens(0.5)
        self._harm += harm
        return harm

    def _pause_s(self) -> float:
        slow = self._manner is Manner.SLOW
        return self._random.between(0.5, SLOWEST_TURN_S) if slow else self._random.between(0.01, 0.3)

    async def _call(self, work: Callable[[Gateway], Coroutine[Any, Any, Any]]) -> Any:
        """Return what the gateway answers; asked again until it does.

        Raises:
            Refused: what it says.
        """
        while True:
            await asyncio.sleep(self._random.between(0.001, 0.1))
            place = self._place()
            if place is not None and place.process.alive:
                answering = place.process.spawn(work(place.gateway))
                await asyncio.wait({answering}, timeout=CALL_S)
                if not answering.done():
                    answering.cancel()
                elif not answering.cancelled() and not self._random.happens(LOST_ANSWERS):
                    error = answering.exception()
                    if not (isinstance(error, Refused) and error.status == 503):
                        return answering.result()
            await asyncio.sleep(self._random.between(0.1, 1.0))
