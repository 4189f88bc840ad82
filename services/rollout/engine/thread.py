"""Engine thread: one thread owns the engine, and all others send it messages.

Messages are executed at step boundaries only, so weights never change in the middle of a step.
While requests are unfinished the thread steps without pause; otherwise it sleeps. Finished
completions go back to the event loop. A failure of the engine ends `run` with that error. No one can
end a step that hangs, so the thread is one that the process does not wait for at its end.

Where an engine cannot say which version sampled what, no request may see two: a swap aborts those in flight,
and they begin again under the new version.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from antiphon.api.engine import Engine, EngineOutput, EngineProgress, EngineRequest, LoadReport
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.services.rollout.engine.watchdog import Watchdog
from antiphon.system import failpoints

IDLE_S = 1.0
"""Longest sleep of an idle engine thread before it looks whether it should stop."""
CLOSE_S = 5.0
"""Longest wait for the step that runs when the thread is asked to stop, and for freeing the engine."""
_T = TypeVar("_T")


class EngineThread:
    """The engine behind a mailbox. Its methods belong to the event loop that runs `run`.

    In the simulation that loop itself drives the engine, in virtual time.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        deliver: Callable[[list[EngineOutput]], None],
        watchdog: Watchdog | None = None,
    ) -> None:
        """Prepare; `make_engine` is called in the thread that will own it, `deliver` on the event loop.

        `watchdog` is told of each step and message; by default nobody acts on one that hangs.
        """
        self._watchdog = watchdog or Watchdog()
        self._make_engine = make_engine
        self._deliver = deliver
        self._mailbox: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._started = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.busy_s = 0.0
        """Seconds in which the engine had requests to run."""
        self.loading = False
        """Whether the engine takes in weights now; while it waits for the end of a step, it does not."""
        self.drafts = False
        """Whether the engine drafted when it was last looked at: history is of use to it."""
        self.continues = False
        """Whether the engine continues a prefix as if it had sampled that itself."""
        self.numerics = ""
        """What decides the engine's bits, as the engine says; "" before it is built."""
        self.missing_abilities: tuple[str, ...] = ()
        """Names of what the engine says that it cannot do."""
        self.vocabulary_size = 0
        """Number of tokens of the engine's model; 0 before it is built."""
        self._repeated: dict[str, EngineRequest] = {}
        """What is in flight in an engine whose requests do not outlive a swap."""

    async def run(self) -> None:
        """Build the engine and drive it until cancelled; a failure of the engine is raised here."""
        self._loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = self._loop.create_future()
        ended.add_done_callback(lambda future: future.exception())  # raised below, unless this was cancelled
        threading.Thread(target=self._drive_until, args=(ended,), name="engine", daemon=True).start()
        try:
            await asyncio.shield(ended)
        finally:
            self.stop()
            await asyncio.wait([ended], timeout=CLOSE_S)

    async def started(self, timeout_s: float) -> None:
        """Wait until the engine is built; when it cannot be built, `run` raises why.

        Raises:
            UnavailableError: when building takes longer than `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._started.wait()
        except TimeoutError:
            raise UnavailableError(
                f"the rollout engine was not up after {timeout_s:g} s; raise services.start_timeout_s"
            ) from None

    def stop(self) -> None:
        """Ask the thread to end at the next step boundary."""
        self._stopping.set()
        self._mailbox.put(lambda engine: None)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests for the next step."""
        self._mailbox.put(lambda engine: self._add(engine, requests))

    def _add(self, engine: Engine, requests: Sequence[EngineRequest]) -> None:
        engine.add(requests)
        if not engine.abilities.outlives_swaps:
            self._repeated.update((one.request_id, one) for one in requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; an output that is already on its way may still be delivered."""
        self._mailbox.put(lambda engine: self._abort(engine, request_ids))

    def _abort(self, engine: Engine, request_ids: Sequence[str]) -> None:
        engine.abort(request_ids)
        for request_id in request_ids:
            self._repeated.pop(request_id, None)

    async def progress(
        self, since: Mapping[str, int], timeout_s: float, stop: bool = False
    ) -> list[EngineProgress] | None:
        """Return what the requests of `since` have sampled by the next step boundary.

        Args:
            since: request id -> tokens known already.
            timeout_s: longest wait for a step that takes its time.
            stop: forget these requests in the same moment.

        Returns:
            None when the engine did not come to a step boundary within `timeout_s` seconds.
        """

        def execute(engine: Engine) -> list[EngineProgress]:
            # What begins again at a swap is not to be kept by anyone.
            found = engine.progress(since) if engine.abilities.outlives_swaps else []
            if stop:
                self._abort(engine, list(since))
            return found

        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(execute)
        except TimeoutError:
            return None

    async def load(
        self, version: int, tensors: Mapping[str, Any], weights_digest: str, timeout_s: float
    ) -> LoadReport:
        """Swap weights at the next step boundary, and return when they sample or why they do not.

        Raises:
            IntegrityError: when the engine does not echo the digest it was given.
            UnavailableError: when the engine did not take them within `timeout_s` seconds.
        """

        def execute(engine: Engine) -> tuple[int | None, str | None, str]:
            self.loading, problem = True, ""
            engine.abort(list(self._repeated))
            try:
                engine.load_weights(version, tensors, weights_digest)
            except IntegrityError as error:
                problem = str(error)
            if engine.version is not None:
                engine.add(list(self._repeated.values()))
            self.loading = False
            self._look(engine)
            return engine.version, engine.weights_digest, problem

        try:
            async with asyncio.timeout(timeout_s):
                serving, digest, problem = await self._ask(execute)
        except TimeoutError:
            raise UnavailableError(
                f"the rollout engine did not take version {version} within {timeout_s:g} s; look at its log"
            ) from None
        if not problem and (serving, digest) != (version, weights_digest):
            raise IntegrityError(
                f"the engine serves version {serving} with digest {digest} after loading version "
                f"{version} with digest {weights_digest}; it must not sample"
            )
        return LoadReport(serving, problem)

    async def _ask(self, command: Callable[[Engine], _T]) -> _T:
        answer: Future[_T] = Future()

        def execute(engine: Engine) -> None:
            result = command(engine)
            with suppress(InvalidStateError):  # no one waits for it any more
                answer.set_result(result)

        self._mailbox.put(execute)
        return await asyncio.wrap_future(answer)

    def _drive_until(self, ended: "asyncio.Future[None]") -> None:
        try:
            self._drive()
        except BaseException as error:  # noqa: BLE001 - raised where `run` is awaited
            problem = error
            self._call_soon(lambda: ended.set_exception(problem))
        else:
            self._call_soon(lambda: ended.set_result(None))

    def _drive(self) -> None:
        engine = self._make_engine()
        self._look(engine)
        self._call_soon(self._started.set)
        try:
            while not self._stopping.is_set():
                self._execute_messages(engine)
                if engine.unfinished:
                    self._advance(engine)
        finally:
            engine.close()

    def _look(self, engine: Engine) -> None:
        """Note what the engine can do; one that was started without weights knows after its first load."""
        self.drafts, self.continues = engine.drafts, engine.continues
        self.numerics, self.vocabulary_size = engine.numerics, engine.vocabulary_size
        self.missing_abilities = engine.abilities.missing

    def _execute_messages(self, engine: Engine) -> None:
        wait = engine.unfinished == 0 or engine.version is None
        while True:
            try:
                message = self._mailbox.get(block=wait, timeout=IDLE_S if wait else None)
            except queue.Empty:
                return
            self._watchdog.begin(is_step=False)
            message(engine)
            self._watchdog.finish()
            wait = False

    def _advance(self, engine: Engine) -> None:
        self._watchdog.begin(is_step=True)
        failpoints.reach("worker.generate")
        outputs = engine.step()
        self.busy_s += self._watchdog.finish()
        self.drafts = engine.drafts  # a broken drafter switches itself off in the middle of a run
        for output in outputs:
            self._repeated.pop(output.request_id, None)
        if outputs:
            self._call_soon(lambda: self._deliver(outputs))

    def _call_soon(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


DriveEngine = Callable[[Callable[[], Engine], Callable[[list[EngineOutput]], None]], EngineThread]
"""Makes a driver from what builds the engine and what takes finished completions."""
