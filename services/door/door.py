"""Door: sessions, models, samplers and futures of clients, and what is done for them in which order.

A call is in the journal before its id is given, and its answer before it is told, so that a door that was
killed takes up whatever has no answer. The calls of one model are done one after the other by their `seq_id`;
requests for samples wait for nobody. HTTP is `server`'s, services are behind `ClientRuns`.
"""

import asyncio
import json
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog
from pydantic import BaseModel

from antiphon.api.client_run import ClientRun, ClientRuns, ModelOrder, SavedVersion
from antiphon.core.client_records import Datum, SampleRequest, SavedWeights, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import Trajectory
from antiphon.lineage.saved_weights import saved_at
from antiphon.net.http_serving import read_json
from antiphon.protos import tinker_pb2 as pb
from antiphon.services.door import journal as kept
from antiphon.services.door import wire
from antiphon.services.door.futures import RETRY_S, Future, Futures, Gone, error_of
from antiphon.services.door.journal import Form, Journal, open_journal
from antiphon.system.clock import wall_clock

HERE = "local"
"""Owner of what is made with the key of the home; may read and load what others saved in it."""
POLL_S = 20.0
"""Longest single wait for samples."""
TICK_S = 2.0
"""Pause between two looks at what is silent or expired."""
EXPIRY_S = 60.0
"""Pause between two looks at what is over: weights, samplers, sessions."""
SILENT_S = 7 * 86400.0
"""Silence after which a session that was not finished is over too."""
MOST_WAITING = 1024
"""Requests for samples of one model that are taken in and not answered; the client keeps the others."""
_EPHEMERAL = re.compile(r"session-\d+")
"""Names of what is saved for samplers without one; not listed."""
_STABLE = (
    "stable_reinforce is unpublished, so it is not served here; pass loss_fn=importance_sampling (recipes: "
    "loss_fn=importance_sampling), or serve with door.stable_reinforce=ours"
)
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class Unknown(ContractError):
    """Something that a call names and that is not here: status 404."""


class Busy(ContractError):
    """More than is taken in: status 429, upon which clients wait."""


class Session(BaseModel):
    """A client."""

    id: str
    owner: str
    created: float
    """Unix seconds."""
    finished: bool = False
    metadata: dict[str, Any] | None = None


class Model(BaseModel):
    """A model of a client: one run."""

    id: str
    session: str
    run_id: str
    base_model: str
    rank: int
    next_seq: int = 0
    """The call that is done next; 0 creates it."""
    stepped_seq: int = 0
    """The call that made its newest version; those after it add up."""
    metadata: dict[str, Any] | None = None


class Sampler(BaseModel):
    """What a client samples from: a version of a run, or its newest ones."""

    id: str
    session: str
    run_id: str = ""
    """Empty: of the base model, until it is known which run has its weights."""
    version: int | None = None
    """None: the newest ones, swaps included."""
    base_model: str
    path: str | None = None
    kept: str = ""
    """Name by which the version's weights are kept for it."""
    ended: float | None = None
    """When its weights were given up, Unix seconds."""


@dataclass(slots=True)
class _Line:
    """The calls of one model that are not done."""

    moved_s: float
    """When it was last seen to go on, or to wait for nothing; by the door's clock."""
    waiting: dict[int, Future] = field(default_factory=dict)
    held: list[Future] = field(default_factory=list)
    """Those that add up for the next step."""
    calls: dict[str, TrainingCall] = field(default_factory=dict)
    """What they say, by their ids, as far as it was read."""
    busy: bool = False
    lost: str = ""
    """Why the call that is done next is refused: those before it never came."""


class Door:
    """What clients ask for; `open_door` makes one."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        runs: ClientRuns,
        journal: Journal,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        """Take up what the journal has; `name` begins the ids of runs."""
        self._config, self._runs, self._journal = config, runs, journal
        self._name = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:32]
        self._tasks, self._clock = tasks, clock
        self.sessions = {one.id: one for one in map(Session.model_validate_json, journal.things("session"))}
        models = map(Model.model_validate_json, journal.things("model"))
        samplers = map(Sampler.model_validate_json, journal.things("sampler"))
        # A full disk may have kept what was to go with a session.
        self.models = {one.id: one for one in models if one.session in self.sessions}
        self.samplers = {one.id: one for one in samplers if one.session in self.sessions}
        self._lines = {name: _Line(clock()) for name in self.models}
        self.futures = Futures(journal, self._begin)
        """What was asked, and what came of it."""
        self._busy: Counter[str] = Counter()
        """Session -> requests for samples, and models, that are worked on."""
        self._queued: Counter[str] = Counter()
        """Model, by its run -> requests that are not answered."""
        before = clock() - config.door.session_timeout_s
        self._beats = {one.id: before if one.finished else clock() for one in self.sessions.values()}
        self._silent: set[str] = set()
        """Sessions that were not heard for door.session_timeout_s."""
        self._open: set[str] = set()
        """Runs whose services this door started."""
        self._base = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}
        """Run -> held while it is opened or closed."""
        self._naming: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Run -> held while a name of its saved weights is given or taken away."""
        self._running: set[asyncio.Task[None]] = set()
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        """Run -> sessions whose models or samplers it has."""
        self._kept: defaultdict[str, dict[str, Sampler]] = defaultdict(dict)
        """Run -> samplers for which weights are kept, by their ids."""
        for one in self.models.values():
            self._users[one.run_id].add(one.session)
        for sampler in self.samplers.values():
            self._note_sampler(sampler)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def stop(self) -> None:
        """Leave everything as it is in the journal."""
        for task in self._running:
            task.cancel()

    def take_up(self) -> None:
        """Begin with what has no answer, and look at what is silent or expired from now on."""
        self._spawn(self._look())
        for future in self.futures.all():
            line = self._lines.get(future.of)
            if future.form is None:
                self._begin(future)
            elif line is not None and future.form == "protobuf":
                counts = future.seq > self.models[future.of].stepped_seq
                if counts and not wire.read_call(self._journal.body(future.id)).forward_only:
                    line.held.append(future)

    # Sessions.

    async def create_session(self, owner: str, said: wire.NewSession) -> dict[str, Any]:
        """Begin a session."""
        made = Session(
            id=secrets.token_hex(6), owner=owner, created=wall_clock(), metadata=said.user_metadata
        )
        await self._journal.write(kept.keep("session", made.id, _bytes(made)))
        self.sessions[made.id], self._beats[made.id] = made, self._clock()
        warning = wire.sdk_warning(said.sdk_version)
        if warning:
            _log.warning("door.sdk_unknown", version=said.sdk_version[:40], session=made.id)
        _log.info("session.began", session=made.id, owner=owner)
        return {"type": "create_session", "session_id": made.id} | (
            {"warning_message": warning} if warning else {}
        )

    def session(self, owner: str, name: str) -> Session:
        """Return a session of this owner, which is alive again.

        Raises:
            Unknown: when there is none.
        """
        if not self._owns(owner, name):
            raise Unknown(f"there is no session {name[:80]} of yours here; create one")
        self._beats[name] = self._clock()
        return self.sessions[name]

    def _owns(self, owner: str, session: str) -> bool:
        found = self.sessions.get(session)
        return found is not None and found.owner == owner

    async def beat(self, owner: str, said: wire.OfSession) -> dict[str, Any]:
        """Hear that a client is there.

        Raises:
            Gone: when its session is unknown, or was finished: the client beats no more.
        """
        name = said.session_id
        if not self._owns(owner, name) or self.sessions[name].finished:
            raise Gone(f"there is no session {name[:80]} any more; create one")
        self._beats[name] = self._clock()
        return {"type": "session_heartbeat"}

    async def finish(self, owner: str, id: str) -> dict[str, Any]:
        """End a session: its models keep what they have and give their places back."""
        session = self.session(owner, id)
        session.finished = True
        await self._journal.write(kept.keep("session", id, _bytes(session)))
        self._beats[id] = self._clock() - self._config.door.session_timeout_s
        return {}

    async def list_sessions(self, owner: str) -> dict[str, Any]:
        """Return the sessions of an owner."""
        return {"sessions": [one.id for one in self.sessions.values() if one.owner == owner]}

    async def show_session(self, owner: str, id: str) -> dict[str, Any]:
        """Return what belongs to a session."""
        found = self.session(owner, id)
        return {
            "training_run_ids": [one.run_id for one in self.models.values() if one.session == id],
            "sampler_ids": [one.id for one in self.samplers.values() if one.session == id],
            "user_metadata": wire.text(found.metadata),
        }

    async def _look(self) -> None:
        """Look at what is silent or expired, for ever."""
        looked = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            needed = {one for line in self._lines.values() for one in line.held}  # the step asks for them
            self.futures.forget(self._config.door.future_ttl_s, needed)
            self._pass_gaps()
            try:
                await self._close_silent()
                if self._clock() - looked > EXPIRY_S:
                    looked = self._clock()
                    await self._forget(await self._drop_expired())
            except (AntiphonError, OSError) as error:  # the next look tries again
                _log.warning("door.look", error=str(error))

    async def _drop_expired(self) -> set[str]:
        """Give up weights whose time is over; return the paths of those that stay."""
        stay = set()
        for one in await asyncio.to_thread(self._runs.saved):
            if not _is_over(one):
                stay.add(one.saved.path)
                continue
            try:
                if await self._drop(one.saved, expired=True):
                    _log.info("weights.expired", path=one.saved.path)
                else:
                    stay.add(one.saved.path)
            except UnavailableError as error:  # others may go nevertheless
                _log.warning("weights.stay", path=one.saved.path, error=str(error))
        return stay

    async def _drop(self, saved: SavedWeights, expired: bool = False) -> bool:
        """Give up saved weights; `expired`: only when their time is over still, they may be saved again."""
        async with self._naming[saved.run_id], self._turns.setdefault(saved.run_id, asyncio.Lock()):
            if expired and self._saved(saved) is not None:
                return False
            await self._runs.drop(saved)
            return True

    async def _forget(self, stay: set[str]) -> None:
        """Forget what is over, once the answers to it are forgotten; `stay` are the paths of saved weights.

        That is a sampler without weights after door.future_ttl_s; a session, with its samplers, that time
        after it was finished or after `SILENT_S`; and its models once their runs are removed from the home.
        """
        for sampler in list(self.samplers.values()):
            path, over = sampler.path, self._over(sampler.session)
            try:
                lost = path is not None and path not in stay and self._runs.find(saved_at(path)) is None
                if sampler.ended is None and (over or lost):
                    await self._end(sampler)
            except (IntegrityError, UnavailableError) as error:  # others may go nevertheless
                _log.warning("sampler.stays", sampler=sampler.id, error=str(error))
                continue
            past = sampler.ended is not None and wall_clock() - sampler.ended > self._config.door.future_ttl_s
            if (over or past) and not self.futures.of(sampler.id):
                del self.samplers[sampler.id]
                self._journal.note(kept.remove("sampler", sampler.id))
        runs = {*await asyncio.to_thread(self._runs.runs)}
        for model in [one for one in self.models.values() if self._over(one.session)]:
            line = self._lines[model.id]
            line.held.clear()
            line.calls.clear()
            while line.waiting:  # for calls that never came
                _, future = line.waiting.popitem()
                await self.futures.answer(future, *error_of("the session of this call is over", "user"))
                self.futures.tell(future)
            if model.run_id not in runs and not self.futures.of(model.id):
                del self.models[model.id], self._lines[model.id]
                self._journal.note(kept.remove("model", model.id))
        needed = {a.session for a in self.samplers.values()} | {a.session for a in self.models.values()}
        for name in [one for one in self.sessions if one not in needed and self._over(one)]:
            del self.sessions[name], self._beats[name], self._busy[name]
            self._silent.discard(name)
            self._journal.note(kept.remove("session", name))
        for run_id in list(self._users):
            self._users[run_id] &= self.sessions.keys()
            if not self._users[run_id] and run_id not in self._open:
                del self._users[run_id]
                self._kept.pop(run_id, None)

    def _over(self, session: str) -> bool:
        """Return whether nobody is expected to go on with a session."""
        ttl_s = self._config.door.future_ttl_s
        silence_s = ttl_s if self.sessions[session].finished else max(ttl_s, SILENT_S)
        return session in self._silent and self._silence(session) > silence_s

    def _silence(self, session: str) -> float:
        """Return for how many seconds a session was not heard."""
        return self._clock() - self._beats[session]

    def _pass_gaps(self) -> None:
        """Give up numbers of calls that did not come for door.session_timeout_s while later ones wait.

        The client may have heard that they were refused, a body that is too large, and have gone on.
        """
        now, patience_s = self._clock(), self._config.door.session_timeout_s
        for name, line in self._lines.items():
            model = self.models[name]
            goes_on = line.busy or not line.waiting or model.next_seq in line.waiting
            if goes_on or now - self._beats[model.session] > patience_s:  # a silent client may yet send it
                line.moved_s = now
            elif now - line.moved_s > patience_s:
                first, model.next_seq = model.next_seq, min(line.waiting)
                line.lost = (
                    f"call {first} of model {name} did not come, so call {model.next_seq} was not done; "
                    "repeat what is missing of the step, or go on with the calls after it"
                )
                self._begin(line.waiting[model.next_seq])

    async def _close_silent(self) -> None:
        silent = {
            name
            for name in self.sessions
            if not self._busy[name] and self._silence(name) >= self._config.door.session_timeout_s
        }
        fresh, self._silent = silent - self._silent, silent
        if fresh:
            for future in self.futures.all():  # nobody asks for them, as far as is known
                told = future.form is None or future.told_at is not None
                if not told and _session(future.of) in fresh:
                    self.futures.tell(future)
        for run_id in [one for one in self._open if self._users[one] <= silent]:
            # While another one was closed a client may have come back.
            if not any(self._busy[one] for one in self._users[run_id]):
                await self._close(run_id)

    async def _run(self, run_id: str, order: ModelOrder | None = None) -> ClientRun:
        """Return a run whose services are up; with an order, one that is created where it is missing."""
        async with self._turns.setdefault(run_id, asyncio.Lock()):
            self._open.add(run_id)
            try:
                return await (self._runs.open(run_id) if order is None else self._runs.create(run_id, order))
            except BaseException:
                self._open.discard(run_id)
                raise

    async def _close(self, run_id: str) -> None:
        async with self._turns.setdefault(run_id, asyncio.Lock()):
            self._open.discard(run_id)
            await self._runs.close(run_id)
        _log.info("model.closed", run=run_id)

    def _begin(self, future: Future) -> None:
        model = self.models.get(future.of)
        if model is not None:
            line = self._lines[model.id]
            line.waiting[future.seq] = future
            if not line.busy and model.next_seq in line.waiting:
                line.busy = True
                self._spawn(self._work(model, line))
            elif not line.busy:
                future.waiting_for = f"call {model.next_seq} of this model, which did not come yet"
        elif future.of in self.samplers:
            sampler = self.samplers[future.of]
            self._spawn(self._sample(future, sampler.session, sampler.run_id or "base"))

    async def _tried(
        self, future: Future, work: Callable[[], Awaitable[tuple[Form, bytes]]]
    ) -> tuple[Form, bytes]:
        """Return an answer, which may be why there is none."""
        deadline = self._clock() + self._config.services.stall_timeout_s
        while True:
            try:
                return await work()
            except (ContractError, ConfigError, IntegrityError) as error:
                return error_of(str(error), "user")
            except (UnavailableError, OSError) as error:
                _log.warning("run.unreached", error=str(error))
                # A step that was begun may be made already: to go on without it would be to go on for ever.
                if self._clock() > deadline and future.step is None:
                    return error_of(str(error), "server")
                future.waiting_for = str(error)
                await asyncio.sleep(RETRY_S)
            except AntiphonError as error:
                return error_of(str(error), "server")
            except Exception as error:  # noqa: BLE001 - it would end the door for all, and at each start again
                _log.exception("call.failed", future=future.id)
                return error_of(f"the door failed at this call: {error!r}; report it", "server")

    # Models.

    async def create_model(self, owner: str, said: wire.NewModel, body: bytes) -> Future:
        """Begin a model of a session: a run of its own."""
        session = self.session(owner, said.session_id)
        name = f"{session.id}:train:{said.model_seq_id}"
        if name not in self.models:
            self._check_base(said.base_model)
            if said.optimizer_config.type not in ("adam", "adamw"):
                raise ContractError(
                    f"optimizer {said.optimizer_config.type[:40]} is not served here; use adamw"
                )
            rank = said.lora_config.rank if self._config.door.weights == "adapters" else 0
            await self._add_model(name, session, said.model_seq_id, said.base_model, rank, said.user_metadata)
        return await self.futures.submit(f"{name}:0", name, 0, "create_model", body)

    async def load_new(self, owner: str, said: wire.LoadWeights, body: bytes) -> Future:
        """Begin a model of a session with saved weights."""
        session = self.session(owner, said.session_id or "")
        if said.model_seq_id is None:
            raise ContractError("model_seq_id is missing; give it with session_id, or model_id and seq_id")
        name = f"{session.id}:train:{said.model_seq_id}"
        if name not in self.models:
            found, base = self._find(owner, said.path), self.base_models[0]
            found.saved.check_trainable()
            await self._add_model(
                name, session, said.model_seq_id, base, found.order.rank, said.user_metadata
            )
        return await self.futures.submit(f"{name}:0", name, 0, "load_weights", body)

    async def in_order(self, owner: str, said: wire.InOrder, call: str, body: bytes) -> Future:
        """Take in a call that changes a model."""
        model = self.model(owner, said.model_id)
        name = f"{model.id}:{said.seq_id}"
        if self.futures.find(name) is None and said.seq_id < model.next_seq:
            raise ContractError(
                f"call {said.seq_id} of model {model.id} was done and its answer told; create a new model"
            )
        return await self.futures.submit(name, model.id, said.seq_id, call, body)

    def model(self, owner: str, name: str) -> Model:
        """Return a model of this owner."""
        found = self.models.get(name)
        if found is None or not self._owns(owner, found.session):
            raise Unknown(f"there is no model {name[:80]} of yours here; create it first")
        self._beats[found.session] = self._clock()
        return found

    async def info(self, owner: str, said: wire.OfModel) -> dict[str, Any]:
        """Return what a client is told of a model."""
        model = self.model(owner, said.model_id)
        info = (await self._run(model.run_id)).info
        data = {"arch": info.architecture, "model_name": model.base_model, "tokenizer_id": info.tokenizer}
        named = {"type": "get_info", "model_data": data, "model_id": model.id, "model_name": model.base_model}
        return named | {"is_lora": info.rank > 0} | ({"lora_rank": info.rank} if info.rank else {})

    async def unload(self, owner: str, said: wire.OfModel) -> dict[str, Any]:
        """Give the place of a model back; the next call opens it again."""
        model = self.model(owner, said.model_id)
        await self._close(model.run_id)
        return {"type": "unload_model", "model_id": model.id}

    async def capabilities(self, owner: str) -> dict[str, Any]:
        """Return what is served here."""
        most = self._config.rollout.max_model_tokens
        return {"supported_models": [{"model_name": a, "max_context_length": most} for a in self.base_models]}

    @property
    def base_models(self) -> list[str]:
        """Return how clients may call the model that is served here."""
        path = self._config.model.path
        return list(dict.fromkeys([*self._config.door.base_models, Path(path).name, path]))

    def _check_base(self, name: str) -> None:
        if name not in self.base_models:
            raise ContractError(
                f"base model {name[:80]!r} is not here; use one of {', '.join(self.base_models)}, or "
                "add the name to door.base_models"
            )

    async def _add_model(
        self, name: str, session: Session, number: int, base: str, rank: int, metadata: dict[str, Any] | None
    ) -> None:
        made = Model(
            id=name,
            session=session.id,
            run_id=f"{self._name}-{session.id}-{number}",
            base_model=base,
            rank=rank,
            metadata=metadata,
        )
        await self._journal.write(kept.keep("model", name, _bytes(made)))
        if name not in self.models:  # a repetition came meanwhile
            self.models[name], self._lines[name] = made, _Line(self._clock())
            self._users[made.run_id].add(session.id)

    async def _work(self, model: Model, line: _Line) -> None:
        """Do the calls of a model, as long as the next one is there."""
        self._busy[model.session] += 1
        while (future := line.waiting.get(model.next_seq)) is not None:
            body = self._journal.body(future.id)
            future.waiting_for = ""
            form, said = await self._tried(future, lambda: self._do(model, line, future, body))  # noqa: B023
            del line.waiting[future.seq]
            model.next_seq += 1
            await self.futures.answer(future, form, said, kept.keep("model", model.id, _bytes(model)))
        line.busy = False
        self._busy[model.session] -= 1

    async def _do(self, model: Model, line: _Line, future: Future, body: bytes) -> tuple[Form, bytes]:
        if line.lost:
            sentence, line.lost = line.lost, ""
            raise ContractError(sentence)
        if future.seq == 0:  # a client that just ended may have the place that the new model needs
            await self._close_silent()
        match future.call:
            case "create_model":
                said = read_json(wire.NewModel, body)
                await self._run(model.run_id, _order(model, said))
                return _json(model_id=model.id, type="create_model")
            case "load_weights":
                return await self._load(model, line, future, read_json(wire.LoadWeights, body))
            case "forward_backward":
                return await self._forward_backward(model, line, future, wire.read_call(body))
            case "optim_step":
                adam = read_json(wire.Step, body).adam_params.record()
                run = await self._run(model.run_id)
                async with self._stepping(model, line, future, run) as step:
                    metrics = await run.step(step, await self._calls(line, run, step), adam)
                return _json(type="optim_step", metrics=metrics)
            case "save_weights":
                saving = read_json(wire.SaveWeights, body)
                saved = await self._save(model, "weights", saving.path or f"{future.seq:06d}", saving)
                return _json(type="save_weights", path=saved.saved.path)
            case "save_weights_for_sampler":
                return await self._save_for_sampler(model, read_json(wire.SaveForSampler, body))
        raise ContractError(f"{future.call} is not served here")

    async def _load(
        self, model: Model, line: _Line, future: Future, said: wire.LoadWeights
    ) -> tuple[Form, bytes]:
        found = self._find(self.sessions[model.session].owner, said.path)
        order = replace(found.order, description=wire.text(model.metadata)) if future.seq == 0 else None
        run = await self._run(model.run_id, order)
        async with self._stepping(model, line, future, run) as step:
            await run.load(step, found.saved, said.optimizer)
        return _json(type="load_weights", path=said.path, model_id=model.id)

    @asynccontextmanager
    async def _stepping(
        self, model: Model, line: _Line, future: Future, run: ClientRun
    ) -> AsyncIterator[int]:
        """Yield which step a call makes; known before it is begun, so that it is made once."""
        if future.step is None:
            await self._journal.write(kept.stepping(future.id, run.version))
            future.step = run.version
        made = False
        try:
            yield future.step
            made = True
        except (ContractError, IntegrityError):
            made = run.version > future.step  # it was skipped; before that its calls wait for another step
            raise
        finally:
            if made:
                model.stepped_seq = future.seq
                line.held.clear()
                line.calls.clear()

    async def _forward_backward(
        self, model: Model, line: _Line, future: Future, said: pb.ForwardBackwardRequest
    ) -> tuple[Form, bytes]:
        run = await self._run(model.run_id)
        call = await self._call(run, said, run.version)
        result = await run.call(len(line.held), call)
        if not call.forward_only:
            line.held.append(future)
            line.calls[future.id] = call
        return "protobuf", wire.forward_backward_output(result)

    async def _calls(self, line: _Line, run: ClientRun, version: int) -> list[TrainingCall]:
        for one in line.held:
            if one.id not in line.calls:  # of before a restart
                line.calls[one.id] = await self._call(
                    run, wire.read_call(self._journal.body(one.id)), version
                )
        return [line.calls[one.id] for one in line.held]

    async def _call(self, run: ClientRun, said: pb.ForwardBackwardRequest, version: int) -> TrainingCall:
        call = wire.training_call(said)
        if call.loss != "stable_reinforce":
            return call
        if self._config.door.stable_reinforce == "refuse":
            raise ContractError(_STABLE)
        return replace(call, data=tuple([await self._recorded(run, one, version) for one in call.data]))

    async def _recorded(self, run: ClientRun, datum: Datum, version: int) -> Datum:
        """Return a datum with the log-probabilities and the staleness that were recorded of its tokens."""
        logprobs = np.zeros(datum.targets.size, dtype=np.float32)
        staleness, named = np.zeros_like(logprobs), np.zeros(logprobs.size, dtype=bool)
        for name, first, at, count in datum.sequences:
            request_id, _, place = name.rpartition("/")
            sequences = await run.sequences(request_id)
            one = _at(sequences, place)
            if one is None:
                raise ContractError(f"sequence {name[:80]} was not sampled from this model; train on its own")
            if not 0 <= first <= first + count <= one.token_ids.size or at + count > datum.targets.size:
                raise ContractError(f"sequence {name[:80]} has {one.token_ids.size} tokens, not those named")
            logprobs[at : at + count] = one.logprobs[first : first + count]
            named[at : at + count] = True
            for span in one.spans:
                start, stop = max(span.start, first), min(span.stop, first + count)
                staleness[at + start - first : at + max(start, stop) - first] = version - span.version
        advantages = datum.inputs.get("advantages", logprobs)
        if advantages.shape == named.shape and (loose := (advantages != 0) & ~named).any():
            raise ContractError(
                f"position {int(np.argmax(loose))} has an advantage, but no span says which sequence it was "
                "sampled as; give sampled_tokens spans, or use importance_sampling"
            )
        return replace(datum, inputs={**datum.inputs, "logprobs": logprobs, "staleness": staleness})

    async def _save(self, model: Model, kind: Any, name: str, said: wire.SaveWeights) -> SavedVersion:
        run, saved = await self._run(model.run_id), SavedWeights(model.run_id, kind, name)
        before = self._saved(saved)
        if said.path is not None and _EPHEMERAL.fullmatch(said.path):
            raise ContractError(f"{said.path} names weights of a sampling session; give another name")
        if before is not None and before.version != run.version and not said.overwrite:
            raise ContractError(f"{saved.path} is there already; give another name, or overwrite it")
        async with self._naming[model.run_id]:
            return await run.save(saved, said.ttl_seconds)

    async def _save_for_sampler(self, model: Model, said: wire.SaveForSampler) -> tuple[Form, bytes]:
        number = said.sampling_session_seq_id
        if said.path is not None or number is None:
            if said.path is None:
                raise ContractError("path and sampling_session_seq_id are both missing; give one")
            saved = (await self._save(model, "sampler_weights", said.path, said)).saved
            return _json(type="save_weights_for_sampler", path=saved.path)
        name, kept_as, version = f"{model.session}:sample:{number}", "", None
        if said.kind == "snapshot":
            kept_as = f"session-{number}"
            version = (await self._save(model, "sampler_weights", kept_as, said)).version
        made = Sampler(
            id=name,
            session=model.session,
            run_id=model.run_id,
            version=version,
            base_model=model.base_model,
            kept=kept_as,
        )
        await self._add_sampler(made)
        mine = sorted(self._kept[model.run_id].values(), key=lambda one: int(one.kept.rpartition("-")[2]))
        for old in mine[: -(self._config.door.max_staleness + 2)]:
            if all(one.form is not None for one in self.futures.of(old.id)):
                await self._end(old)
        return _json(type="save_weights_for_sampler", path=None, sampling_session_id=name)

    def _runs_of(self, owner: str) -> set[str]:
        """Return the runs whose saved weights an owner may see."""
        own = {one.run_id for one in self.models.values() if self._owns(owner, one.session)}
        return {*self._runs.runs()} if owner == HERE else own & {*self._runs.runs()}

    def _saved(self, saved: SavedWeights) -> SavedVersion | None:
        """Return saved weights whose time is not over; those whose is are dropped a little later."""
        found = self._runs.find(saved)
        return None if found is None or _is_over(found) else found

    def _find(self, owner: str, path: str) -> SavedVersion:
        """Return what is saved under a path.

        Raises:
            ContractError: when nothing of this owner is.
        """
        saved = saved_at(path)
        found = self._saved(saved) if saved.run_id in self._runs_of(owner) else None
        if found is None:
            raise ContractError(f"{path[:120]} is not here; list the checkpoints that are")
        return found

    async def weights_info(self, owner: str, said: wire.WeightsInfo) -> dict[str, Any]:
        """Return what a client is told of saved weights."""
        order = self._find(owner, said.tinker_path).order
        parts = order.targets or ("attn", "mlp", "unembed")
        named = {
            "base_model": self.base_models[0],
            "is_lora": order.rank > 0,
            "lora_rank": order.rank or None,
        }
        return named | {f"train_{one}": one in parts for one in ("attn", "mlp", "unembed")}

    async def checkpoints(self, owner: str, id: str | None = None) -> dict[str, Any]:
        """Return what is saved, of one model or run, or of all."""
        run_id = self.models[id].run_id if id in self.models else id
        mine = self._runs_of(owner)
        if run_id is not None and run_id not in mine:
            raise Unknown(f"there is no training run {run_id[:80]} here; list those that are")
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        found = [
            {
                "checkpoint_id": f"{one.saved.kind}/{one.saved.name}",
                "checkpoint_type": kinds[one.saved.kind],
                "time": _time(one.at),
                "tinker_path": one.saved.path,
                "size_bytes": one.bytes,
                "public": False,
                "expires_at": None if one.expires_at is None else _time(one.expires_at),
            }
            for one in self._runs.saved(run_id)
            if one.saved.run_id in mine and not _is_over(one) and not _EPHEMERAL.fullmatch(one.saved.name)
        ]
        return {"checkpoints": found, **_all(found)}

    async def training_runs(self, owner: str) -> dict[str, Any]:
        """Return the models of an owner, but those that were refused."""
        created = {*self._runs.runs()}
        found = [
            {
                "training_run_id": one.run_id,
                "base_model": one.base_model,
                "model_owner": owner,
                "is_lora": one.rank > 0,
                "lora_rank": one.rank or None,
                "last_request_time": _time(self.sessions[one.session].created),
                "user_metadata": wire.text(one.metadata),
            }
            for one in self.models.values()
            if self._owns(owner, one.session) and one.run_id in created
        ]
        return {"training_runs": found, **_all(found)}

    async def training_run(self, owner: str, id: str) -> dict[str, Any]:
        """Return one model of an owner, by its own name or its run's."""
        wanted = self.models[id].run_id if id in self.models else id
        for one in (await self.training_runs(owner))["training_runs"]:
            if one["training_run_id"] == wanted:
                return dict(one)
        raise Unknown(f"there is no training run {id[:80]} of yours here; list those that are")

    async def drop(self, owner: str, id: str, checkpoint: str) -> dict[str, Any]:
        """Give up saved weights of this owner."""
        run_id = (await self.training_run(owner, id))["training_run_id"]
        found = self._find(owner, f"tinker://{run_id}/{checkpoint}")
        await self._drop(found.saved)
        return {}

    async def retrieve(self, owner: str, name: str) -> tuple[Form, bytes] | Future:
        """Return the answer to a call of this owner; as `Futures.retrieve`."""
        future = self.futures.find(name)
        if future is not None and future.of and not self._owns(owner, _session(future.of)):
            raise Gone(f"there is no answer to {name[:80]} here any more; ask again")
        return await self.futures.retrieve(name)

    # Samples.

    async def create_sampler(self, owner: str, said: wire.NewSampler) -> dict[str, Any]:
        """Begin to sample from saved weights, or from the base model."""
        session = self.session(owner, said.session_id)
        name = f"{session.id}:sample:{said.sampling_session_seq_id}"
        made = Sampler(id=name, session=session.id, base_model=said.base_model or self.base_models[0])
        if said.model_path is not None:
            found = self._find(owner, said.model_path)
            made.run_id, made.version, made.path = found.saved.run_id, found.version, said.model_path
        else:
            self._check_base(made.base_model)
        before = self.samplers.get(name)
        if before is not None and (before.path, before.base_model) != (made.path, made.base_model):
            raise ContractError(f"sampling session {name} is another one; give it another number")
        await self._add_sampler(before or made)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, owner: str, name: str) -> Sampler:
        """Return a sampler of this owner."""
        found = self.samplers.get(name)
        if found is None or not self._owns(owner, found.session):
            raise Unknown(f"there is no sampling session {name[:80]} of yours here; create one")
        self._beats[found.session] = self._clock()
        return found

    async def sample(self, owner: str, said: wire.Sample, body: bytes) -> Future:
        """Take in a request for samples.

        Raises:
            Busy: when as many wait as are taken in.
        """
        sampler = self.sampler(owner, said.sampling_session_id)
        name = f"{sampler.id}:{said.seq_id}"
        if self.futures.find(name) is None and self._queued[sampler.run_id or "base"] >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} requests wait for samples of this model; ask again later")
        return await self.futures.submit(name, sampler.id, said.seq_id, "asample", body)

    async def show_sampler(self, owner: str, id: str) -> dict[str, Any]:
        """Return what a sampler samples from."""
        found = self.sampler(owner, id)
        return {"sampler_id": id, "base_model": found.base_model, "model_path": found.path}

    async def sequence(self, owner: str, id: str) -> dict[str, Any]:
        """Return what is recorded of a sampled sequence."""
        request_id, _, place = id.rpartition("/")
        sampler = self.sampler(owner, request_id.rpartition(":")[0])
        run = await self._run(sampler.run_id) if sampler.run_id else None
        found = () if run is None else await run.sequences(request_id)
        one, future = _at(found, place), self.futures.find(request_id)
        if one is None:
            raise Unknown(f"there is no sequence {id[:80]} here; take its sequence_id")
        cached = None
        if future is not None and future.form == "protobuf":
            cached = pb.SampleResponse.FromString(self._journal.answer(request_id)).prompt_cache_hit_tokens
        return {
            "sequence_id": id,
            "run": sampler.run_id,
            "versions": [{"version": a.version, "start": a.start, "stop": a.stop} for a in one.spans],
            "seed": one.seed,
            "prompt_cache_hit_tokens": cached,
            "digest": digest_bytes(one.token_ids.astype("<i4").tobytes()),
        }

    async def _add_sampler(self, made: Sampler) -> None:
        self.samplers[made.id] = made
        self._note_sampler(made)
        await self._journal.write(kept.keep("sampler", made.id, _bytes(made)))

    def _note_sampler(self, made: Sampler) -> None:
        if made.run_id:
            self._users[made.run_id].add(made.session)
        if made.kept:
            self._kept[made.run_id][made.id] = made

    async def _end(self, sampler: Sampler) -> None:
        """Give up what is kept for a sampler."""
        if sampler.kept:
            await self._drop(SavedWeights(sampler.run_id, "sampler_weights", sampler.kept))
            self._kept[sampler.run_id].pop(sampler.id, None)
        sampler.kept, sampler.ended = "", wall_clock()
        await self._journal.write(kept.keep("sampler", sampler.id, _bytes(sampler)))

    async def _sample(self, future: Future, session: str, queue: str) -> None:
        self._busy[session] += 1
        self._queued[queue] += 1
        said = read_json(wire.Sample, self._journal.body(future.id))
        form, answer = await self._tried(future, lambda: self._sampled(future, said))
        await self.futures.answer(future, form, answer)
        self._busy[session] -= 1
        self._queued[queue] -= 1

    async def _sampled(self, future: Future, said: wire.Sample) -> tuple[Form, bytes]:
        sampler, tokens = self.samplers[future.of], said.tokens()
        if not sampler.run_id:
            await self._settle_base(sampler)
        run = await self._run(sampler.run_id)
        request = SampleRequest(
            request_id=future.id,
            prompt_token_ids=tokens,
            seeds=said.seeds(),
            sampling=said.parameters(run.info.max_tokens - len(tokens)),
            version=sampler.version,
            max_staleness=self._config.door.max_staleness,
        )
        reply = await run.sample(request, POLL_S)
        while not reply.trajectories:
            future.waiting_for = reply.waiting_for
            reply = await run.sample(request, POLL_S)
        said.check_tops(sum(one.token_ids.size for one in reply.trajectories))
        version = run.version if sampler.version is None else sampler.version
        prompt = top = None
        if said.prompt_logprobs or said.topk_prompt_logprobs:
            scores = await run.score(version, tokens, said.topk_prompt_logprobs)
            scores = wire.last_of(scores, said.prompt_logprobs_last_n)
            prompt = scores.logprobs if said.prompt_logprobs else None
            top = scores if said.topk_prompt_logprobs else None
        tops = [
            wire.behind(
                await run.score(version, (*tokens, *one.token_ids.tolist()), said.topk_sample_logprobs),
                len(tokens),
            )
            for one in reply.trajectories
            if said.topk_sample_logprobs
        ]
        return "protobuf", wire.sample_response(reply, prompt, top, tops)

    async def _settle_base(self, sampler: Sampler) -> None:
        """Find a run of the session, whose version 0 stays stored, or create one that trains nothing."""
        async with self._base:
            own = (one for one in self.models.values() if one.session == sampler.session and one.next_seq)
            run_id = next((one.run_id for one in own if one.run_id in self._open), "")
            if not run_id:
                which = digest_bytes(self._config.model.model_dump_json().encode())[:8]
                run_id = f"{self._name}-base-{which}"
                self._users[run_id].add(sampler.session)
                await self._run(run_id, ModelOrder(rank=0))
            sampler.run_id = run_id
            sampler.version = 0
            await self._add_sampler(sampler)


@asynccontextmanager
async def open_door(config: RunConfig, name: str, runs: ClientRuns, folder: Path) -> AsyncIterator[Door]:
    """Keep a door while the block lasts, with what it knew before.

    Raises:
        UnavailableError: when its journal cannot be used.
    """
    async with open_journal(folder / "journal.sqlite") as journal, asyncio.TaskGroup() as tasks:
        door = Door(config, name, runs, journal, tasks, asyncio.get_running_loop().time)
        door.take_up()
        try:
            yield door
        finally:
            door.stop()


def _order(model: Model, said: wire.NewModel) -> ModelOrder:
    wanted = said.lora_config
    parts = {"attn": wanted.train_attn, "mlp": wanted.train_mlp, "unembed": wanted.train_unembed}
    targets = () if all(parts.values()) or not model.rank else tuple(one for one, on in parts.items() if on)
    return ModelOrder(model.rank, targets, wanted.seed, wire.text(said.user_metadata))


def _session(name: str) -> str:
    """Return the session of a model or sampler by its name."""
    return name.partition(":")[0]


def _is_over(saved: SavedVersion) -> bool:
    return saved.expires_at is not None and saved.expires_at <= wall_clock()


def _at(sequences: Sequence[Trajectory], place: str) -> Trajectory | None:
    """Return the sequence at a place that a client wrote, or None."""
    return next((one for number, one in enumerate(sequences) if str(number) == place), None)


def _bytes(said: BaseModel) -> bytes:
    return said.model_dump_json().encode()


def _json(**said: Any) -> tuple[Form, bytes]:
    return "json", json.dumps(said).encode()


def _all(found: list[Any]) -> dict[str, Any]:
    return {"cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
