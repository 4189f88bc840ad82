"""Virtual time: an asyncio event loop whose clock jumps to the next timer, and nothing ever sleeps.

Callbacks run in the order in which they became due; timers of one instant in the order in which
they were set. Work for threads runs on the loop itself, takes as much virtual time as it says, and
keeps its order where the executor has one thread. Tasks belong to simulated processes, which can
be killed or stopped at any instant. A run in which nothing can happen any more, or whose clock
stands still or runs away, ends with an error that names who waits for what.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from antiphon.core.errors import UnavailableError

RESOLUTION_S = 1e-9
"""Shortest delay of a timer that has one; real clocks have such a grain, too."""
STILL_LIMIT = 200_000
"""Callbacks run within one instant before the clock counts as standing still."""
ENDINGS = 8
"""Times that a task is cancelled which does not end."""
_T = TypeVar("_T")
_current: "ContextVar[Process | None]" = ContextVar("process", default=None)


class _Task(asyncio.Task[Any]):
    """A task whose hash is a number, so that sets of tasks are walked in the same order every time."""

    def __init__(self, coro: Any, number: int, loop: Any, name: str, context: Context | None) -> None:
        self.number = number  # asked for while the task is being made
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class Handle:
    """A callback to come; one that was cancelled is passed over."""

    __slots__ = ("arguments", "callback", "context")

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...], context: Context) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.arguments = arguments
        self.context = context

    def cancel(self) -> None:
        self.callback, self.arguments = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class Process:
    """One simulated process: the tasks that were begun within it, and whether they still run."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        """Begin an empty process; `spawn` gives it work."""
        self.name = name
        self.begun_s = loop.time()
        self.alive = True
        self.stopped = False
        """Suspended, as by SIGSTOP: nothing of it runs until `resume`."""
        self.backlog: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = copy_context()
        self.context.run(_current.set, self)
        self._loop = loop

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a coroutine as part of this process."""
        return self._loop.create_task(work, context=self.context)

    def kill(self) -> None:
        """End at this instant: whatever its tasks still do has no effect.

        They are cancelled so that nothing lingers; every way out of a process asks `alive` first.
        """
        self.alive = False
        self.resume()
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.cancel()

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self._loop.stopped += 1

    def resume(self) -> None:
        """Continue after `stop` with everything that became due meanwhile."""
        if not self.stopped:
            return
        self.stopped = False
        self._loop.stopped -= 1
        self._loop.ready.extend(self.backlog)
        self.backlog.clear()


def current_process() -> Process | None:
    """Return the process that the running callback belongs to, or None."""
    return _current.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop in virtual seconds."""

    def __init__(self, work_s: Callable[[], tuple[float, float]], limit_s: float) -> None:
        """Begin at second 0; a run of more than `limit_s` virtual seconds counts as endless.

        `work_s`: seconds before and after the instant at which a piece of a thread's work takes effect; asked
        once for each.
        """
        self._now = 0.0
        self.ready: deque[Handle] = deque()
        """Callbacks of this instant."""
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._tasks_made = 0
        self._work_s = work_s
        self._limit_s = limit_s
        self._spent_s = 0.0
        self._waiting: dict[Executor, deque[tuple[Any, ...]]] = {}
        """Executor whose one thread works -> what it does next, in order."""
        self._still_until = STILL_LIMIT
        self.stopped = 0
        """Processes that are suspended."""
        self.callbacks = 0
        """Callbacks run so far."""
        self.complaints: list[str] = []
        """What would have gone to the exception handler: errors of tasks that were never awaited."""
        self._living: list[asyncio.Task[Any]] = []

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback within this instant, after those that are due already."""
        handle = Handle(callback, args, copy_context() if context is None else context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        # A process whose clock shows another time may see a rest too short for this clock to move by.
        delay = max(delay, RESOLUTION_S) if delay > 0 else 0.0
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """Begin a task within the process that asks."""
        self._tasks_made += 1
        task = _Task(coro, self._tasks_made, self, name or "task", context)
        process = _current.get() if context is None else context.get(_current)
        tasks = self._living if process is None else process.tasks
        if len(tasks) >= 64:
            tasks[:] = [known for known in tasks if not known.done()]
        tasks.append(task)
        if process is not None and not process.alive:
            task.cancel()
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep errors that were never awaited for the report."""
        error = context.get("exception")
        self.complaints.append(f"{context.get('message')}: {error!r}")

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Take no notice: cancelled timers are passed over when they are due."""

    async def shutdown_asyncgens(self) -> None:
        """Take no notice: generators end with their tasks."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Run a thread's work on the loop, in virtual time; in order where there is one thread."""
        answer: asyncio.Future[_T] = self.create_future()
        job = (answer, func, args, _current.get())
        if executor is not None and executor in self._waiting:
            self._waiting[executor].append(job)
            return answer
        if executor is not None:
            self._waiting[executor] = deque()
        self._begin(executor, job)
        return answer

    def spend(self, seconds: float) -> None:
        """Say, from within a thread's work, how long it takes."""
        self._spent_s += seconds

    def _begin(self, executor: Executor | None, job: tuple[Any, ...]) -> None:
        before_s, after_s = self._work_s()
        context = copy_context() if job[3] is None else job[3].context
        self.call_later(before_s, self._work, executor, job, after_s, context=context)

    def _work(self, executor: Executor | None, job: tuple[Any, ...], after_s: float) -> None:
        answer, func, arguments, process = job
        if process is not None and not process.alive:
            answer.cancel()
            return
        spent_before, self._spent_s = self._spent_s, 0.0
        try:
            finish = partial(answer.set_result, func(*arguments))
        except Exception as error:  # noqa: BLE001 - a thread hands every error to its awaiter
            finish = partial(answer.set_exception, error)
        seconds, self._spent_s = self._spent_s + after_s, spent_before
        context = copy_context() if process is None else process.context
        self.call_later(seconds, self._end, executor, answer, finish, context=context)

    def _end(
        self, executor: Executor | None, answer: asyncio.Future[Any], finish: Callable[[], None]
    ) -> None:
        if not answer.done():
            finish()
        if executor is not None:
            if waiting := self._waiting[executor]:
                self._begin(executor, waiting.popleft())
            else:
                del self._waiting[executor]

    # Running.

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run until `work` ends, and return what it returned.

        Raises:
            UnavailableError: when nothing can happen any more, the clock stands still, or the run
                lasts longer than its limit.
        """
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(work)
            self._run_until(task)
        finally:
            asyncio._set_running_loop(None)
        self.unwind()
        return task.result()

    def _run_until(self, task: asyncio.Task[Any]) -> None:
        ready, timers, pop = self.ready, self._timers, heapq.heappop
        while not task.done():
            if ready:
                handle = ready.popleft()
                callback = handle.callback
                if callback is None:
                    continue
            else:
                if not timers:
                    raise UnavailableError(
                        f"nothing can happen any more at {self._now:.3f} s; {self._waiters()}"
                    )
                when, _, handle = pop(timers)
                callback = handle.callback
                if callback is None:
                    continue
                if when > self._now:
                    self._pass_time(when)
            if self.stopped:
                process = handle.context.get(_current)
                if process is not None and process.stopped:
                    process.backlog.append(handle)
                    continue
            self.callbacks += 1
            if self.callbacks > self._still_until:
                raise UnavailableError(f"the clock stands still at {self._now:.3f} s; {self._waiters()}")
            handle.context.run(callback, *handle.arguments)

    def _pass_time(self, when: float) -> None:
        self._now = when
        self._still_until = self.callbacks + STILL_LIMIT
        if when > self._limit_s:
            raise UnavailableError(
                f"the run is not over after {self._limit_s:g} virtual seconds; {self._waiters()}"
            )

    def unwind(self) -> None:
        """End every task that is left, so that none is found dead later; one that will not end is left."""
        asyncio._set_running_loop(self)
        try:
            for _ in range(ENDINGS):
                # A task that waits for something on its way out is cancelled there once more.
                for task in self._unfinished():
                    task.cancel()
                until = self.callbacks + STILL_LIMIT
                while self.ready and self.callbacks < until:
                    self.callbacks += 1
                    handle = self.ready.popleft()
                    if handle.callback is not None:
                        handle.context.run(handle.callback, *handle.arguments)
        finally:
            asyncio._set_running_loop(None)

    def _unfinished(self) -> list[asyncio.Task[Any]]:
        return sorted(asyncio.all_tasks(self), key=hash)

    def _waiters(self) -> str:
        places = []
        for task in self._unfinished():
            stack = task.get_stack(limit=1)
            where = f" at {stack[0].f_code.co_name}:{stack[0].f_lineno}" if stack else ""
            coroutine = getattr(task.get_coro(), "__qualname__", task.get_name())
            places.append(f"{coroutine}{where}")
        shown = ", ".join(sorted(set(places))[:12])
        return f"waiting: {shown or 'no task'}"
