"""Pool of scoring processes: answers go in, verdicts come out, and no answer can hurt but itself.

Each process scores one group of answers at a time, in a fork of its own (`child`). An answer that takes too
long is `Failed`. When a process ends, falls silent or writes what is no result, it is replaced, the answers
behind the one that it was at go to another process, and that one is tried again after them. Once `attempts`
answers of a group have taken too long or ended their process, those of it that have no verdict are `Failed`,
too. So no answer is handed on for ever, and no group delays others by more than this many deadlines.
"""

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import structlog

from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.reporting.plain_text import plain
from antiphon.environments.environment import Environment, Problem, reward_range_of
from antiphon.environments.scoring.messages import (
    LINE_BYTES,
    READY,
    REASON_CHARS,
    Failed,
    Lost,
    ScoringTask,
    Turn,
    Verdict,
    checked_reward,
    failure_of,
    hung,
    line_of,
    parse_result,
    parse_turn,
)
from antiphon.system.processes import KILL_S, SAME_ORDER
from antiphon.system.sandbox import check_sandbox, interpreter_paths, sandboxed

START_S = 60.0
"""Longest time that a scoring process may take to load its libraries."""
GRACE_S = 5.0
"""A process is given up that has been silent for so long beyond the time of one answer."""
RESTART_PAUSE_S = 1.0
"""Pause before a process that could not be started is started again; it grows to sixteen times that."""
_TAIL_BYTES = 2000

_log = structlog.get_logger(__name__)


class InProcess:
    """Scores in a thread of this process: for environments that compare and do nothing else."""

    def __init__(self, environment: Environment, hide: Callable[[str], str] = str) -> None:
        """Prepare; `hide` takes the secrets out of a text."""
        self._environment, self._within = environment, reward_range_of(environment)
        self._hide = hide

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer to the problem with a key."""
        # One thread call for all of them: handing a text over costs more than comparing it.
        return await asyncio.to_thread(self._verdicts, self._environment.problem_by_key(key), texts)

    def _verdicts(self, problem: Problem, texts: Sequence[str]) -> list[Verdict]:
        found: list[Verdict] = []
        for text in texts:
            try:
                found.append(checked_reward(self._environment.reward(problem, [text])[0], self._within))
            except Exception as error:  # noqa: BLE001 - a model may have written what raised it
                failure = failure_of(error, self._hide)
                _log.warning("scoring.failed", prompt=problem.key, reason=failure.reason)
                found.append(failure)
        return found


class ScoringPool:
    """Scoring processes of one environment; an asynchronous context."""

    def __init__(
        self,
        task: ScoringTask,
        *,
        processes: int,
        attempts: int,
        sandbox: bool,
        patience_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        line_bytes: int = LINE_BYTES,
    ) -> None:
        """Prepare; nothing is started before the context is entered.

        Args:
            task: the environment, and what one answer may take.
            processes: how many score at the same time.
            attempts: how often answers of one group may take too long or end their process.
            sandbox: run each of them in the sandbox; without, only the limits of time and memory hold.
            patience_s: longest time in which no process can be started before that is an error.
            sleep: waits this many seconds; tests pass their own.
            line_bytes: longest line that is read of one.
        """
        self._task = task
        self._attempts = attempts
        self._patience_s = patience_s
        self._sleep = sleep
        self.processes = [ScoringProcess(task, sandbox, line_bytes) for _ in range(processes)]
        self._idle: asyncio.Queue[ScoringProcess] = asyncio.Queue()
        self._sandbox = sandbox

    async def __aenter__(self) -> Self:
        """Start all processes.

        Raises:
            ConfigError: when the sandbox or the environment cannot be built.
        """
        if self._sandbox:
            await asyncio.to_thread(check_sandbox)
        try:
            async with asyncio.TaskGroup() as starting:
                for process in self.processes:
                    starting.create_task(process.start())
        except ExceptionGroup as group:
            await self._end_all()
            raise group.exceptions[0] from None
        except BaseException:
            await self._end_all()
            raise
        for process in self.processes:
            self._idle.put_nowait(process)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes."""
        await self._end_all()

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer to the problem with a key.

        Raises:
            UnavailableError: when no process could be started for `patience_s`.
        """
        found: dict[int, Verdict] = {}
        ended: dict[int, str] = {}
        left = deque(range(len(texts)))
        lost = 0
        while left and lost < self._attempts:
            process = await self._idle.get()
            try:
                await self.start_if_ended(process)
                try:
                    hangs = self._attempts - lost
                    async for result in process.results(key, [texts[index] for index in left], hangs):
                        found[left.popleft()] = result
                        lost += result == hung(self._task.answer_timeout_s)
                        if lost == self._attempts:
                            break
                except ContractError as error:
                    await process.end()
                    lost += 1
                    ended[left[0]] = str(error)
                    _log.warning("scoring.ended", prompt=key, sample=left[0], reason=str(error))
                    left.rotate(-1)
                except asyncio.CancelledError:
                    await process.end()  # the results that it still owes belong to nobody
                    raise
            finally:
                self._idle.put_nowait(process)
        for index in left:
            found[index] = Failed(
                ended.get(index)
                or f"not scored: answers to this problem hung or ended their process {lost} times"
            )
        return [found[index] for index in range(len(texts))]

    async def start_if_ended(self, process: "ScoringProcess") -> None:
        """Start a process again that has ended.

        Raises:
            UnavailableError: when it could not be started for `patience_s`.
        """
        pause_s = waited_s = 0.0
        while not process.running:
            try:
                await process.start()
            except ConfigError as error:
                pause_s = min(max(RESTART_PAUSE_S, 2.0 * pause_s), 16.0 * RESTART_PAUSE_S)
                waited_s += pause_s
                if waited_s > self._patience_s:
                    raise UnavailableError(
                        f"no scoring process could be started for {self._patience_s:g} s: {error}"
                    ) from error
                _log.warning("scoring.not_started", reason=str(error), again_in_s=pause_s)
                await self._sleep(pause_s)

    async def _end_all(self) -> None:
        await asyncio.gather(*(process.end() for process in self.processes))


class ScoringProcess:
    """One scoring process and its pipes."""

    def __init__(self, task: ScoringTask, sandbox: bool, line_bytes: int = LINE_BYTES) -> None:
        self.busy = asyncio.Lock()
        """Held by who waits for a line of it, where it is not handed out to one at a time."""
        self._task = task
        self._line_bytes = line_bytes
        self._sandbox = sandbox
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process's number; None when it was ended."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            ConfigError: when it ends, or says nothing for `START_S`.
        """
        await self.end()
        arguments = [sys.executable, "-s", "-P", "-m", "antiphon.environments.scoring.child"]
        if self._sandbox:
            arguments = sandboxed([*arguments, "sandbox"], _readable(self._task))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is read until the process has ended
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env=SAME_ORDER,
                limit=self._line_bytes,
            )
            async with asyncio.timeout(START_S):
                await self._send(line_of(asdict(self._task)))
                line = await self._line()
        except (OSError, ContractError, TimeoutError) as error:
            said = self._said() or error
            await self.end()
            raise ConfigError(f"a scoring process did not start: {said}") from error
        except BaseException:
            await self.end()
            raise
        if line != READY:
            await self.end()
            raise ConfigError("a scoring process did not start: it said something else than that it is ready")
        self._errors.seek(0)
        self._errors.truncate()  # warnings of libraries are not why it may end

    async def results(self, key: str, texts: Sequence[str], hangs: int) -> AsyncIterator[Verdict]:
        """Yield what came of each answer, in order; there are no more after the last to hang of this many.

        Raises:
            ContractError: when the process ended, fell silent or wrote what is no result.
        """
        request = line_of({"key": key, "texts": list(texts), "hangs": hangs})
        for _ in texts:
            try:
                async with asyncio.timeout(self._task.answer_timeout_s + GRACE_S):
                    if request:  # one that has ended takes nothing more, but its results can still be read
                        await self._send(request)
                    line = await self._line()
            except TimeoutError:
                raise ContractError("a scoring process fell silent") from None
            request = b""
            yield parse_result(line, self._task.reward_range)

    async def turn(
        self, request: Mapping[str, Any], answers: int, reward_range: tuple[float, float]
    ) -> Turn | Lost:
        """Return what came of a request that takes a conversation's process this many answers.

        Raises:
            ContractError: when this process ended, fell silent or wrote what is no turn.
        """
        try:
            async with asyncio.timeout(answers * self._task.answer_timeout_s + GRACE_S):
                await self._send(line_of(request))
                return parse_turn(await self._line(), reward_range)
        except TimeoutError:
            raise ContractError("a scoring process fell silent") from None

    async def forget(self, trajectory: str) -> None:
        """Have it end a conversation once it has done what it does now."""
        if self.running:
            with contextlib.suppress(ContractError):  # it has ended, and the conversation with it
                await self._send(line_of({"forget": trajectory}))

    async def end(self) -> None:
        """Kill it, with all that runs in its sandbox."""
        process, self._process = self._process, None
        if self._errors is not None:
            self._errors.close()
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILL_S):
                await process.wait()
        except TimeoutError:
            _log.error("scoring.not_ended", pid=process.pid)

    async def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._ended() from error

    async def _line(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise ContractError(f"a scoring process wrote a line of over {self._line_bytes} bytes") from error
        if not line.endswith(b"\n"):
            raise self._ended()
        return line

    def _ended(self) -> ContractError:
        return ContractError(f"a scoring process ended: {self._said() or 'it said nothing'}")

    def _said(self) -> str:
        """Return the last line of what it wrote to its standard error."""
        if self._errors is None or self._errors.closed:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, 2) - _TAIL_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return plain(self._task.without_secrets(lines[-1].strip())[:REASON_CHARS]) if lines else ""


def _readable(task: ScoringTask) -> list[Path]:
    packages = {"antiphon", "antiphon.core", "antiphon.environments", "antiphon.system"}
    module = task.factory.partition(":")[0].split(".")
    packages.add(".".join(module[: 2 if module[0] == "antiphon" else 1]))
    folders = (_folder(package) for package in sorted(packages))
    return [*interpreter_paths(), *folders, *map(Path, task.readable)]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"there is no package {package}; install it where Antiphon is installed")
    return Path(spec.origin).resolve().parent
