"""Futures: a call is in the journal before its id is given, its answer before it is told."""

import asyncio
import json
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import structlog

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.services.door import journal as kept
from antiphon.services.door import wire
from antiphon.services.door.journal import Form, Journal
from antiphon.system.clock import wall_clock
from antiphon.system.wakeup import Wakeup

HOLD_S = 40.0
"""Longest time that a poll is held; clients give it 45 s, and poll again at once when it is answered."""
RETRY_S = 1.0
"""Pause before what did not answer is asked again."""
_log = structlog.get_logger(__name__)


class Gone(ContractError):
    """A future or session that is here no more: status 410, upon which clients ask again."""


@dataclass(slots=True, eq=False)
class Future:
    """A call, and what came of it."""

    id: str
    of: str
    """Model or sampler; "" for neither."""
    seq: int
    call: str
    step: int | None = None
    """The step that it makes, where it was begun and makes one."""
    form: Form | None = None
    """Of its answer; None while there is none."""
    told_at: float | None = None
    waiting_for: str = ""
    change: Wakeup = field(default_factory=Wakeup)
    written: "asyncio.Future[None] | None" = None


class Futures:
    """All calls whose answers are not forgotten."""

    def __init__(self, journal: Journal, begin: Callable[[Future], None]) -> None:
        """Read what the journal has; `begin` is told of each call once it is there."""
        self._journal, self._begin = journal, begin
        self._known: dict[str, Future] = {}
        self._of: defaultdict[str, set[Future]] = defaultdict(set)
        for row in journal.rows():
            self._add(Future(*row))
        found = (one for one in self._known.values() if one.told_at is not None)
        self._told = deque(sorted(found, key=lambda one: one.told_at or 0.0))
        self.polls = self.answered = 0

    def all(self) -> Collection[Future]:
        """Return all, those of each model in order."""
        return self._known.values()

    def find(self, name: str) -> Future | None:
        """Return a call that is not forgotten."""
        return self._known.get(name)

    def of(self, name: str) -> Collection[Future]:
        """Return those of a model or sampler."""
        return self._of.get(name, ())

    async def submit(self, name: str, of: str, seq: int, call: str, body: bytes) -> Future:
        """Take a call in, or find it again when it is a repetition; it is on the disk then.

        Raises:
            ContractError: when another call had this number.
            UnavailableError: when the journal cannot be written.
        """
        future = self._known.get(name)
        if future is None:
            future = self._add(Future(name, of, seq, call))
            # A task of its own: a client that hangs up meanwhile asks again for what was begun.
            future.written = asyncio.ensure_future(self._take_in(future, body))
            await asyncio.shield(future.written)
            return future
        if future.written is not None:
            await asyncio.shield(future.written)
        before = self._journal.body(name)
        if future.call != call or (before != body and not _same(call, before, body)):
            raise ContractError(
                f"number {seq} of {of} was another call before; two clients use one model or session: let "
                "each create its own"
            )
        return future

    async def _take_in(self, future: Future, body: bytes) -> None:
        try:
            await self._journal.write(kept.begin(future.id, future.of, future.seq, future.call, body))
        except UnavailableError:
            self._remove(future)
            raise
        future.written = None
        self._begin(future)

    async def refuse(self, sentence: str) -> Future:
        """Return a future whose answer is that a call cannot be."""
        future = await self.submit(f"refused:{secrets.token_hex(6)}", "", 0, "refused", b"")
        await self.answer(future, *error_of(sentence, "user"))
        self.tell(future)
        return future

    async def answer(self, future: Future, form: Form, said: bytes, *more: kept.Statement) -> None:
        """Keep an answer, and `more` with it, and wake those who wait for it."""
        while True:
            try:
                await self._journal.write(kept.answer(future.id, form, said), *more)
                break
            except UnavailableError as error:  # it is not told before it is kept
                _log.warning("future.unkept", future=future.id, error=str(error))
                await asyncio.sleep(RETRY_S)
        future.form = form
        self.answered += 1
        future.change.notify()

    async def retrieve(self, name: str) -> tuple[Form, bytes] | Future:
        """Return the answer to a call, or the call when there is none within `HOLD_S`.

        Raises:
            Gone: for one that is not known, or no more.
        """
        self.polls += 1
        future = self._known.get(name)
        if future is None:
            raise Gone(f"there is no answer to {name[:80]} here any more; ask again")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HOLD_S
        while future.form is None:
            if not await future.change.wait(deadline - loop.time()):
                return future
        said = self._journal.answer(name)
        if future.told_at is None:
            self.tell(future)
        return future.form, said

    def tell(self, future: Future) -> None:
        """Begin the time after which an answer is forgotten."""
        future.told_at = wall_clock()
        self._told.append(future)
        self._journal.note(kept.told(future.id, future.told_at))

    def forget(self, ttl_s: float, needed: Collection[Future]) -> None:
        """Forget what was told `ttl_s` seconds ago, but what is `needed`."""
        now, again = wall_clock(), []
        while self._told and now - (self._told[0].told_at or 0.0) > ttl_s:
            future = self._told.popleft()
            if future in needed:
                again.append(future)
            else:
                self._remove(future)
                self._journal.note(kept.forget(future.id))
        self._told.extendleft(reversed(again))

    def _add(self, future: Future) -> Future:
        self._known[future.id] = future
        self._of[future.of].add(future)
        return future

    def _remove(self, future: Future) -> None:
        del self._known[future.id]
        self._of[future.of].discard(future)
        if not self._of[future.of]:
            del self._of[future.of]


def error_of(sentence: str, category: str) -> tuple[Form, bytes]:
    """Return an answer that says what went wrong; `category` is user or server."""
    return "error", json.dumps({"error": sentence, "category": category}).encode()


def _same(call: str, one: bytes, other: bytes) -> bool:
    """Return whether two bodies say the same; clients write one again for each attempt."""
    if call == "forward_backward":
        return wire.read_call(one) == wire.read_call(other)
    return bool(json.loads(one) == json.loads(other))
