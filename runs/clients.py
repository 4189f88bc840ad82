"""Clients: what this process asks the services of a run, on one event loop in one thread.

gRPC channels belong to a loop. Every wait ends at a deadline, at a stop, or with an answer.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar, cast

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.config_sections import ServicesSection
from antiphon.core.errors import AntiphonError, BlockedError, UnavailableError
from antiphon.core.status import Event
from antiphon.system.processes import new_event_loop

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)

ANSWER_S = 15.0
"""Longest wait for one answer of a service."""

CLOSE_S = 5.0
"""Longest wait for cancelled calls to end when the clients are closed."""

KEPT_EVENTS = 2000
"""Newest events of a log that are kept for those who read it behind the first, a few seconds of a run: each
request for a page costs both sides more than a dozen events, so only the first reader makes them."""

PAGE_S = 30.0
"""Longest wait for a page of the log that is there."""


class RunStopped(AntiphonError):
    """The run was asked to stop; stages leave at once and nothing is lost."""


class ClientLoop:
    """The loop and its thread, on which every gRPC client of this process lives."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            UnavailableError: when it did not finish within `timeout_s`.
        """
        return await_answer(self.begin(work), timeout_s)

    def begin(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Run a coroutine on the loop without waiting for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way, stop the loop and join its thread."""

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)

        self.run(cancel_all(), 2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)


def await_answer(future: "Future[_T]", timeout_s: float | None) -> _T:
    """Wait for the result of a call that was begun.

    Raises:
        UnavailableError: when it did not finish within `timeout_s`.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise UnavailableError(f"a service did not answer within {timeout_s:g} s") from None


class ServiceCalls:
    """Calls to the services of a run, which can be asked to stop."""

    clients: ClientLoop

    def __init__(self, services: ServicesSection) -> None:
        """Call with the patience that a configuration says; `clients` is set before the first call."""
        self._services = services
        self.stop_reason = ""
        """Why the run was asked to stop; empty while it was not."""
        self._stopped = threading.Event()
        self._waiting: set[Future[Any]] = set()

    def stop(self, reason: str) -> None:
        """Ask every stage to leave; the first reason is kept."""
        if not self._stopped.is_set():
            self.stop_reason = reason
            self._stopped.set()
            for future in list(self._waiting):
                future.cancel()  # callers that wait for it leave now
            _log.info("run.stopping", reason=reason)

    def check(self) -> None:
        """Leave if the run was asked to stop.

        Raises:
            RunStopped: with the reason.
        """
        if self._stopped.is_set():
            raise RunStopped(self.stop_reason)

    def call(self, work: Callable[[], Coroutine[Any, Any, _T]], timeout_s: float | None = ANSWER_S) -> _T:
        """Run a client call, trying again while the service is away, up to the stall timeout.

        Without `timeout_s` the call's own deadlines hold alone.

        Raises:
            RunStopped: when the run was asked to stop meanwhile.
            UnavailableError: when the service stayed away for services.stall_timeout_s, or could record
                nothing for services.outage_timeout_s.
        """
        since: float | None = None
        blocked = False
        while True:
            self.check()
            try:
                return self._answer(self.clients.begin(work()), timeout_s)
            except UnavailableError as error:
                now = time.perf_counter()
                if since is None or isinstance(error, BlockedError) is not blocked:
                    since, blocked = now, isinstance(error, BlockedError)
                limit_s = self._services.outage_timeout_s if blocked else self._services.stall_timeout_s
                if now - since > limit_s:
                    raise UnavailableError(f"gave up after {limit_s:g} s: {error}") from error
                self._stopped.wait(0.2)

    def wait(self, stage: Coroutine[Any, Any, _T]) -> _T:
        """Run a stage to its end; each of its calls has a deadline, and it ends when nothing moves.

        Raises:
            RunStopped: when the run was asked to stop meanwhile.
        """
        return self._answer(self.clients.begin(stage), None)

    def _answer(self, future: "Future[_T]", timeout_s: float | None) -> _T:
        self._waiting.add(future)
        try:
            self.check()  # a stop may have come before the future could be cancelled by it
            return await_answer(future, timeout_s)
        except CancelledError:
            raise RunStopped(self.stop_reason or "the call was cancelled") from None
        finally:
            self._waiting.discard(future)
            future.cancel()


class CoordinatorLog:
    """The log of a run whose coordinator answers, as `antiphon.api.sink.LogSource`."""

    def __init__(self, clients: ClientLoop, coordinator: Coordinator) -> None:
        self._clients, self._coordinator = clients, coordinator
        self._waiting: set[Future[Sequence[Event]]] = set()
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        """Without gaps, oldest first."""
        self._keeping = threading.Lock()

    def page(self, after_seq: int, wait_s: float) -> Sequence[Event]:
        """Return the next events after one, waiting up to `wait_s` seconds for the first.

        Raises:
            UnavailableError: when the coordinator does not answer.
        """
        with self._keeping:
            start = after_seq + 1 - self._kept[0].seq if self._kept else -1
            found = list(islice(self._kept, start, None)) if start >= 0 else []
        if not found:
            found = list(self._ask(after_seq, wait_s))
            with self._keeping:
                for event in found:
                    newest = self._kept[-1].seq if self._kept else 0
                    if event.seq > newest + 1:
                        self._kept.clear()
                    if event.seq > newest:
                        self._kept.append(event)
        return found

    def _ask(self, after_seq: int, wait_s: float) -> Sequence[Event]:
        future = self._clients.begin(_next_page(self._coordinator, after_seq, wait_s))
        if not wait_s:
            return await_answer(future, PAGE_S)
        self._waiting.add(future)
        try:
            return await_answer(future, wait_s + PAGE_S)
        except CancelledError:
            return []
        finally:
            self._waiting.discard(future)

    def interrupt(self) -> None:
        """Let calls that wait for an event return at once."""
        for future in list(self._waiting):
            future.cancel()


async def _next_page(coordinator: Coordinator, after_seq: int, wait_s: float) -> Sequence[Event]:
    found = coordinator.event_pages(after_seq, follow=wait_s > 0)
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(wait_s or None),
            aclosing(cast("AsyncGenerator[Sequence[Event]]", found)) as pages,
        ):
            async for page in pages:
                return page
    return []


@contextmanager
def repeated(name: str, pause_s: float, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` again and again in a thread of its own until the block is left.

    What fails in a look is logged once for each reason, and the next one is taken all the same.
    """
    over = threading.Event()

    def work() -> None:
        said = ""
        while not over.wait(pause_s):
            try:
                look()
            except AntiphonError as error:
                if said != str(error):
                    _log.warning("look.failed", what=name, reason=str(error))
                said = str(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10.0)
