"""Hosting: takes groups from the gateway, plays their episodes with a program, reports what they earned.

An episode that fails is reported with its reason and never ends the host. One that another host had begun is
played again from its seed: the gateway answers with the turns that were recorded.
"""

import asyncio
import faulthandler
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from antiphon_env_host.gateway import Gateway, HostError, RefusedError

LOG = logging.getLogger("antiphon_env_host")
LONGEST_REASON = 500
HELDOUT_EVERY = 10
TaskT = TypeVar("TaskT")


@dataclass(frozen=True)
class Episode:
    """One episode to play."""

    number: int
    """In its group."""
    seed: int
    trajectories: tuple[str, ...]
    """One for each seat, in the order of the seats."""
    split: str
    """`train` or `heldout`."""
    index: int
    """Which of the split's tasks."""
    model: str
    sampling: Mapping[str, Any]
    """`temperature`, `top_p` and `max_tokens` of each turn."""

    def only_trajectory(self, name: str) -> str:
        """Return the trajectory where the environment of this name has one seat.

        Raises:
            HostError: when the run thinks that it has more.
        """
        if len(self.trajectories) != 1:
            raise HostError(f"environment.seats is {len(self.trajectories)}, but {name} has one; set it to 1")
        return self.trajectories[0]


@dataclass
class Seat:
    """What one seat's part of an episode came to."""

    reward: float | None = None
    branches: list[list[int]] = field(default_factory=list)
    """Token ids of each context with what was sampled in it; a context that goes on is one branch."""
    error: str | None = None
    """Why there is no reward, beginning with whose fault it was."""
    limit: str | None = None
    """The limit of the run that ended it: a gateway that began since does not know."""

    def add_context(self, context: list[int]) -> None:
        """Take in the tokens of one call, which go on from the last branch or begin another."""
        if self.branches and context[: len(self.branches[-1])] == self.branches[-1]:
            self.branches[-1] = context
        else:
            self.branches.append(context)

    def report(self, trajectory: str) -> dict[str, Any]:
        """Return what the gateway is told: a reward that is a number, or an error."""
        branches = [[int(token) for token in branch] for branch in self.branches]
        found: dict[str, Any] = {"trajectory": trajectory, "branches": branches, "limit": self.limit}
        if self.error is None and self.reward is not None and math.isfinite(self.reward):
            return {**found, "reward": float(self.reward)}
        error = self.error or f"environment: its reward is {self.reward}, which is no finite number"
        return {**found, "error": error[:LONGEST_REASON]}


class Tasks(Generic[TaskT]):
    """An environment's tasks in their order; every tenth one is held out. There may be no end of them.

    A split that has fewer tasks than are asked for begins again.

    >>> tasks = Tasks("abcdefghijklmno")
    >>> "".join(tasks.pick("train", index) for index in range(16))
    'abcdefghiklmnoab'
    >>> tasks.pick("heldout", 0), tasks.pick("heldout", 3)
    ('j', 'j')
    """

    def __init__(self, source: Iterable[TaskT]) -> None:
        self._source, self._seen = iter(source), list[TaskT]()

    def pick(self, split: str, index: int) -> TaskT:
        """Return a split's task.

        Raises:
            HostError: when there is none at all.
        """
        rest, heldout = HELDOUT_EVERY - 1, split == "heldout"
        place = HELDOUT_EVERY * index + rest if heldout else index // rest * HELDOUT_EVERY + index % rest
        self._seen += islice(self._source, max(0, place + 1 - len(self._seen)))
        if place < len(self._seen):
            return self._seen[place]
        own = [task for at, task in enumerate(self._seen) if (at % HELDOUT_EVERY == rest) == heldout]
        if not (own := own or self._seen):
            raise HostError("the environment has no tasks")
        return own[index % len(own)]


class Program(ABC):
    """An environment, or a way to reach one."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Hold what all episodes use.

        Raises:
            HostError: when the environment cannot be had.
        """
        return nullcontext()

    @abstractmethod
    async def play(self, episode: Episode) -> Sequence[Seat]:
        """Play one episode and return a result for each trajectory; what it raises fails the episode."""


class Host:
    """Plays groups until it is cancelled.

    Args:
        name: what the run calls this host.
        concurrency: groups at a time; all episodes of a group are played at once.
        episode_s: longest time of one episode, in seconds.
    """

    def __init__(
        self, gateway: Gateway, program: Program, name: str, concurrency: int, episode_s: float
    ) -> None:
        self.gateway, self.program, self.name, self.episode_s = gateway, program, name, episode_s
        self.counts: Counter[str] = Counter(taken=0, reported=0, failed=0, refused=0)
        """Groups taken; episodes reported, of these failed; reports that the gateway refused."""
        self._held: dict[str, tuple[asyncio.Task[None], float]] = {}
        """Group -> who plays it, and the seconds within which the gateway must hear of it."""
        self._room = asyncio.Semaphore(concurrency)

    async def run(self) -> None:
        """Take groups and play them.

        Raises:
            HostError: when it cannot go on; in an exception group, as it plays in tasks.
        """
        async with self.program.serving(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_alive())
            tasks.create_task(self._stay_awake())
            while True:
                await self._room.acquire()
                try:
                    group = await self.gateway.post("/antiphon/v1/take", {"host": self.name})
                except RefusedError as error:
                    raise HostError(f"the gateway at {self.gateway.url} gives no groups: {error}") from None
                if group is None:
                    self._room.release()
                    continue
                self.counts["taken"] += 1
                playing = tasks.create_task(self._play_group(group))
                if (lost := self._held.get(group["group"])) is not None:  # and given to this host again
                    lost[0].cancel()
                self._held[group["group"]] = playing, float(group["deadline_s"])
                playing.add_done_callback(partial(self._drop, group["group"]))

    def _drop(self, group: str, playing: asyncio.Task[None]) -> None:
        """Forget a group that is over."""
        if group in self._held and self._held[group][0] is playing:
            del self._held[group]
        self._room.release()

    async def _play_group(self, group: Mapping[str, Any]) -> None:
        """Play all episodes of a group at once."""
        known = (group["split"], group["index"], group["model"], group["sampling"])
        async with asyncio.TaskGroup() as tasks:
            for one in group["episodes"]:
                episode = Episode(one["episode"], one["seed"], tuple(one["trajectories"]), *known)
                tasks.create_task(self._play(group["group"], episode))

    async def _play(self, group: str, episode: Episode) -> None:
        """Play one episode and report it; whatever goes wrong in it becomes the seats' error."""
        why = None
        try:
            async with asyncio.timeout(self.episode_s):
                seats = await self.program.play(episode)
            said = [seat.report(name) for name, seat in zip(episode.trajectories, seats, strict=True)]
        except HostError:
            raise
        except TimeoutError:
            why = f"environment: the episode took longer than --episode-s={self.episode_s:g}"
        except RefusedError as error:
            why = f"gateway: {error}"
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; the report says what
            why = f"environment: {type(error).__name__}: {error}"
        if why is not None:
            said = [Seat(error=why).report(name) for name in episode.trajectories]
        failure = next((seat["error"] for seat in said if "error" in seat), None)
        report = {"host": self.name, "group": group, "episode": episode.number, "seats": said}
        try:
            answer = await self.gateway.post("/antiphon/v1/report", report)
        except RefusedError as error:
            answer = {"accepted": False, "reason": str(error)}
        self.counts.update(reported=1, failed=failure is not None, refused=not answer["accepted"])
        if failure or not answer["accepted"]:
            LOG.warning("episode %d of group %s: %s", episode.number, group, failure or answer["reason"])

    async def _stay_alive(self) -> None:
        """Say that the groups are still played, three times within the shortest deadline."""
        while True:
            await asyncio.sleep(min((deadline_s for _, deadline_s in self._held.values()), default=1.0) / 3)
            if self._held:
                asked = {"host": self.name, "groups": list(self._held)}
                answer = await self.gateway.post("/antiphon/v1/alive", asked)
                for group in answer["lost"]:
                    if group in self._held:
                        self._held[group][0].cancel()

    async def _stay_awake(self) -> None:
        """Have the process end, saying where it is, when something keeps it busy for too long."""
        try:
            while True:
                faulthandler.dump_traceback_later(self.episode_s, exit=True)
                await asyncio.sleep(self.episode_s / 4)
        finally:
            faulthandler.cancel_dump_traceback_later()
