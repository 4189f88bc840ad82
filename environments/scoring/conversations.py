"""Conversations of many trajectories: replies go in, the environment's turns come out.

`answer` gets all replies that a trajectory has so far. If its conversation has had all but the last, that one
is handed on; else, where the environment says that its state can be built again, a new conversation gets all
of them. So a process may die and an idle conversation may be dropped at any time, and the same call gives the
same turn. `ConversationPool` holds conversations in scoring processes, each in a fork of its own
(`conversing`); `InProcessConversations` holds those that only compare in this process.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self

import structlog

from antiphon.core.errors import AntiphonError, ConfigError, ContractError, UnavailableError
from antiphon.core.messages import Ended, Reply
from antiphon.environments.conversation import Conversation, ConversationEnvironment
from antiphon.environments.environment import Problem
from antiphon.environments.scoring.conversing import last_turn
from antiphon.environments.scoring.messages import TURN_BYTES, Failed, Lost, ScoringTask, Turn, attempt
from antiphon.environments.scoring.pool import ScoringPool, ScoringProcess
from antiphon.environments.tools import sandboxed_tools

MOST_LIVE = 256
"""Conversations that are held at once; beyond, the one is dropped that was idle longest."""
IDLE_S = 1800.0
"""A conversation that nobody asked for so long is dropped."""
HELP_S = 0.002
"""A turn that no thread has begun with after so long gets a further one. Most answers take less, and a thread
for each would cost more than they do."""
REMEMBERED = 4096
"""Trajectories whose last turn is remembered, those that ended included."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """What is known of one trajectory."""

    turning: asyncio.Lock = field(default_factory=asyncio.Lock)
    replies: tuple[Reply, ...] = ()
    turn: Turn | None = None
    """What came of the last of the replies."""
    used_s: float = 0.0
    state: Any = None
    """Where its conversation is; None when there is none."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `Conversations.answer` is asked."""

    trajectory: str
    key: str
    seed: int
    replies: tuple[Reply, ...]


class Conversations(ABC):
    """Turns of trajectories, by their names; an asynchronous context."""

    def __init__(
        self, environment: ConversationEnvironment, *, most_live: int = MOST_LIVE, idle_s: float = IDLE_S
    ) -> None:
        """Prepare; nothing is started before the context is entered."""
        self.environment = environment
        self._most_live, self._idle_s = most_live, idle_s
        self._held: dict[str, _Held] = {}
        """By name, the one first that was asked least recently."""
        self._turning: set[asyncio.Task[Turn]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._turning:
            task.cancel()
        await asyncio.gather(*self._turning, return_exceptions=True)

    async def answer(self, trajectory: str, key: str, seed: int, replies: Sequence[Reply]) -> Turn:
        """Return what the environment says to the last of a trajectory's replies.

        Args:
            trajectory: its name, the same for all of its turns.
            key: its problem.
            seed: what its conversation is begun with.
            replies: all of its replies so far.
        """
        # A caller that gives up leaves the conversation to itself: the turn is remembered for the next call.
        turning = asyncio.create_task(self._answer(_Asked(trajectory, key, seed, tuple(replies))))
        self._turning.add(turning)
        turning.add_done_callback(self._turning.discard)
        return await asyncio.shield(turning)

    async def forget(self, trajectory: str) -> None:
        """End a trajectory's conversation, and remember nothing of it."""
        if (held := self._held.get(trajectory)) is not None:
            async with held.turning:
                if self._held.get(trajectory) is held:
                    del self._held[trajectory]
                await self._drop(trajectory, held)

    async def _answer(self, asked: _Asked) -> Turn:
        trajectory, replies = asked.trajectory, asked.replies
        held = self._held.setdefault(trajectory, _Held())
        async with held.turning:
            if self._held.get(trajectory) is not held:  # it was forgotten meanwhile
                return await self._answer(asked)
            self._held[trajectory] = self._held.pop(trajectory)
            held.used_s = asyncio.get_running_loop().time()
            if held.turn is not None and held.replies == replies:
                return held.turn
            follows = held.replies == replies[:-1]
            if follows and isinstance(held.turn, (Ended, Failed)):
                return Failed(f"the trajectory ended with reply {len(held.replies)}")
            if not (follows or self.environment.rebuildable):
                return _gone("the environment cannot build it again")
            if not (follows and held.state is not None) and (full := await self._make_room()):
                return full
            turn = await self._turn(held, asked, follows)
            if not isinstance(turn, tuple):
                await self._drop(trajectory, held)
            if isinstance(turn, Failed):
                _log.warning(
                    "conversation.failed", prompt=asked.key, trajectory=trajectory, reason=turn.reason
                )
                if turn.infrastructure:
                    return turn
            held.replies, held.turn = replies, turn
            return turn

    async def _make_room(self) -> Failed | None:
        """Drop what was idle too long, and the longest idle one where there are too many."""
        since_s = asyncio.get_running_loop().time() - self._idle_s
        live = [name for name, held in self._held.items() if held.state is not None]
        over = len(live) + 1 - self._most_live
        for name in live:
            held = self._held.get(name)  # it may have been forgotten while another was dropped
            if (
                held is not None
                and not held.turning.locked()
                and (held.used_s < since_s or (over > 0 and self.environment.rebuildable))
            ):
                await self._drop(name, held)
                over -= 1
        for name in list(self._held)[: max(0, len(self._held) - max(REMEMBERED, self._most_live))]:
            if self._held[name].state is None and not self._held[name].turning.locked():
                del self._held[name]
        if over > 0 and not self.environment.rebuildable:
            return Failed(
                f"{self._most_live} conversations are held already, and the environment can build none again",
                infrastructure=True,
            )
        return None

    @abstractmethod
    async def _turn(self, held: _Held, asked: _Asked, follows: bool) -> Turn:
        """Return what came of the last reply; its conversation may have had the others (`follows`)."""

    @abstractmethod
    async def _drop(self, trajectory: str, held: _Held) -> None:
        """End a conversation."""


class InProcessConversations(Conversations):
    """Conversations of an environment that only compares, each turn in a thread of this process.

    No one can end a thread: one that takes too long is left to itself, and its trajectory has failed.
    """

    def __init__(
        self,
        environment: ConversationEnvironment,
        hide: Callable[[str], str] = str,
        *,
        answer_timeout_s: float = 5.0,
    ) -> None:
        """Prepare; `hide` takes the secrets out of a text, and an answer may take `answer_timeout_s`.

        Raises:
            ConfigError: when the environment has tools that run in the sandbox alone.
        """
        super().__init__(environment, most_live=REMEMBERED)
        self._hide, self._answer_timeout_s = hide, answer_timeout_s
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0
        if names := sandboxed_tools(environment.tools):
            raise ConfigError(
                f"environment.name={environment.name}: its tool {names[0]} runs in the sandbox alone; leave "
                "out only_compares"
            )

    async def _turn(self, held: _Held, asked: _Asked, follows: bool) -> Turn:
        if held.state is not None and follows:
            return await self._in_thread(1, self._ask, held.state, asked.replies[-1])
        if held.turn is not None and not self.environment.rebuildable:
            return _gone("it was idle too long")
        try:
            # Here, not in a thread: an environment may draw its problems one after the other.
            problem = self.environment.problem_by_key(asked.key)
        except AntiphonError as error:
            return Failed(self._hide(str(error)))
        return await self._in_thread(1 + len(asked.replies), self._begin, held, asked, problem)

    async def _in_thread(self, answers: int, work: Callable[..., Turn], *arguments: Any) -> Turn:
        """Return what `work` makes of this many answers, in a thread: where those there are do not begin with
        it soon, such as while they wait for a judge, a further one does."""
        loop, limit_s = asyncio.get_running_loop(), answers * self._answer_timeout_s
        answer: asyncio.Future[Turn] = loop.create_future()
        begun = False

        def say(turn: Turn) -> None:
            if not answer.done():
                answer.set_result(turn)

        def run() -> None:
            nonlocal begun
            begun = True
            turn = work(*arguments)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(say, turn)

        def help_out() -> None:
            if not begun:
                self._threads += 1
                Thread(target=_work_off, args=(self._jobs,), name="conversation", daemon=True).start()

        self._jobs.put(run)
        if self._threads:
            loop.call_later(HELP_S, help_out)
        else:
            help_out()
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return Failed(f"the environment did not answer within {limit_s:g} s")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        for _ in range(self._threads):
            self._jobs.put(None)

    def _begin(self, held: _Held, asked: _Asked, problem: Problem) -> Turn:
        def begin() -> object:
            held.state = self.environment.conversation()
            return held.state.begin(problem, asked.seed)

        opening = attempt(begin, self.environment.reward_range, self._hide, opening=True)
        if not isinstance(opening, tuple):
            return opening
        found = last_turn(asked.replies, lambda reply: self._ask(held.state, reply))
        assert not isinstance(found, Lost)
        return found

    def _ask(self, conversation: Conversation, reply: Reply) -> Turn:
        return attempt(lambda: conversation.answer(reply), self.environment.reward_range, self._hide)

    async def _drop(self, trajectory: str, held: _Held) -> None:
        held.state = None


class ConversationPool(Conversations):
    """Conversations in scoring processes, each of which answers one reply at a time."""

    def __init__(
        self,
        environment: ConversationEnvironment,
        task: ScoringTask,
        *,
        most_live: int = MOST_LIVE,
        idle_s: float = IDLE_S,
        **options: Any,
    ) -> None:
        """Prepare; nothing is started before the context is entered.

        Args:
            environment: the one that `task` names.
            task: what its processes are told.
            most_live: conversations that are held at once.
            idle_s: seconds after which a conversation is dropped that nobody asks.
            options: those of `ScoringPool`; `attempts` is how often a process may end in one turn.
        """
        super().__init__(environment, most_live=most_live, idle_s=idle_s)
        self._task = task
        self._attempts: int = options["attempts"]
        self._pool = ScoringPool(task, line_bytes=TURN_BYTES, **options)
        self._waiting = dict.fromkeys(self._pool.processes, 0)

    @property
    def processes(self) -> list[ScoringProcess]:
        """The scoring processes."""
        return self._pool.processes

    async def __aenter__(self) -> Self:
        """Start all processes.

        Raises:
            ConfigError: when the sandbox or the environment cannot be built, or a tool needs the sandbox.
        """
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, with the conversations that they hold."""
        await super().__aexit__(kind, error, trace)
        await self._pool.__aexit__(kind, error, trace)

    async def _turn(self, held: _Held, asked: _Asked, follows: bool) -> Turn:
        lost: Turn | Lost = _gone("")
        began = held.turn is not None
        for _ in range(self._attempts):
            process, pid = held.state or (None, None)
            if process is None:
                process = min(self._waiting, key=lambda one: self._waiting[one])
                self._waiting[process] = self._waiting.pop(process)  # another one next time
            self._waiting[process] += 1
            try:
                async with process.busy:
                    goes_on = follows and pid is not None and process.running and process.pid == pid
                    if began and not goes_on and not self.environment.rebuildable:
                        return _gone(lost.reason if isinstance(lost, Lost) else "its process has ended")
                    began = True
                    await self._pool.start_if_ended(process)
                    held.state = process, process.pid
                    lost = await self._ask(process, asked, goes_on)
            except UnavailableError as error:
                return Failed(str(error), infrastructure=True)
            finally:
                self._waiting[process] -= 1
            if not isinstance(lost, Lost):
                return lost
            held.state, pid = None, None
            _log.warning(
                "conversation.lost", prompt=asked.key, trajectory=asked.trajectory, reason=lost.reason
            )
        assert isinstance(lost, Lost)
        return Failed(lost.reason, infrastructure=lost.killed)

    async def _ask(self, process: ScoringProcess, asked: _Asked, goes_on: bool) -> Turn | Lost:
        request: dict[str, Any] = {"trajectory": asked.trajectory}
        if not goes_on:
            request |= {"key": asked.key, "seed": asked.seed}
        request["replies"] = [asdict(reply) for reply in (asked.replies[-1:] if goes_on else asked.replies)]
        try:
            return await process.turn(request, 1 + len(request["replies"]), self.environment.reward_range)
        except ContractError as error:
            await process.end()
            return Lost(str(error), killed=True)
        except asyncio.CancelledError:
            await process.end()  # the line that it still owes belongs to nobody
            raise

    async def _drop(self, trajectory: str, held: _Held) -> None:
        if held.state is not None:
            (process, pid), held.state = held.state, None
            if process.pid == pid:
                await process.forget(trajectory)


def _work_off(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


def _gone(why: str) -> Failed:
    return Failed(f"the state of the trajectory is gone: {why}", infrastructure=True)
