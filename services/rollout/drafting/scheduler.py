"""Draft scheduler: decides for every engine step what is drafted, and counts what came of it.

The engine reports which requests came, what was verified and how long a step took; it gets
drafts. Groups share what their prompt's history and their finished siblings say. Nothing
here knows vLLM, and nothing here can change a token: a draft is only ever a guess to verify. Nor
can a fault in here end a run: the scheduler logs it once, closes, and the engine continues without it.

Legend: B rows of the batch, one per request; slots are small numbers that stand for requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from antiphon.api.engine import EngineRequest
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.forest import DraftForest, DraftWindows
from antiphon.core.drafting.gate import DraftGate, StepPlan
from antiphon.core.drafting.history import weighted
from antiphon.core.drafting.statistics import PROMISING
from antiphon.core.records import DraftingStatistics, IntArray

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")


_Method = Callable[Concatenate["DraftScheduler", _P], _T]


def guarded(fallback: _F) -> Callable[[_Method[_P, _T]], _Method[_P, _T | _F]]:
    """Let a method answer `fallback` once the scheduler is closed; a method that fails closes it."""

    def wrap(method: _Method[_P, _T]) -> _Method[_P, _T | _F]:
        @wraps(method)
        def call(scheduler: "DraftScheduler", /, *arguments: _P.args, **options: _P.kwargs) -> _T | _F:
            if scheduler.closed:
                return fallback
            try:
                return method(scheduler, *arguments, **options)
            # Whatever is wrong with a draft source, the run must continue: drafts only save time.
            except Exception as error:  # noqa: BLE001
                scheduler.close(f"the drafter failed: {type(error).__name__}: {error}")
                return fallback

        return call

    return wrap


Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Script = Callable[[str, list[int]], Sequence[int]]
"""(request id, completion so far) -> drafted tokens."""

_log = structlog.get_logger(__name__)

_NO_DRAFT = StepPlan(draft=False, floor=1.0)

IDLE_SHARE = 8
"""Of the steps in which there is nothing to draft from, one in this many is shown to the gate."""

RECENT_TOKENS = 1024.0
"""Drafted tokens that the share of right ones is taken of, older ones fading."""

RECENT_REQUESTS = 32
"""Requests over which the share is taken of those that came with something to draft from."""


@dataclass(slots=True)
class _Group:
    """Requests that draft from one another."""

    prompt: Sequence[int]
    past: Sequence[tuple[IntArray, float]]
    """Past completions and their weights, until the forest has them."""
    capacity: int
    """Most tokens of one of its requests."""
    handle: int | None
    """The forest's name for it; None before anything was drafted for one of its requests."""
    live: int
    sourced: bool
    """Whether there is anything but the requests' own text to draft from."""
    history: bool


@dataclass(slots=True)
class _Step:
    """What one step drafts for the next."""

    plan: StepPlan = _NO_DRAFT
    asked: bool = False
    """Whether the gate was asked."""
    dropped: bool = False
    """Whether its drafts are not to be verified."""
    drafter_s: float = 0.0
    """Seconds in the drafter."""


class DraftScheduler:
    """Drafts of one engine. Slots are the caller's; it reuses them after `release`."""

    def __init__(
        self,
        settings: DraftingSection,
        max_window: int,
        slots: int,
        vocabulary: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Start empty.

        Args:
            settings: the run's drafting section.
            max_window: most tokens of one draft the engine has room for.
            slots: requests in flight at the same time; more are allowed.
            vocabulary: token ids outside [0, vocabulary) are never drafted.
            clock: seconds, of the same kind as those that `end_step` is told.
        """
        self._settings = settings
        self._max_window = max_window
        self._window_size = min(max_window, settings.max_window)
        self._vocabulary = vocabulary
        self.clock = clock
        self._drafter_share_s = self._sampler_share_s = 0.0
        self._counts = np.zeros((8, 0), dtype=np.int64)
        """By slot: passes, tokens drafted, covered and accepted, those of promising and of rested steps, and
        what the request came with: tokens of its prompt, most tokens of its completion. A row each, named
        once: adding to some of a column costs twice as much, as does unpacking them."""
        self._since = np.zeros((2, 0), dtype=np.float64)
        self._size(slots)
        self.script: Script | None = None
        """Drafts come from here instead, ungated; for tests of the engine."""
        self.on = True
        """Whether drafts are wanted at all."""
        self.open()

    def open(self) -> None:
        """Begin, or begin again after a fault; no request may be in flight."""
        slots, settings = len(self._prompt_length), self._settings
        self._forest = DraftForest(slots, self._max_window, settings.min_match)
        self._windows = DraftWindows(slots, self._window_size)
        self._gate = DraftGate(settings.probe_steps)
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[int, str] = {}
        self._request_of: dict[int, str] = {}
        self._rows: Int64Array = np.zeros(0, dtype=np.int64)
        """Slots of the rows of the newest step without drafts."""
        self._row_passes = 0
        """Steps without drafts of these rows that `_passes` does not count yet."""
        self._waiting: set[int] = set()
        """Slots that the forest does not know yet: nothing was drafted since they came."""
        self._idle_steps = 0
        self._sourced = 0
        self._sourced_lately = 0.0
        """Share of the newest requests that came with something to draft from."""
        self._now = self._before = _Step()
        """The step that runs, and the one before, whose drafts this one verifies."""
        self._recent_drafted = self._recent_accepted = 0.0
        self.closed = False
        """Whether a fault ended drafting."""

    def close(self, reason: str) -> None:
        """Draft no more: one line in the log, and every call from now on does nothing."""
        self.closed, self.on, self.script = True, False, None
        _log.warning("drafting.off", reason=reason)

    def _size(self, slots: int) -> None:
        """Make room for this many slots; what is known of those that there are stays."""
        old: int = self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, slots - old)))
        self._since = np.pad(self._since, ((0, 0), (0, slots - old)))
        self._passes, self._drafted, self._covered, self._accepted, *others = self._counts
        self._promising, self._rested, self._prompt_length, self._max_tokens = others

    @guarded(None)
    def admit(self, slot: int, request: EngineRequest) -> None:
        """Take a request in; the first one of a group opens it, with its history."""
        if slot >= len(self._prompt_length):
            self._size(max(slot + 1, 2 * len(self._prompt_length)))
        name = request.group or f"\0{request.request_id}"
        group = self._groups.get(name) or self._open_group(name, request)
        group.live += 1
        self._sourced += group.sourced
        self._sourced_lately += (group.sourced - self._sourced_lately) / RECENT_REQUESTS
        self._group_of[slot] = name
        self._request_of[slot] = request.request_id
        self._waiting.add(slot)
        self._windows.open(slot)
        self._counts[:, slot] = 0
        self._prompt_length[slot] = len(request.prompt_token_ids)
        self._max_tokens[slot] = request.sampling.max_tokens
        self._since[:, slot] = self._drafter_share_s, self._sampler_share_s

    @guarded(None)
    def release(self, slot: int, completion: IntArray | None, given: int = 0) -> DraftingStatistics | None:
        """Let a request go and say what drafting did for it.

        Args:
            slot: the request's; it may be given to another one.
            completion: [T] int32 what was sampled, which its siblings may draft from; None when the
                request was given up.
            given: tokens of it that the request came with; the statistics leave them out.

        Returns:
            None once drafting has ended by a fault.
        """
        name = self._group_of.pop(slot)
        del self._request_of[slot]
        group = self._groups[name]
        group.live -= 1
        self._sourced -= group.sourced
        sibling = completion is not None and group.live > 0
        if completion is not None and sibling:
            self._follow(slot, group)
            self._take_in(slot, completion)
        if slot in self._waiting:
            self._waiting.remove(slot)
        else:
            self._forest.close_request(slot, sibling)
        if group.live == 0:
            if group.handle is not None:
                self._forest.close_group(group.handle)
            del self._groups[name]
        elif sibling and not group.sourced:
            group.sourced = True
            self._found_sources(group.live)
        self._count_passes()
        passes, drafted, covered, accepted, promising, rested, *_ = self._counts[:, slot].tolist()
        drafter_s, sampler_s = self._since[:, slot].tolist()
        tokens = 0 if completion is None else len(completion) - given
        return DraftingStatistics(
            tokens=tokens,
            passes=passes,
            drafted=drafted,
            # The last draft may reach beyond the end, and a request that was given up has no tokens.
            covered=min(covered, tokens),
            accepted=min(accepted, tokens),
            with_history=int(group.history),
            drafter_s=self._drafter_share_s - drafter_s,
            sampler_s=self._sampler_share_s - sampler_s,
            gain=self._gate.gain,
            promising=min(promising, tokens),
            rested=min(rested, tokens),
        )

    @guarded(False)
    def begin_step(self) -> bool:
        """Decide whether drafts are made at the end of the step that starts now."""
        asked = self.script is None and self.on and self._sourced > 0
        plan = self._gate.plan(len(self._group_of)) if asked else _NO_DRAFT
        if self.script is not None:
            plan = StepPlan(draft=True, floor=0.0)
        self._before, self._now = self._now, _Step(plan, asked)
        return plan.draft

    @guarded(None)
    def propose(
        self, slots: Int64Array, token_ids: Int32Array, lengths: Int64Array
    ) -> list[list[int]] | None:
        """Draft for the next step.

        Args:
            slots: [B] slot of each row.
            token_ids: [>= B, L] sequences so far, prompt first.
            lengths: [B] their lengths.

        Returns:
            B lists of drafted tokens, some or all of them empty; None once drafting has ended by a fault.
        """
        now = self._now
        if not now.plan.draft:
            return [[] for _ in range(len(slots))]
        begun = self.clock()
        for slot in tuple(self._waiting):
            self._follow(slot, self._groups[self._group_of[slot]])
        room = self._max_tokens[slots] - (lengths - self._prompt_length[slots]) - 1
        if self.script is not None:
            drafts = self._scripted(slots, token_ids, lengths, room)
        else:
            limits = np.clip(self._windows.limits(slots), 0, np.minimum(room, now.plan.most).clip(0))
            tokens, counts, chances = self._forest.draft(slots, token_ids, lengths, limits, now.plan.floor)
            widest = int(counts.max(initial=0))
            drafts = [row[:n] for row, n in zip(tokens[:, :widest].tolist(), counts.tolist(), strict=True)]
            made = np.arange(widest) < counts[:, None]
            expected = float(chances[:, :widest][made].sum())
            if not self._gate.verifies(len(slots), int(counts.sum()), expected):
                drafts, now.plan, now.dropped = [[] for _ in slots], _NO_DRAFT, True
        now.drafter_s = self.clock() - begun
        self._drafter_share_s += now.drafter_s / max(1, len(slots))
        return drafts

    @guarded(None)
    def verified(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take note of a step that verified drafts: [B] each."""
        self._passes[slots] += 1
        self._drafted[slots] += drafted
        self._covered[slots] += accepted + (accepted < drafted)
        self._accepted[slots] += accepted
        if self.script is None:
            self._promising[slots] += (accepted + 1) * self._promises
            total = int(drafted.sum())
            fade = max(1.0 - total / RECENT_TOKENS, 0.0)
            self._recent_drafted = fade * self._recent_drafted + total
            self._recent_accepted = fade * self._recent_accepted + int(accepted.sum())
            self._gate.promising = self._promises
            self._windows.learn(slots, drafted, accepted)
            self._forest.learn(slots, accepted)

    @guarded(None)
    def passed(self, slots: Int64Array) -> None:
        """Take note of a step without drafts, [B]; the same array as before stands for the same rows."""
        if slots is not self._rows:
            self._count_passes()
            self._rows = slots
        self._row_passes += 1
        if self._before.asked and self._promises:
            self._promising[slots] += 1
            self._rested[slots] += not self._before.plan.draft

    def _count_passes(self) -> None:
        """Add the steps without drafts since the rows changed: one by one they cost more than all else here
        while drafts rest."""
        self._passes[self._rows] += self._row_passes
        self._row_passes = 0

    @property
    def _promises(self) -> bool:
        """Whether this many of the newest drafted tokens were right that drafts are expected to pay."""
        return self._recent_accepted > PROMISING * self._recent_drafted

    @guarded(None)
    def sampled(self, requests: int, seconds: float) -> None:
        """Take note of the seconds that the sampler took for a step of `requests` rows."""
        self._sampler_share_s += seconds / max(1, requests)

    @guarded(None)
    def end_step(self, requests: int, rows: int, tokens: int, seconds: float) -> None:
        """Take note of a step that only decoded: what the gate compares."""
        if self.script is not None or not requests:
            return
        before, stands_for, unused_s = self._before, 1, 0.0
        if before.dropped:
            unused_s = before.drafter_s
        elif not before.plan.draft and not (self._sourced and self._gate.is_open(requests)):
            # Nothing to decide soon: one step in a few keeps the undrafted time known, for less.
            self._idle_steps += 1
            if self._idle_steps % IDLE_SHARE:
                return
            stands_for = IDLE_SHARE if self._sourced else 1
        # Drafts are made at the end of one step and verified in the next, which is charged with both.
        seconds += before.drafter_s - unused_s - self._now.drafter_s
        self._gate.observe(requests, rows, tokens, seconds, before.plan.draft, stands_for, unused_s)

    def _follow(self, slot: int, group: _Group) -> None:
        """Let the forest follow a request, and open its group, unless it does so already."""
        if slot not in self._waiting:
            return
        self._waiting.remove(slot)
        if group.handle is None:
            group.handle = self._forest.open_group(group.prompt, group.past, group.capacity, self._vocabulary)
            group.past = ()
        self._forest.open_request(
            slot, group.handle, int(self._prompt_length[slot]), int(self._max_tokens[slot])
        )

    def _take_in(self, slot: int, completion: IntArray) -> None:
        """Bring the forest's text of a request up to date: it was not asked in steps without drafts."""
        length = int(self._prompt_length[slot])
        row = np.zeros((1, length + len(completion)), dtype=np.int32)
        row[0, length:] = completion
        slots, none = np.array([slot]), np.zeros(1, dtype=np.int64)
        self._forest.draft(slots, row, np.array([row.shape[1]]), none, 1.0)

    def _open_group(self, name: str, request: EngineRequest) -> _Group:
        settings, history = self._settings, request.history
        past = weighted(history, settings.recency, settings.reward_weight) if history else []
        group = self._groups[name] = _Group(
            prompt=request.prompt_token_ids,
            past=past,
            capacity=request.sampling.max_tokens,
            handle=None,
            live=0,
            sourced=bool(past),
            history=bool(past),
        )
        if group.sourced:
            self._found_sources(0)
        return group

    def _found_sources(self, requests: int) -> None:
        # Where most requests come with history, the next one's is no news: a gate that closed stays so.
        if self._sourced * 2 <= len(self._group_of) and self._sourced_lately <= 0.5:
            self._gate.wake()
        self._sourced += requests

    def _scripted(
        self, slots: Int64Array, token_ids: Int32Array, lengths: Int64Array, room: Int64Array
    ) -> list[list[int]]:
        assert self.script is not None
        drafts = []
        for row, slot in enumerate(slots.tolist()):
            request_id = self._request_of.get(slot)
            so_far = token_ids[row, self._prompt_length[slot] : lengths[row]].tolist()
            wanted = [] if request_id is None else list(self.script(request_id, so_far))
            drafts.append(wanted[: max(0, min(self._window_size, int(room[row])))])
        return drafts
